"""The training loop: resuming, stopping, learning."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from redraft.errors import TrainingError
from redraft.train.batches import BatchPlan
from redraft.train.config import Recipe
from redraft.train.loop import CHECKPOINT, load_checkpoint, train

VOCAB = 50


@dataclass(frozen=True)
class GrowingRecipe(Recipe):
    """A model that gets a second layer at a step."""

    grow_step: int = 4
    adjustable: ClassVar[frozenset[str]] = frozenset({"steps", "epochs", "grow_step"})

    def course(self, step):
        return (*super().course(step), step >= self.grow_step)


RECIPE = GrowingRecipe(
    weights={"code": 0.5, "prose": 0.5}, steps=12, batch_tokens=128, seq_len=16, decay_seq_len=32, warmup_steps=2
)


class Growing(nn.Module):
    """The loss of the next token, from a token and layers with residuals."""

    lookahead = 1

    def __init__(self, recipe):
        super().__init__()
        self.recipe, self.embed = recipe, nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16, bias=False)])
        nn.init.normal_(self.embed.weight, std=0.3)

    def prepare(self, step):
        grows = step >= self.recipe.grow_step and len(self.layers) == 1
        if grows:
            self.layers.append(nn.Linear(16, 16, bias=False))
            nn.init.zeros_(self.layers[1].weight)
        return grows

    def loss(self, batch):
        hidden = self.embed(batch.tokens[:, :-1])
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        loss = nn.functional.cross_entropy((hidden @ self.embed.weight.T).flatten(0, 1), batch.tokens[:, 1:].flatten())
        return loss, {"ce": loss.item()}


def plan_for(recipe):
    """Tokens that count upwards, so that there is something to learn."""
    return BatchPlan(
        {k: (np.arange(4000) % VOCAB).astype(np.uint16) for k in recipe.weights}, recipe.weights, recipe.seed, 1
    )


def go(recipe, out, *, resume=False, stop_after=None, every=4, loss=None):
    """Train; `stop_after` simulates that the process is killed after that step. loss: instead of the objective's."""
    torch.manual_seed(recipe.seed)
    objective = Growing(recipe)
    losses = []
    if loss:
        honest = objective.loss
        objective.loss = lambda batch: loss(honest(batch))

    def report(step):
        losses.append(step.metrics)
        if step.step == stop_after:
            raise KeyboardInterrupt

    try:
        train(
            objective, plan_for(recipe), recipe, out, identity="x", resume=resume, checkpoint_every=every, report=report
        )
    except KeyboardInterrupt:
        assert stop_after is not None
    return objective, losses


@pytest.mark.parametrize("stop_after", [6, 9, 10])
def test_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path, stop_after):
    """The process is killed before the growth (6 resumes from 4) and inside the decay (9, 10 from 8)."""
    whole, losses = go(RECIPE, tmp_path / "whole")
    go(RECIPE, tmp_path / "killed", stop_after=stop_after)
    resumed, later = go(RECIPE, tmp_path / "killed", resume=True)
    assert later == losses[-len(later) :]
    assert len(later) == 12 - 4 * (stop_after // 4)
    assert len(whole.layers) == 2
    states = [one.state_dict().values() for one in (whole, resumed)]
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_loss_falls_and_growth_does_not_undo_it(tmp_path):
    _, losses = go(replace(RECIPE, steps=60, grow_step=30), tmp_path / "run")
    assert losses[-1]["ce"] < losses[0]["ce"] - 0.5
    assert abs(losses[30]["ce"] - losses[29]["ce"]) < 0.3


class _Poisoned(torch.autograd.Function):
    """A finite value whose gradient is not."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("nan")


@pytest.mark.parametrize(
    ("poison", "message"),
    [(lambda loss: loss * float("nan"), "the loss is nan"), (_Poisoned.apply, "the gradient's norm is nan")],
)
def test_what_is_not_finite_stops_and_keeps_the_last_checkpoint(tmp_path, poison, message):
    go(RECIPE, tmp_path, stop_after=5)
    before = (tmp_path / CHECKPOINT).read_bytes()
    calls = []

    def loss(found):
        calls.append(found)
        return (poison(found[0]) if len(calls) == 3 else found[0]), found[1]

    with pytest.raises(TrainingError, match=f"{message} at step 6; the last good checkpoint is in .*; resume"):
        go(RECIPE, tmp_path, resume=True, every=100, loss=loss)
    assert (tmp_path / CHECKPOINT).read_bytes() == before


def test_without_a_checkpoint_the_hint_is_to_start_again(tmp_path):
    with pytest.raises(TrainingError, match="the loss is inf at step 0; there is no checkpoint yet; start again"):
        go(RECIPE, tmp_path, loss=lambda found: (found[0] * float("inf"), {}))


def test_a_loss_without_a_gradient_changes_nothing(tmp_path):
    torch.manual_seed(RECIPE.seed)
    before = Growing(RECIPE).state_dict()
    objective, _ = go(replace(RECIPE, steps=1), tmp_path, loss=lambda found: (torch.tensor(0.0), {}))
    assert all(torch.equal(value, before[name]) for name, value in objective.state_dict().items())


def test_checkpoint_of_other_data_or_another_recipe_is_refused(tmp_path):
    go(RECIPE, tmp_path, stop_after=5)
    with pytest.raises(TrainingError, match="other data"):
        train(Growing(RECIPE), plan_for(RECIPE), RECIPE, tmp_path, identity="y", resume=True)
    with pytest.raises(TrainingError, match=r"matrix_lr was 0\.02, it is 0\.5"):
        go(replace(RECIPE, matrix_lr=0.5), tmp_path, resume=True)


def test_length_can_change_until_the_decay_begins(tmp_path):
    """A late token budget is valid, but a change after the decay began would change the schedule."""
    go(RECIPE, tmp_path, stop_after=5)
    go(replace(RECIPE, steps=16), tmp_path, resume=True, stop_after=13)
    assert load_checkpoint(tmp_path)["step"] == 12
    go(replace(RECIPE, steps=16), tmp_path, resume=True, stop_after=14, every=1)
    with pytest.raises(TrainingError, match="step 13, too late"):
        go(replace(RECIPE, steps=40), tmp_path, resume=True)
    with pytest.raises(TrainingError, match="too late"):
        go(replace(RECIPE, steps=16, grow_step=8), tmp_path, resume=True)


def test_interrupted_write_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    """A checkpoint written in place would be lost with the process that wrote it."""
    go(RECIPE, tmp_path, stop_after=5)
    honest = torch.save

    def torn(state, file):
        honest({"step": 0}, file)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", torn)
    go(RECIPE, tmp_path, resume=True, stop_after=99)
    assert load_checkpoint(tmp_path)["step"] == 4


def test_steps_are_not_lost_if_reporting_the_last_one_fails(tmp_path):
    """A report may measure, which may fail after hours of training."""
    go(RECIPE, tmp_path, stop_after=RECIPE.steps)
    assert load_checkpoint(tmp_path)["step"] == RECIPE.steps


@pytest.mark.parametrize("content", [None, b"damaged"])
def test_missing_or_damaged_checkpoint_is_refused(tmp_path, content):
    if content:
        (tmp_path / CHECKPOINT).write_bytes(content)
    with pytest.raises(TrainingError, match="checkpoint"):
        go(RECIPE, tmp_path, resume=True)
