"""States that a folder keeps: computed once, read back alike, and never those of another verifier or text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from redraft.errors import DataError, TrainingError
from redraft.train.batches import Batch
from redraft.train.kept_states import KeptStates
from redraft.train.states import states_of

FACTS = {"verifier": {"weights": ["a"]}, "documents": "b"}


class Plan:
    """Batches of two rows of four tokens."""

    def batch(self, step, recipe):
        return Batch.whole(torch.arange(8).reshape(2, 4) + step, ("a", "b"), 1)


def never(batch):
    raise AssertionError("the states were kept")


def compute(batch):
    generator = torch.Generator().manual_seed(int(batch.tokens.sum()))
    hidden = {name: torch.randn(2, 4, 3, generator=generator) for name in ("last", "1")}
    return states_of(hidden, torch.randn(2, 4, 5, generator=generator))


def test_the_second_plan_reads_what_the_first_computed(tmp_path):
    first = [KeptStates(Plan(), tmp_path, FACTS, ["last", "1"], compute).batch(step, None) for step in (0, 3)]
    again = KeptStates(Plan(), tmp_path, FACTS, ["last", "1"], never)
    for step, before in zip((0, 3), first, strict=True):
        found = again.batch(step, None)
        assert torch.equal(found.tokens, before.tokens)
        assert found.states.hidden.keys() == {"last", "1"}
        expected = compute(before)
        for name, tensor in expected.hidden.items():
            assert torch.equal(found.states.hidden[name], tensor.half())
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
    KeptStates(Plan(), tmp_path, FACTS, ["last"], compute)
    with pytest.raises(TrainingError, match=f"keeps states of a run that differs in its {word}; remove it"):
        KeptStates(Plan(), tmp_path, facts, names, compute)


def test_another_text_of_a_step_is_refused(tmp_path):
    KeptStates(Plan(), tmp_path, FACTS, ["last", "1"], compute).batch(0, None)

    class Other(Plan):
        def batch(self, step, recipe):
            batch = super().batch(step, recipe)
            return replace(batch, tokens=batch.tokens + 1)

    with pytest.raises(DataError, match="keeps other texts for step 0"):
        KeptStates(Other(), tmp_path, FACTS, ["last", "1"], never).batch(0, None)
