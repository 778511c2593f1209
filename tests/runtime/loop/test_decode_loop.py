"""Steps of the decode loop: trees of two sources, times, priorities, deadlines, and faults."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence

import pytest

from redraft.errors import UsageError
from redraft.runtime.controllers.adaptive import Adaptive
from redraft.runtime.controllers.base import FixedBudget
from redraft.runtime.controllers.cost import CostCurve, VerifyCosts
from redraft.runtime.drafters.base import Pair
from redraft.runtime.drafters.ngram import NgramDrafter
from redraft.runtime.drafters.none import NoDrafter
from redraft.runtime.loop.decode_loop import MOST_FAILURES, DecodeLoop
from redraft.runtime.loop.scheduler import QueueFull
from redraft.runtime.requests.batch import Batch
from redraft.runtime.requests.request import Request
from redraft.runtime.trees.offers import Offer, Speculation
from redraft.types import NO_SPECULATION, Budget, DraftTree, OfferKind
from tests.runtime.fakes import FakeEngine, fake_verifier, mixing_rule, plain
from tests.runtime.loop.loops import Wide, letters, loop_of, request
from tests.runtime.loop.test_schedules import UnreliableEngine


def test_merged_trees_of_two_sources_fit_the_remaining_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tree is within the budget. Near the context's end, their union must fit; the fake refuses rows past it."""
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    verifier = fake_verifier(FakeEngine(lambda tokens: 97 + len(tokens) % 3), 80)
    free = CostCurve.from_points({1: 1.0, 32: 1.0})
    drafter = Pair(NgramDrafter(verifier), Wide(verifier))
    one = request([97 + i % 3 for i in range(30)], 50)
    DecodeLoop(verifier, Speculation(drafter, Adaptive(VerifyCosts({1: free})))).run([one])
    assert one.tokens == [97 + i % 3 for i in range(80)]


