"""The training loop: resuming, stopping, learning."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from redraft.errors import TrainingError
from redraft.train.batches import BatchPlan
from redraft.train.loop import CHECKPOINT, load_checkpoint, train

from .small_verifier import VerifierObjective


def plan_for(recipe):
    rng = np.random.default_rng(0)
    return BatchPlan(
        {k: rng.integers(0, 50, 4000).astype(np.uint16) for k in recipe.weights}, recipe.weights, recipe.seed, 2
    )


def go(recipe, out, *, resume=False, stop_after=None, every=4):
    """Train; `stop_after` simulates that the process is killed after that step."""
    torch.manual_seed(recipe.seed)
    objective = VerifierObjective(recipe)
    losses = []

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


def same(first, second):
    return all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )


@pytest.fixture(scope="module")
def begun(recipe, tmp_path_factory):
    out = tmp_path_factory.mktemp("begun")
    go(recipe, out, stop_after=5)
    return out


@pytest.fixture
def killed(begun, tmp_path):
    """A run that was killed after step 5, with the checkpoint of step 4, before the growth."""
    return shutil.copytree(begun, tmp_path / "run")


def test_resumed_run_equals_an_uninterrupted_one_bit_for_bit(recipe, killed, tmp_path):
    """The process is killed before the growth, and again in the decay, after the checkpoint of step 8."""
    whole, losses = go(recipe, tmp_path / "whole")
    assert go(recipe, killed, resume=True, stop_after=10)[1] == losses[4:10]
    resumed, later = go(recipe, killed, resume=True)
    assert later == losses[8:]
    assert same(whole, resumed)


def test_loss_falls_and_growth_does_not_undo_it(recipe, tmp_path):
    _, losses = go(replace(recipe, steps=30, grow_step=15), tmp_path / "run")
    means = [sum(step[k] for k in recipe.weights) / 3 for step in losses]
    assert means[-1] < means[0] - 0.5
    assert abs(means[15] - means[14]) < 0.3


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
def test_what_is_not_finite_stops_and_keeps_the_last_checkpoint(recipe, killed, poison, message):
    before = (killed / CHECKPOINT).read_bytes()
    torch.manual_seed(0)
    objective = VerifierObjective(recipe)
    honest, calls = objective.loss, []

    def loss(batch):
        calls.append(batch)
        value, metrics = honest(batch)
        return (poison(value) if len(calls) == 3 else value), metrics

    objective.loss = loss
    with pytest.raises(TrainingError, match=f"{message} at step 6; the last good checkpoint is in .*; resume"):
        train(objective, plan_for(recipe), recipe, killed, identity="x", resume=True, checkpoint_every=100)
    assert (killed / CHECKPOINT).read_bytes() == before


def test_without_a_checkpoint_the_hint_is_to_start_again(recipe, tmp_path):
    objective = VerifierObjective(recipe)
    objective.loss = lambda batch: (torch.tensor(float("inf"), requires_grad=True), {})
    with pytest.raises(TrainingError, match="the loss is inf at step 0; there is no checkpoint yet; start again"):
        train(objective, plan_for(recipe), recipe, tmp_path, identity="x")


def test_a_loss_without_a_gradient_changes_nothing(recipe, tmp_path):
    torch.manual_seed(0)
    objective = VerifierObjective(recipe)
    objective.loss = lambda batch: (torch.tensor(0.0), {})
    before = {name: value.clone() for name, value in objective.state_dict().items()}
    train(objective, plan_for(recipe), replace(recipe, steps=1), tmp_path, identity="x")
    assert all(torch.equal(value, before[name]) for name, value in objective.state_dict().items())


def test_checkpoint_of_other_data_or_another_recipe_is_refused(recipe, begun):
    with pytest.raises(TrainingError, match="other data"):
        train(VerifierObjective(recipe), plan_for(recipe), recipe, begun, identity="y", resume=True)
    with pytest.raises(TrainingError, match=r"matrix_lr was 0\.02, it is 0\.5"):
        go(replace(recipe, matrix_lr=0.5), begun, resume=True)


def test_length_can_change_until_the_decay_begins(recipe, killed):
    """A late token budget is valid, but a change after the decay began would change the schedule."""
    go(replace(recipe, steps=16), killed, resume=True, stop_after=14, every=1)
    assert load_checkpoint(killed)["step"] == 13
    with pytest.raises(TrainingError, match="step 13, too late"):
        go(replace(recipe, steps=40), killed, resume=True)
    with pytest.raises(TrainingError, match="too late"):
        go(replace(recipe, steps=16, grow_step=8), killed, resume=True)


def test_interrupted_write_leaves_the_last_checkpoint(recipe, killed, monkeypatch):
    """A checkpoint written in place would be lost with the process that wrote it."""
    honest = torch.save

    def torn(state, file):
        honest({"step": 0}, file)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", torn)
    go(recipe, killed, resume=True, stop_after=99)
    assert load_checkpoint(killed)["step"] == 4


def test_steps_are_not_lost_if_reporting_the_last_one_fails(recipe, killed):
    """A report may measure, which may fail after hours of training."""
    go(recipe, killed, resume=True, stop_after=recipe.steps)
    assert load_checkpoint(killed)["step"] == recipe.steps


@pytest.mark.parametrize("content", [None, b"damaged"])
def test_missing_or_damaged_checkpoint_is_refused(recipe, tmp_path, content):
    if content:
        (tmp_path / CHECKPOINT).write_bytes(content)
    with pytest.raises(TrainingError, match="checkpoint"):
        go(recipe, tmp_path, resume=True)
