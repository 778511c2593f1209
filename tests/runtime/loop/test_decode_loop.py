"""Steps of the decode loop: trees of two sources, times, chunks beside running requests, prefixes, and faults."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence

import pytest

from redraft.errors import UsageError
from redraft.runtime.controllers.adaptive import Adaptive
from redraft.runtime.controllers.base import FixedBudget
from redraft.runtime.controllers.cost import CostCurve, VerifyCosts
from redraft.runtime.drafters.base import Pair, TreeMaker
from redraft.runtime.drafters.ngram import NgramDrafter
from redraft.runtime.drafters.none import NoDrafter
from redraft.runtime.loop import slots
from redraft.runtime.loop.decode_loop import MOST_FAILURES, DecodeLoop
from redraft.runtime.loop.scheduler import LEAST_CHUNK, MEASURED_EVERY, QueueFull
from redraft.runtime.requests.batch import Batch
from redraft.runtime.requests.request import Request
from redraft.runtime.sampling.sampler import Greedy
from redraft.runtime.steps.verifier import PREFILL_CHUNK
from redraft.runtime.trees.offers import Offer, Speculation
from redraft.runtime.trees.tree import make_tree
from redraft.types import NO_SPECULATION, Budget, DraftTree, OfferKind
from tests.runtime.fakes import FakeEngine, engine_of, fake_verifier, mixing_rule, plain
from tests.runtime.loop.test_schedules import UnreliableEngine


def request(prompt: list[int], tokens: int = 20, **values: object) -> Request:
    return Request(list(prompt), len(prompt), len(prompt) + tokens, frozenset(), Greedy(), **values)


def loop_of(most: int = 2, spare: int = 2, engine: FakeEngine | None = None, rows: int = 400) -> DecodeLoop:
    verifier = fake_verifier(engine or FakeEngine(), rows, most, slots=most + spare)
    return DecodeLoop(verifier, Speculation(NoDrafter(verifier), FixedBudget(NO_SPECULATION)))


def letters(count: int, seed: int = 0) -> list[int]:
    return [97 + (7 * number + seed) % 5 for number in range(count)]


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


def test_a_running_request_has_a_token_in_every_step_while_a_prompt_is_computed() -> None:
    loop = loop_of()
    first, second = request(letters(3), 60), request(letters(300))
    loop.add(first)
    while not first.new_tokens:
        loop.step()
    loop.add(second)
    steps = 0
    while not second.new_tokens:
        before = second.num_computed_tokens, len(first.tokens)
        loop.step()
        steps += 1
        assert len(first.tokens) > before[1]
        assert second.num_computed_tokens - before[0] <= PREFILL_CHUNK
    assert steps > 2
    assert loop.scheduler._row_ms > 0


@pytest.mark.parametrize("sparse", [False, True])
def test_a_verification_computes_chunks_of_prompts_if_it_can(sparse: bool) -> None:
    """Of prompts in any slots behind those of running requests. Their texts stay the same."""
    engine = FakeEngine(sparse=sparse)
    loop = loop_of(most=4, engine=engine)
    first, *others = [request(letters(count, count), 30) for count in (3, 40, 60, 50)]
    loop.add(first)
    loop.step()
    loop.step()
    for other in others:
        loop.add(other)
    engine.rows.clear()
    loop.step()
    chunks = [one.num_computed_tokens for one in others]
    assert sum(chunks) == LEAST_CHUNK
    assert engine.rows == ([1 + LEAST_CHUNK] if sparse else [1, LEAST_CHUNK])
    calls = len(engine.rows)
    steps = 0
    while loop.scheduler.slots.filling:
        loop.step()
        steps += 1
    assert (len(engine.rows) - calls == steps) == sparse
    while loop.busy:
        loop.step()
    for one, count in zip((first, *others), (3, 40, 60, 50), strict=True):
        assert one.new_tokens == plain(mixing_rule, letters(count, count), 30)


def test_chunks_of_several_prompts_share_a_step_within_its_rows() -> None:
    loop = loop_of(most=4)
    for number in range(4):
        loop.add(request(letters(50, number)))
    loop.step()
    found = [one.num_computed_tokens for one in loop.scheduler.slots.filling]
    assert found == [49, 49, PREFILL_CHUNK - 98, 0]


def test_a_verification_with_chunks_has_no_drafts() -> None:
    """A row of a prompt is of use for certain. Drafts go on in the next steps."""
    engine = FakeEngine(sparse=True)
    loop = loop_of(engine=engine)
    one, other = request(letters(3), 80), request(letters(40), 4)
    one.speculation = Speculation(Wide(loop.verifier), FixedBudget(Budget(5, 1, 5)))
    loop.add(one)
    loop.step()
    loop.add(other)
    engine.rows.clear()
    while not other.new_tokens:
        before = other.num_computed_tokens
        loop.step()
        computed = other.num_computed_tokens - before
        assert engine.rows[-1] == (6 + 1 if other.new_tokens else 1 + computed if computed else 6)


def test_a_verification_without_chunks_is_measured_now_and_then() -> None:
    engine = FakeEngine(sparse=True)
    loop = loop_of(engine=engine)
    loop.add(request(letters(3), 200))
    loop.step()
    loop.add(request(letters(390)))
    engine.rows.clear()
    while not loop.scheduler.slots.filling:
        loop.step()
    loop.scheduler._row_ms = 1e6
    while loop.scheduler.slots.filling:
        loop.step()
        loop.scheduler._row_ms = 1e6
    assert [number for number, rows in enumerate(engine.rows) if rows == 1] == [
        MEASURED_EVERY * turn - 1 for turn in range(1, len(engine.rows) // MEASURED_EVERY + 1)
    ]


def test_a_chunk_whose_call_fails_is_computed_apart_from_the_verification() -> None:
    engine = UnreliableEngine(sparse=True)
    loop = loop_of(engine=engine)
    one, other = request(letters(3), 60), request(letters(40), 10)
    loop.add(one)
    loop.step()
    loop.add(other)
    loop.step()
    before = len(one.new_tokens), other.num_computed_tokens
    engine.failing = 1
    loop.step()
    assert (len(one.new_tokens), other.num_computed_tokens) == before
    engine.rows.clear()
    loop.step()
    assert engine.rows == [1, LEAST_CHUNK]
    loop.step()
    assert engine.rows[2:] == [1 + other.num_computed_tokens - before[1] - LEAST_CHUNK]
    while loop.busy:
        loop.step()
    assert one.new_tokens == plain(mixing_rule, letters(3), 60)
    assert other.new_tokens == plain(mixing_rule, letters(40), 10)


def test_the_rows_of_a_step_follow_the_time_that_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the verification, and 1.6 times as long if a prompt is long."""
    monkeypatch.setattr("redraft.runtime.loop.scheduler.LONG_PROMPT", 300)
    loop = loop_of(most=3)
    loop.add(request(letters(3), 100))
    for _ in range(3):
        loop.step()
    scheduler = loop.scheduler
    for count, rows in ((299, 20), (300, 32)):
        loop.add(request(letters(count)))
        loop.step()
        scheduler._row_ms, scheduler._verified_ms = 1.0, 20.0
        assert scheduler._budget() == rows
    scheduler._row_ms = 100.0
    assert scheduler._budget() == LEAST_CHUNK
    scheduler._row_ms = 1e-3
    assert scheduler._budget() == PREFILL_CHUNK


