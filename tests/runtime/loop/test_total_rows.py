"""All requests together have a limit of rows: who waits, who loses a slot, and what is dropped."""

from __future__ import annotations

import pytest

from redraft.errors import UsageError
from redraft.runtime.controllers.base import FixedBudget
from redraft.runtime.drafters.none import NoDrafter
from redraft.runtime.loop.decode_loop import DecodeLoop
from redraft.runtime.loop.scheduler import QueueFull
from redraft.runtime.trees.offers import Speculation
from redraft.types import NO_SPECULATION, Budget
from tests.runtime.fakes import FakeEngine, engine_of, fake_verifier, mixing_rule, plain
from tests.runtime.loop.loops import Wide, letters, request


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
