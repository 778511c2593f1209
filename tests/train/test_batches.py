"""The data order, and states of batches that a folder keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from redraft.errors import DataError, TrainingError
from redraft.train.batches import Batch, BatchPlan, KeptStates
from redraft.train.config import Recipe
from redraft.train.states import states_of

STREAMS = {"a": np.arange(5000, dtype=np.uint16), "b": np.arange(10000, 13000, dtype=np.uint16)}
WEIGHTS = {"a": 3.0, "b": 1.0}
LOOKAHEAD = 3


def recipe(rows, length=16):
    return Recipe(batch_tokens=rows * length, seq_len=length, decay_seq_len=length)


def test_rows_are_consecutive_tokens_of_their_kind_in_the_given_shares():
    plan = BatchPlan(STREAMS, WEIGHTS, 0, LOOKAHEAD)
    kinds = []
    for step in range(25):
        batch = plan.batch(step, recipe(8))
        assert batch.tokens.shape == (8, 16 + LOOKAHEAD)
        assert (batch.tokens.diff(dim=1) == 1).all()
        assert [("b" if row[0] >= 10000 else "a") for row in batch.tokens.tolist()] == list(batch.kinds)
        kinds += batch.kinds
    assert kinds.count("a") == 150


def test_an_epoch_sees_no_input_twice():
    """Sampling with repetition would miss a third of a small corpus."""
    plan = BatchPlan(STREAMS, WEIGHTS, 0, LOOKAHEAD)
    blocks = (5000 - LOOKAHEAD) // 16 - 1
    batches = [plan.batch(step, recipe(4)) for step in range(blocks)]
    rows = torch.stack([row[:16] for b in batches for row, kind in zip(b.tokens, b.kinds, strict=True) if kind == "a"])
    assert rows[:blocks].unique().numel() == blocks * 16


def test_a_stream_too_short_for_a_row_names_its_kind():
    with pytest.raises(DataError, match="corpus of a has 20 tokens"):
        BatchPlan({"a": np.zeros(20, np.uint16)}, {"a": 1.0}, 0, LOOKAHEAD).batch(0, recipe(1))


def test_kinds_must_match_the_weights():
    with pytest.raises(DataError, match="do not match"):
        BatchPlan(STREAMS, {"a": 1.0}, 0, LOOKAHEAD)


FACTS = {"verifier": {"weights": ["a"]}, "documents": "b"}


class Rows:
    """A plan of batches of two rows of four tokens, from a first token on."""

    def __init__(self, first=0):
        self.first = first

    def batch(self, step, recipe):
        return Batch.whole(torch.arange(8).reshape(2, 4) + step + self.first, ("a", "b"), 1)


def never(batch):
    raise AssertionError("the states were kept")


def compute(batch):
    generator = torch.Generator().manual_seed(int(batch.tokens.sum()))
    hidden = {name: torch.randn(2, 4, 3, generator=generator) for name in ("last", "1")}
    return states_of(hidden, torch.randn(2, 4, 5, generator=generator))


def test_the_second_plan_reads_what_the_first_computed(tmp_path):
    first = [KeptStates(Rows(), tmp_path, FACTS, ["last", "1"], compute).batch(step, None) for step in (0, 3)]
    again = KeptStates(Rows(), tmp_path, FACTS, ["last", "1"], never)
    for step, before in zip((0, 3), first, strict=True):
        found = again.batch(step, None)
        assert torch.equal(found.tokens, before.tokens)
        assert found.states.hidden.keys() == {"last", "1"}
        expected = compute(before)
        for name, tensor in expected.hidden.items():
            assert torch.allclose(found.states.hidden[name].float(), tensor, atol=0.02)  # of 8 bits
            assert torch.equal(found.states.hidden[name], before.states.hidden[name])
        assert torch.equal(found.states.top_ids, expected.top_ids)
        assert torch.equal(found.states.log_sum, expected.log_sum)


@pytest.mark.parametrize(
    ("facts", "names", "word"),
    [
        ({**FACTS, "verifier": {"weights": ["c"]}}, ["last"], "verifier"),
        ({**FACTS, "documents": "c"}, ["last"], "documents"),
        (FACTS, ["1"], "hidden_states"),
    ],
)
def test_states_of_something_else_are_refused(tmp_path, facts, names, word):
    KeptStates(Rows(), tmp_path, FACTS, ["last"], compute)
    with pytest.raises(TrainingError, match=f"keeps states of a run that differs in its {word}; remove it"):
        KeptStates(Rows(), tmp_path, facts, names, compute)


def test_another_text_of_a_step_is_refused(tmp_path):
    KeptStates(Rows(), tmp_path, FACTS, ["last", "1"], compute).batch(0, None)
    with pytest.raises(DataError, match="keeps other texts for step 0"):
        KeptStates(Rows(1), tmp_path, FACTS, ["last", "1"], never).batch(0, None)
