"""Scheduling: a new request takes the first free slot and moves no other, and a free slot is filled at once."""

from __future__ import annotations

from collections import abc

import pytest

from redraft.runtime import scheduler
from redraft.runtime.controller import FixedBudget
from redraft.runtime.cycle import Cycle
from redraft.runtime.drafters.none import NoDrafter
from redraft.runtime.offers import Speculation
from redraft.runtime.sampling.sampler import Greedy
from redraft.runtime.sequence import Sequence
from redraft.types import NO_SPECULATION

from .fakes import FakeEngine, fake_verifier, mixing_rule, plain


class Noting(Cycle):
    """Records which request begins in which slot, and which ones step and move."""

    def __init__(self, slots: int) -> None:
        verifier = fake_verifier(FakeEngine(), 400, max_num_seqs=slots)
        super().__init__(verifier, Speculation(NoDrafter(verifier), FixedBudget(NO_SPECULATION)))
        self.events: list[tuple[object, ...]] = []

    def begin(self, seq: Sequence, slot: int) -> None:
        self.events.append(("begin", seq.prompt_length, slot))
        super().begin(seq, slot)

    def step(self, batch: abc.Sequence[Sequence]) -> None:
        self.events.append(("step", *[seq.prompt_length for seq in batch]))
        super().step(batch)

    def move(self, seq: Sequence, source: int, target: int) -> None:
        self.events.append(("move", seq.prompt_length, source, target))
        super().move(seq, source, target)


def request(length: int, tokens: int) -> Sequence:
    return Sequence([97] * length, length, length + tokens, frozenset(), Greedy())


def test_a_request_takes_the_first_free_slot_and_moves_nobody() -> None:
    cycle = Noting(3)
    requests = [request(10, 3), request(20, 5), request(30, 4), request(40, 2)]
    for _ in scheduler.run(cycle, requests):
        pass
    assert cycle.events == [
        ("begin", 10, 0), ("begin", 20, 1), ("begin", 30, 2),
        ("step", 10, 20, 30), ("step", 10, 20, 30), ("move", 30, 2, 0),
        ("begin", 40, 2), ("step", 30, 20, 40), ("move", 20, 1, 0), ("step", 20),
    ]  # fmt: skip
    for seq in requests:
        assert seq.new_tokens == plain(mixing_rule, [97] * seq.prompt_length, len(seq.new_tokens))


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_every_request_comes_to_its_end(slots: int) -> None:
    cycle = Noting(slots)
    requests = [request(length, 1 + length % 7) for length in range(2, 200, 23)]
    for _ in scheduler.run(cycle, requests):
        pass
    for seq in requests:
        assert seq.new_tokens == plain(mixing_rule, [97] * seq.prompt_length, 1 + seq.prompt_length % 7)
