"""The cycle and its scheduler: hidden states of every call, resampling before fresh drafts, slots without gaps."""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Mapping

import pytest

from redraft.engines.device import Buffer, slots_of
from redraft.engines.host_device import HostBuffer
from redraft.runtime import scheduler
from redraft.runtime.adaptive import Adaptive
from redraft.runtime.controller import Call, FixedBudget
from redraft.runtime.cost import CostCurve, VerifyCosts
from redraft.runtime.cycle import Cycle
from redraft.runtime.drafters.base import Pair, TreeMaker
from redraft.runtime.drafters.ngram import NgramDrafter
from redraft.runtime.drafters.none import NoDrafter
from redraft.runtime.offers import Offer, Speculation
from redraft.runtime.sampling.sampler import Greedy
from redraft.runtime.sequence import Sequence
from redraft.runtime.tree import make_tree, root_only
from redraft.runtime.verifier import Verifier
from redraft.types import NO_SPECULATION, Budget, DraftTree, OfferKind, Outcome

from .fakes import FakeEngine, fake_verifier, mixing_rule, plain


class Recorder(TreeMaker):
    """Drafts the toy model's own chains, resamples for every other sequence, and reads hidden states.

    The toy model's hidden states are its tokens. The drafter must receive those of all committed tokens, in order.
    """

    def __init__(self, verifier: Verifier) -> None:
        super().__init__(verifier)
        self.rows = HostBuffer.zeros("float32", verifier.max_num_seqs, 400, 3)
        self.seen: dict[int, int] = {}
        self.slots: dict[int, int] = {}
        self.resampled = self.drafted = 0
        verifier.attach(self)

    def pending_features(self, slots: range) -> Mapping[str, Buffer]:
        return {"last": slots_of(self.rows, slots)}

    def pending(self, batch: abc.Sequence[Sequence], rows: int, slots: range) -> list[int] | None:
        return [self.seen[id(seq)] for seq in batch]

    def begin(self, seq: Sequence) -> None:
        self.seen[id(seq)] = 0

    def prefilled(self, seq: Sequence, slot: int, start: int, tokens: int) -> None:
        self.slots[id(seq)] = slot
        assert self.seen[id(seq)] == start
        self.seen[id(seq)] += tokens

    def move(self, seq: Sequence, source: int, target: int) -> None:
        self.slots[id(seq)] = target
        self.rows.host[target] = self.rows.host[source]

    def accept(self, seq: Sequence, tree: DraftTree, outcome: Outcome) -> None:
        self.seen[id(seq)] += 1 + len(outcome.path)
        assert self.seen[id(seq)] == seq.cache_len
        kept = min(seq.cache_len, len(seq.tokens))
        assert self.rows.host[self.slots[id(seq)], :kept, 0].tolist() == seq.tokens[:kept]

    def guess(self, seq: Sequence, budget: Budget) -> DraftTree:
        chain = [seq.tokens[-1], *plain(mixing_rule, seq.tokens, budget.depth)]
        return make_tree(chain, list(range(-1, len(chain) - 1)), [1.0] * len(chain))

    def remaining(self, seq: Sequence) -> int:
        return 1 - seq.prompt_length % 2

    def resample(self, batch: abc.Sequence[Sequence], budgets: abc.Sequence[Budget]) -> list[DraftTree]:
        chosen = self.chosen(batch, budgets)
        assert all(seq.prompt_length % 2 == 0 for seq in chosen)
        self.resampled += len(chosen)
        return self.guesses(batch, budgets)

    def draft(self, batch: abc.Sequence[Sequence], budgets: abc.Sequence[Budget]) -> list[DraftTree]:
        chosen = self.chosen(batch, budgets)
        assert all(seq.prompt_length % 2 for seq in chosen)
        self.drafted += len(chosen)
        return self.guesses(batch, budgets)

    def chosen(self, batch: abc.Sequence[Sequence], budgets: abc.Sequence[Budget]) -> list[Sequence]:
        """Return the sequences of a call over the whole batch that have a budget, at least one."""
        chosen = [seq for seq, budget in zip(batch, budgets, strict=True) if budget.nodes]
        assert chosen
        return chosen

    def guesses(self, batch: abc.Sequence[Sequence], budgets: abc.Sequence[Budget]) -> list[DraftTree]:
        return [
            self.guess(seq, budget) if budget.nodes else root_only(seq.tokens[-1])
            for seq, budget in zip(batch, budgets, strict=True)
        ]