def computed_rows(loop: DecodeLoop, one: Request) -> int:
    """Run a request, and return the rows of prompts that were computed for it."""
    engine = engine_of(loop.verifier)
    engine.sizes.clear()
    steps = 0
    loop.add(one)
    while loop.busy:
        steps += any(output.token_ids for output in loop.step())
    return sum(batch * width for batch, width in engine.sizes) - steps


def test_rows_of_a_finished_request_are_not_computed_again() -> None:
    loop, prompt = loop_of(most=1, spare=1), letters(100)
    assert computed_rows(loop, request(prompt, 5)) == 99
    again = request([*prompt[:70], 120, *prompt[70:]], 5)
    assert computed_rows(loop, again) == 100 - 64
    assert (again.cached_tokens, again.new_tokens) == (64, plain(mixing_rule, again.tokens[:101], 5))
    whole = request(prompt, 5)
    assert (computed_rows(loop, whole), whole.cached_tokens) == (99 - 96, 96)


def test_requests_of_other_salts_share_no_rows() -> None:
    loop, prompt = loop_of(most=1, spare=1), letters(100)
    computed_rows(loop, request(prompt, 5, salt="mine"))
    assert computed_rows(loop, request(prompt, 5, salt="yours")) == 99
    assert computed_rows(loop, request(prompt, 5, salt="mine")) == 3


def test_the_least_recently_used_prefix_makes_room() -> None:
    loop = loop_of(most=1, spare=1)
    first, second, third = (letters(50, 0), [98] * 50, [99] * 50)
    for prompt in (first, second, first, third):
        computed_rows(loop, request(prompt, 2))
    assert loop.scheduler.slots.prefixes == 2
    assert computed_rows(loop, request(first, 2)) == 1
    assert computed_rows(loop, request(second, 2)) == 49


