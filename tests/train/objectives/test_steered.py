"""Training of a steered student: which hidden states steer each row, and the loss against a loop over positions."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from redraft.errors import UnsupportedModelError, UsageError
from redraft.export.drafters.decoder_drafter import configuration_of
from redraft.train.batches import Batch
from redraft.train.objectives import find_training
from redraft.train.objectives.decoder import high_middle_low, start_from_layers
from redraft.train.objectives.decoder_drafter import DEPTHS, DraftModelObjective, SteeringTable
from redraft.train.states import TOP_LOGITS, run_verifier
from redraft.train.verifier_model import VerifierModel

from .by_hand import check_loss, token_loss
from .test_decoder_drafter import PROMPT, model_of, two_texts

TRAINING = find_training("steered")
STATES = ("2", "1", "0")
K = 3


def objective_of(verifier: VerifierModel, form: dict[str, Any] | None = None, **table: object) -> DraftModelObjective:
    """A student of two of the verifier's layers, with random steering.   form: fields of its configuration."""
    config = replace(configuration_of(verifier.config, verifier.vocab_size, (0, 2), 0, STATES), **form or {})
    objective = DraftModelObjective(verifier.model, config, SteeringTable(**{"draft_length": K, **table}))
    start_from_layers(objective.drafter, verifier, ())
    assert objective.drafter.steering is not None
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in objective.drafter.steering.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return objective


@pytest.mark.parametrize("offsets", ["text", "row", "block"])
def test_offsets_are_drawn_from_1_to_k(offsets: str) -> None:
    torch.manual_seed(0)
    table = SteeringTable(draft_length=4, offsets=offsets)  # type: ignore[arg-type]
    drawn = [table.draw(torch.zeros(3, 9)) for _ in range(40)]
    assert set(torch.stack(drawn).flatten().tolist()) == {1, 2, 3, 4}
    for one in drawn:
        for row in one.tolist():
            if offsets == "text":
                assert len(set(row)) == 1
            elif offsets == "block":
                assert all(after == before % 4 + 1 for before, after in pairwise(row))
    firsts = Counter(one[0, 0].item() for one in drawn)
    assert len(firsts) == 4
    assert any(len(set(one[:, 0].tolist())) > 1 for one in drawn), "each text has its own"
    assert any(len(set(one[0].tolist())) > 2 for one in drawn) == (offsets != "text")