def test_a_method_sees_every_row_and_resamples_before_it_drafts() -> None:
    verifier = fake_verifier(FakeEngine(hidden_states=("last",)), 400, max_num_seqs=2, hidden_states=("last",))
    drafter = Recorder(verifier)
    prompts = [[97 + i % 5 for i in range(length)] for length in (4, 200, 131)]
    requests = [Sequence(list(prompt), len(prompt), len(prompt) + 30, frozenset(), Greedy()) for prompt in prompts]
    for _ in scheduler.run(Cycle(verifier, Speculation(drafter, FixedBudget(Budget(3, 3, 1)))), requests):
        pass
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.new_tokens == plain(mixing_rule, prompt, 30)
        assert drafter.seen[id(request)] >= len(prompt) + 29
        assert request.counters.accepted == request.counters.drafted > 0
    assert drafter.resampled > drafter.drafted > 0


class Wide(TreeMaker):
    """Drafts as many tokens as the budget allows. The lookup is unlikely to find any of them."""

    def draft(self, batch: abc.Sequence[Sequence], budgets: abc.Sequence[Budget]) -> list[DraftTree]:
        return [self.guess(seq, budget) for seq, budget in zip(batch, budgets, strict=True)]

    def guess(self, seq: Sequence, budget: Budget) -> DraftTree:
        nodes = budget.nodes
        return make_tree([seq.tokens[-1], *range(nodes)], [-1, *[0] * nodes], [1.0] + [0.5] * nodes)


def test_merged_trees_of_two_sources_fit_the_remaining_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tree is within the budget. Near the context's end, their union must fit; the fake refuses rows past it."""
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    verifier = fake_verifier(FakeEngine(lambda tokens: 97 + len(tokens) % 3), 80)
    free = CostCurve.from_points({1: 1.0, 32: 1.0})
    drafter = Pair(NgramDrafter(verifier), Wide(verifier))
    cycle = Cycle(verifier, Speculation(drafter, Adaptive(VerifyCosts.of(free))))
    prompt = [97 + i % 3 for i in range(30)]
    request = Sequence(list(prompt), 30, 80, frozenset(), Greedy())
    for _ in scheduler.run(cycle, [request]):
        pass
    assert request.tokens == [97 + i % 3 for i in range(80)]


class Slow(Wide):
    """Advances the clock by a second for a draft, and by three for a resampling."""

    name = "slow"
    now = 0.0

    def draft(self, batch: abc.Sequence[Sequence], budgets: abc.Sequence[Budget]) -> list[DraftTree]:
        self.now += 1.0
        return super().draft(batch, budgets)

    def remaining(self, seq: Sequence) -> int:
        return seq.prompt_length % 2

    def resample(self, batch: abc.Sequence[Sequence], budgets: abc.Sequence[Budget]) -> list[DraftTree]:
        self.now += 2.0
        return self.draft(batch, budgets)


class SlowLookup(NgramDrafter):
    """Advances the clock by half a second for a lookup."""

    now = 0.0

    def offers(self, seq: Sequence, budget: Budget) -> abc.Sequence[Offer]:
        self.now += 0.5
        return super().offers(seq, budget)


class Timed(FixedBudget):
    """Records its arguments."""

    def __init__(self) -> None:
        super().__init__(Budget(3, 3, 1))
        self.told: list[tuple[float, dict[Call, float]]] = []

    def timed(self, offers_ms: float, made_ms: Mapping[Call, float], nodes: int) -> None:
        self.told.append((offers_ms, dict(made_ms)))


@pytest.mark.parametrize(
    ("lengths", "made"),
    [((4, 6), {OfferKind.FRESH: 1000.0}), ((3, 5), {OfferKind.RESAMPLE: 3000.0}),
     ((3, 4), {OfferKind.FRESH: 1000.0, OfferKind.RESAMPLE: 3000.0})],
)  # fmt: skip
def test_a_step_reports_the_time_of_each_source(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, int], made: dict[OfferKind, float]
) -> None:
    verifier = fake_verifier(FakeEngine(), 400, max_num_seqs=2)
    drafter, lookup, controller = Slow(verifier), SlowLookup(verifier), Timed()
    monkeypatch.setattr(time, "perf_counter", lambda: drafter.now + lookup.now)
    cycle, batch = Cycle(verifier, Speculation(Pair(lookup, drafter), controller)), []
    for length in lengths:
        scheduler.admit(cycle, batch, Sequence([97] * length, length, 60, frozenset(), Greedy()))
    cycle.step(batch)
    assert controller.told == [(1000.0, {("slow", kind): ms for kind, ms in made.items()})]
    assert cycle.clock.draft + cycle.clock.resample == (1000.0 + sum(made.values())) / 1000


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