class Slow(Wide):
    """Advances the clock by a second for a draft, by three for a resampling, and by five for rows put off."""

    name = "slow"
    now = 0.0

    def catch_up(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> None:
        self.now += 5.0

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
    """One request is resampled, the other drafted for. Both are looked up."""
    verifier = fake_verifier(FakeEngine(), 400, max_num_seqs=2)
    drafter, lookup, controller = Slow(verifier), SlowLookup(verifier), FixedBudget(Budget(3, 3, 1))
    batches: list[Batch] = []
    monkeypatch.setattr(controller, "observe", batches.append)
    monkeypatch.setattr(time, "perf_counter", lambda: drafter.now + lookup.now)
    loop = DecodeLoop(verifier, Speculation(Pair(lookup, drafter), controller))
    for length in (3, 4):
        loop.add(request([97] * length))
    loop.step()
    loop.step()
    (batch,) = batches
    made = {("slow", OfferKind.FRESH): 1000.0, ("slow", OfferKind.RESAMPLE): 3000.0}
    times = batch.times
    assert (times.offers_ms, times.made_ms, times.host_ms, times.catch_up_ms) == (1000.0, made, 1000.0, 5000.0)
    assert (verifier.clock.draft, verifier.clock.resample) == (7.0, 3.0)


class Behind(Wide):
    """Has put off 200 rows of each request, until the first draft for it."""

    def __init__(self, verifier: object) -> None:
        super().__init__(verifier)
        self.caught_up: list[list[int]] = []

    def waiting(self, seq: Request) -> int:
        return 0 if any(seq.slot in slots for slots in self.caught_up) else 200

    def catch_up(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> None:
        self.caught_up.append([seq.slot for seq, budget in zip(batch, budgets, strict=True) if budget.nodes])


def test_a_step_waits_for_the_rows_of_few_requests() -> None:
    """At most 256 rows: each step catches up for one request more."""
    loop = loop_of(most=3)
    drafter = Behind(loop.verifier)
    how = Speculation(drafter, FixedBudget(Budget(2, 2, 2)))
    for number in range(3):
        loop.add(request(letters(4, number), 30, speculation=how))
    while len(drafter.caught_up) < 4:
        loop.step()
    assert drafter.caught_up[:4] == [[0], [0, 1], [0, 1, 2], [0, 1, 2]]


def test_the_youngest_request_of_the_largest_priority_number_is_parked() -> None:
    loop = loop_of(most=4)
    running = [request([97, number], 30, priority=priority) for number, priority in enumerate((2, 1, 2, 1))]
    for one in running:
        loop.add(one)
        loop.step()
    for parked in (2, 0, 3):
        loop.add(request([98], 30))
        loop.step()
        assert running[parked].slot == -1
        assert loop.scheduler.waiting == (2, 0, 3).index(parked) + 1


def test_a_request_that_was_preempted_has_the_same_text() -> None:
    """One slot: a request of a smaller priority number takes it, and the first one's rows wait in the other slot."""
    loop = loop_of(most=1, spare=1)
    first, urgent = request(letters(60), 30, priority=1), request([100] * 20, 4)
    loop.add(first)
    while len(first.new_tokens) < 10:
        loop.step()
    loop.add(urgent)
    outputs = loop.step()
    assert [output.request for output in outputs] == []
    while urgent.finish_reason is None:
        assert (loop.step(), first.slot)[1] == -1
    while loop.busy:
        loop.step()
    assert first.new_tokens == plain(mixing_rule, letters(60), 30)
    assert first.cached_tokens == 60


def test_a_later_request_of_the_same_priority_waits() -> None:
    loop = loop_of(most=1)
    first, second = request(letters(5), 6), request(letters(7), 6)
    loop.add(first)
    loop.add(second)
    while first.finish_reason is None:
        loop.step()
        assert not second.new_tokens


def test_a_deadline_ends_requests_with_and_without_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    loop = loop_of(most=1)
    running, waiting, last = (request(letters(5), 50, deadline=at) for at in (101.0, 102.0, None))
    for one in (running, waiting, last):
        loop.add(one)
    loop.step()
    now = 103.0
    outputs = loop.step()
    assert {one.request: one.finish_reason for one in outputs[:2]} == {running: "timeout", waiting: "timeout"}
    assert last.slot == 0


def test_a_full_queue_refuses_requests_with_an_estimate() -> None:
    verifier = fake_verifier(FakeEngine(), 100)
    loop = DecodeLoop(verifier, Speculation(NoDrafter(verifier), FixedBudget(NO_SPECULATION)), max_waiting=2)
    for _ in range(3):  # one has a slot soon
        loop.add(request(letters(3), 2), limited=True)
    with pytest.raises(QueueFull, match="3 requests wait already; try again later") as caught:
        loop.add(request(letters(3), 2), limited=True)
    assert caught.value.wait_seconds is None
    loop.add(request(letters(3), 2))
    while len(loop.scheduler) > 2:
        loop.step()
    with pytest.raises(QueueFull) as caught:  # noqa: PT012 - it has room for some
        for _ in range(9):
            loop.add(request(letters(3), 2), limited=True)
    assert caught.value.wait_seconds > 0


def test_a_call_that_fails_is_repeated_and_its_requests_fail_after_several() -> None:
    engine = UnreliableEngine()
    loop = loop_of(engine=engine)
    one, other = request(letters(5)), request(letters(40), 60)
    loop.add(one)
    engine.failing = MOST_FAILURES - 1
    while one.finish_reason is None:
        loop.step()
    assert one.new_tokens == plain(mixing_rule, letters(5), 20)
    loop.add(other)
    while not other.new_tokens:
        loop.step()
    engine.failing = MOST_FAILURES
    assert loop.health.error is None
    loop.step()
    assert "the engine failed" in str(loop.health.error)
    while loop.busy:
        loop.step()
    assert other.finish_reason == "error"
    with pytest.raises(UsageError, match="an engine's call failed: RuntimeError: the engine failed"):
        raise other.error


class Failing(Wide):
    """Raises in the method of this name."""

    def __init__(self, verifier: object, method: str) -> None:
        super().__init__(verifier)
        self.fails = method

    def __getattribute__(self, name: str) -> object:
        if name == object.__getattribute__(self, "__dict__").get("fails"):
            raise RuntimeError(f"{name} failed")
        return super().__getattribute__(name)


@pytest.mark.faulty_drafts
@pytest.mark.parametrize("method", ["begin", "offers", "draft", "catch_up", "accept", "prefilled", "finish", "move"])
def test_a_request_whose_drafter_fails_goes_on_plainly_and_alone(method: str) -> None:
    loop = loop_of(most=2)
    lookup = NgramDrafter(loop.verifier)
    fixed = FixedBudget(Budget(4, 4, 2))
    one = request(letters(30), 12, speculation=Speculation(Failing(loop.verifier, method), fixed))
    other = request(letters(40), 30, speculation=Speculation(lookup, fixed))
    loop.add(request([99], 8))
    loop.add(one)
    loop.add(other)
    while loop.busy:
        loop.step()
    assert one.new_tokens == plain(mixing_rule, letters(30), 12)
    assert other.new_tokens == plain(mixing_rule, letters(40), 30)
    assert f"{method} failed" in str(one.drafting_error)
    assert other.drafting_error is None
    assert other.counters.drafted > 0


@pytest.mark.faulty_drafts
@pytest.mark.parametrize("method", ["plan", "cut", "observe"])
def test_requests_whose_controller_fails_go_on_plainly(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = loop_of()
    controller = FixedBudget(Budget(4, 4, 2))

    def fail(batch: Batch) -> None:
        raise RuntimeError(f"{method} failed")

    monkeypatch.setattr(controller, method, fail)
    one = request(letters(30), 12, speculation=Speculation(NgramDrafter(loop.verifier), controller))
    loop.run([one])
    assert one.new_tokens == plain(mixing_rule, letters(30), 12)
    assert f"{method} failed" in str(one.drafting_error)


def alive() -> int:
    """Return the number of requests in memory."""
    gc.collect()
    return sum(isinstance(one, Request) for one in gc.get_objects())


def test_nothing_is_left_after_many_requests() -> None:
    before = alive()
    loop = loop_of(most=4, spare=2, rows=64)
    drafting = Speculation(NgramDrafter(loop.verifier), FixedBudget(Budget(4, 4, 2)), "ngram")
    for number in range(10_000):
        loop.add(request(letters(1 + number % 12, number), 1 + number % 3, speculation=drafting, turn=str(number % 7)))
        if number % 3 == 0:
            loop.step()
    assert loop.health.requests > 0
    while loop.busy:
        loop.step()
    scheduler = loop.scheduler
    assert scheduler.requests == []
    assert scheduler.slots.prefixes <= loop.verifier.slots
    assert (scheduler._waiting._levels, scheduler._waiting._waiting, scheduler._deadlines) == ({}, {}, set())
    assert not scheduler._outputs
    assert alive() - before == scheduler.slots.prefixes