def verifier_output(verifier: VerifierModel, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """[h ; m ; l] of every position, and logits."""
    hidden, logits = run_verifier(verifier.model, batch.tokens, STATES)
    return torch.cat([hidden[name] for name in STATES], dim=-1), logits


def biased(objective: DraftModelObjective, states: torch.Tensor, sources: list[int]) -> torch.Tensor:
    """W_s W_hml [h ; m ; l] of rows that are steered from these positions, -1 for a row without, [1, L, S]."""
    assert objective.drafter.steering is not None
    rows = [states[source] if source >= 0 else torch.zeros_like(states[0]) for source in sources]
    vectors = torch.stack(rows) @ objective.drafter.steering.vector.weight.T
    return (vectors @ objective.drafter.steering.bias.weight.T)[None]


def test_loss_equals_a_loop_over_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Σ p log q of each row, steered from where its offset says; k = 3, an offset for each text."""
    verifier = model_of("llama", vocab_size=TOP_LOGITS)
    objective, batch = objective_of(verifier, kl=0.7, prompt=0.25), two_texts(TOP_LOGITS)
    drawn, every = [2, 3], torch.arange(TOP_LOGITS)
    monkeypatch.setattr(SteeringTable, "draw", lambda self, tokens: torch.tensor(drawn)[:, None].expand_as(tokens))
    head, embedding = verifier.model.get_output_embeddings().weight, verifier.model.get_input_embeddings()
    total, counted = torch.zeros(()), 0.0
    states, logits = verifier_output(verifier, batch)
    for text, end in enumerate(batch.ends.tolist()):
        sources = [q - 1 if q <= PROMPT else q - drawn[text] for q in range(batch.tokens.shape[1])]
        hidden = objective.drafter(embedding(batch.tokens[text : text + 1]), biased(objective, states[text], sources))
        for place in range(end):
            weight, truth = 0.25 if place < PROMPT else 1.0, batch.tokens[text, place + 1]
            total = total + weight * token_loss(head @ hidden[0, place], logits[text, place], truth, every, soft=0.7)
            counted += weight
    loss, metrics = objective.loss(batch)
    check_loss(objective, loss, total / counted)
    assert set(metrics) == {"ce", "kl", "mse", "hit"}
    assert all(parameter.grad is None for parameter in verifier.model.parameters())


def test_depth_d_of_a_draft_has_offset_d() -> None:
    """At every depth a draft has the hidden states where it starts, whose logits gave the last returned token."""
    verifier = model_of("llama")
    objective = objective_of(verifier)
    tokens = torch.randint(0, 97, (1, 12), generator=torch.Generator().manual_seed(1))
    batch = Batch.whole(tokens, ("a",), DEPTHS, first=2)
    embedding, head = verifier.model.get_input_embeddings(), verifier.model.get_output_embeddings().weight
    with torch.no_grad():
        states, _ = verifier_output(verifier, batch)
        found = list(objective.drafts(batch, objective.states(batch)))
        for depth, logits in enumerate(found, 1):
            sources = [q - 1 if q <= 2 else max(0, q - depth) for q in range(12)]
            hidden = objective.drafter(embedding(tokens), biased(objective, states[0], sources))
            for place, start in enumerate(batch.starts[0].tolist()):
                assert sources[start + depth] == start
                expected = head @ hidden[0, start + depth]
                torch.testing.assert_close(logits[0, place], expected, atol=1e-4, rtol=1e-4)
    assert len(found) == DEPTHS


@pytest.mark.parametrize(
    ("mechanism", "more"),
    [
        ("up", set()),
        ("after", set()),
        ("conditional", {f"{part}.{layer}.weight" for part in ("inner", "outer") for layer in (0, 1)}),
    ],
)
def test_a_frozen_student_trains_its_steering_alone(mechanism: str, more: set[str]) -> None:
    objective = objective_of(model_of("llama"), {"steering": mechanism, "steering_norm": True}, frozen=True)
    objective.loss(two_texts())[0].backward()
    trained = {name for name, p in objective.named_parameters() if p.grad is not None and p.grad.any()}
    names = {"vector.weight", "norm.weight", "norm.bias", "bias.weight", *more}
    assert trained == {f"steering.{name}" for name in names}


def test_a_recipe_has_the_authors_norm_and_may_leave_it_out() -> None:
    def form(**drafter: Any) -> tuple[str, bool]:
        config = TRAINING.configure(TRAINING.recipe.from_dict({"drafter": drafter}), model_of("llama"))
        return config.steering, config.steering_norm

    assert form() == ("up", True)
    assert form(steering="conditional", steering_norm=False) == ("conditional", False)
    with pytest.raises(
        UsageError, match=r"drafter\.steering must be one of up, after, conditional, not 'down'"
    ) as caught:
        form(steering="down")
    assert "\n" not in str(caught.value)


def test_by_default_the_paper_s_hidden_states_steer_a_student() -> None:
    assert high_middle_low(32) == ("29", "15", "2")
    assert high_middle_low(30) == ("27", "14", "2")
    assert high_middle_low(4) == ("2", "1")
    assert high_middle_low(1) == ("0",)


def test_a_verifier_whose_layers_take_no_steering_is_refused_before_its_text_is_written() -> None:
    assert TRAINING.configure(TRAINING.recipe(), model_of("llama")).hidden_states == ("2", "0")
    with pytest.raises(UnsupportedModelError, match="layer 0 takes no steering: Phi3MLP has no up_proj"):
        TRAINING.configure(TRAINING.recipe(), model_of("phi3"))
