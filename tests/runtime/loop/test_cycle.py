"""The cycle: trees of two sources together, and the time of each source."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from redraft.runtime.controllers.adaptive import Adaptive
from redraft.runtime.controllers.base import Call, FixedBudget
from redraft.runtime.controllers.cost import CostCurve, VerifyCosts
from redraft.runtime.drafters.base import Pair, TreeMaker
from redraft.runtime.drafters.ngram import NgramDrafter
from redraft.runtime.loop import scheduler
from redraft.runtime.loop.decode_loop import Cycle
from redraft.runtime.requests.request import Request
from redraft.runtime.sampling.sampler import Greedy
from redraft.runtime.trees.offers import Offer, Speculation
from redraft.runtime.trees.tree import make_tree
from redraft.types import Budget, DraftTree, OfferKind
from tests.runtime.fakes import FakeEngine, fake_verifier


class Wide(TreeMaker):
    """Drafts as many tokens as the budget allows. The lookup is unlikely to find any of them."""

    def draft(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[DraftTree]:
        return [self.guess(seq, budget) for seq, budget in zip(batch, budgets, strict=True)]

    def guess(self, seq: Request, budget: Budget) -> DraftTree:
        nodes = budget.nodes
        return make_tree([seq.tokens[-1], *range(nodes)], [-1, *[0] * nodes], [1.0] + [0.5] * nodes)


def test_merged_trees_of_two_sources_fit_the_remaining_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tree is within the budget. Near the context's end, their union must fit; the fake refuses rows past it."""
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    verifier = fake_verifier(FakeEngine(lambda tokens: 97 + len(tokens) % 3), 80)
    free = CostCurve.from_points({1: 1.0, 32: 1.0})
    drafter = Pair(NgramDrafter(verifier), Wide(verifier))
    cycle = Cycle(verifier, Speculation(drafter, Adaptive(VerifyCosts({1: free}))))
    prompt = [97 + i % 3 for i in range(30)]
    request = Request(list(prompt), 30, 80, frozenset(), Greedy())
    for _ in scheduler.run(cycle, [request]):
        pass
    assert request.tokens == [97 + i % 3 for i in range(80)]


class Slow(Wide):
    """Advances the clock by a second for a draft, and by three for a resampling."""

    name = "slow"
    now = 0.0

    def draft(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[DraftTree]:
        self.now += 1.0
        return super().draft(batch, budgets)

    def remaining(self, seq: Request) -> int:
        return seq.prompt_length % 2

    def resample(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[DraftTree]:
        self.now += 2.0
        return self.draft(batch, budgets)


class SlowLookup(NgramDrafter):
    """Advances the clock by half a second for a lookup."""

    now = 0.0

    def offers(self, seq: Request, budget: Budget) -> Sequence[Offer]:
        self.now += 0.5
        return super().offers(seq, budget)


def test_a_step_reports_the_time_of_each_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence is resampled, the other drafted for. Both are looked up."""
    verifier = fake_verifier(FakeEngine(), 400, max_num_seqs=2)
    drafter, lookup, controller = Slow(verifier), SlowLookup(verifier), FixedBudget(Budget(3, 3, 1))
    told: list[tuple[float, dict[Call, float]]] = []
    monkeypatch.setattr(controller, "timed", lambda offers_ms, made_ms, nodes: told.append((offers_ms, dict(made_ms))))
    monkeypatch.setattr(time, "perf_counter", lambda: drafter.now + lookup.now)
    cycle, batch = Cycle(verifier, Speculation(Pair(lookup, drafter), controller)), []
    for length in (3, 4):
        scheduler.admit(cycle, batch, Request([97] * length, length, 60, frozenset(), Greedy()))
    cycle.step(batch)
    assert told == [(1000.0, {("slow", OfferKind.FRESH): 1000.0, ("slow", OfferKind.RESAMPLE): 3000.0})]
    assert (cycle.clock.draft, cycle.clock.resample) == (2.0, 3.0)