def test_memory_of_a_long_prefix_is_given_back_when_it_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Because another one takes its slot, or all are dropped. A short one keeps its pages."""
    monkeypatch.setattr(slots, "MANY_ROWS", 60)
    loop = loop_of(most=1, spare=1)
    released: list[int] = []
    monkeypatch.setattr(loop.verifier, "release", released.append)
    for number in range(3):
        computed_rows(loop, request([97 + number] * 61, 2))
        assert len(released) == max(number - 1, 0)
    computed_rows(loop, request([120] * 50, 2))
    assert len(released) == 2
    loop.scheduler.slots.clear()
    assert len(released) == 3


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


def limited(
    rows: int, most: int = 3, spare: int = 2, engine: FakeEngine | None = None, waiting: int | None = None
) -> DecodeLoop:
    verifier = fake_verifier(engine or FakeEngine(), 400, most, slots=most + spare)
    plain_way = Speculation(NoDrafter(verifier), FixedBudget(NO_SPECULATION))
    return DecodeLoop(verifier, plain_way, max_waiting=waiting, max_total_tokens=rows)


def test_the_youngest_request_waits_when_rows_run_out_and_has_the_same_text() -> None:
    """Two requests of 100 tokens in the end: both fit at first, and the second is suspended once, while it runs."""
    loop, slots = limited(180), (first := request(letters(20), 80), second := request(letters(30, 1), 70))
    for one in slots:
        loop.add(one)
    suspended = 0
    while loop.busy:
        before = second.slot
        loop.step()
        suspended += before >= 0 > second.slot and second.finish_reason is None
        assert loop.scheduler.slots.rows <= 180
        assert first.slot >= 0 or first.finish_reason is not None
    assert suspended == 1
    assert first.new_tokens == plain(mixing_rule, letters(20), 80)
    assert second.new_tokens == plain(mixing_rule, letters(30, 1), 70)


def test_the_filled_share_is_of_the_rows_that_requests_may_have() -> None:
    for rows, most in ((180, 180), (10_000, 3 * 400)):
        loop = limited(rows)
        loop.add(request(letters(20), 80))
        loop.step()
        assert loop.health.kv_usage == 19 / most


def test_prefixes_are_dropped_before_a_request_waits() -> None:
    loop = limited(160)
    loop.run([request([98] * 60, 2), request([99] * 60, 2)])
    assert loop.scheduler.slots.prefixes == 2
    one = request(letters(40), 60)
    loop.add(one)
    while loop.busy:
        loop.step()
        assert one.slot >= 0 or one.finish_reason is not None
        assert loop.scheduler.slots.rows <= 160
    assert loop.scheduler.slots.prefixes == 1
    assert loop.scheduler.slots._tokens[next(iter(loop.scheduler.slots._tokens))][0] == 97


def test_a_request_gets_a_slot_if_its_rows_and_some_more_of_the_others_fit() -> None:
    """Otherwise it would soon lose them again. One that could never fit is refused."""
    loop = limited(200)
    first, second = request(letters(80), 60), request(letters(90, 1), 5)
    with pytest.raises(UsageError, match="the request may have 201 tokens, and all requests together 200; lower max_t"):
        loop.add(request(letters(190), 11))
    loop.add(first)
    loop.add(second)
    while first.finish_reason is None:
        loop.step()
        assert second.slot == -1
    loop.run([])
    assert second.new_tokens == plain(mixing_rule, letters(90, 1), 5)


def test_an_urgent_request_takes_the_rows_of_others() -> None:
    loop = limited(200)
    slow, urgent = request(letters(100), 60, priority=1), request(letters(110, 1), 5)
    loop.add(slow)
    for _ in range(5):
        loop.step()
    loop.add(urgent)
    loop.step()
    assert (slow.slot, urgent.slot >= 0) == (-1, True)
    loop.run([])
    assert slow.new_tokens == plain(mixing_rule, letters(100), 60)


def test_nobody_loses_a_slot_for_a_request_that_finds_no_rows_then() -> None:
    loop = limited(200)
    large, small = request(letters(100), 60), request(letters(20), 20, priority=5)
    urgent = request(letters(110, 1), 5)
    for one in (large, small, urgent):
        loop.add(one)
        for _ in range(4):
            loop.step()
    assert (small.slot >= 0, urgent.slot) == (True, -1)
    loop.run([])
    assert small.new_tokens == plain(mixing_rule, letters(20), 20)
    assert urgent.new_tokens == plain(mixing_rule, letters(110, 1), 5)


def test_requests_that_wait_for_rows_count_as_waiting() -> None:
    """Slots are free, but rows are not."""
    loop = limited(200, most=4, waiting=1)
    loop.add(request(letters(120), 20), limited=True)
    loop.step()
    loop.add(request(letters(120), 20), limited=True)
    with pytest.raises(QueueFull):
        loop.add(request(letters(120), 20), limited=True)


def test_slots_that_lose_many_rows_give_their_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redraft.runtime.loop.slots.MANY_ROWS", 64)
    loop, released = limited(200), list[int]()
    monkeypatch.setattr(loop.verifier, "release", released.append)
    slow, urgent = request(letters(100), 60), request(letters(66, 1), 60)
    loop.run([slow, urgent])
    assert released, "the younger request was suspended, and its rows were dropped"
    assert urgent.new_tokens == plain(mixing_rule, letters(66, 1), 60)


def test_trees_take_only_rows_that_are_left() -> None:
    loop = limited(110, most=1)
    wide = Speculation(Wide(loop.verifier), FixedBudget(Budget(40, 40, 40)))
    one = request(letters(50), 50, speculation=wide)
    engine = engine_of(loop.verifier)
    loop.add(one)
    while loop.busy:
        before, engine.sizes[:] = one.num_computed_tokens, []
        loop.step()
        assert before + sum(width for _, width in engine.sizes) <= 110
    assert one.new_tokens == plain(mixing_rule, letters(50), 50)
    assert one.counters.drafted > 300


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
