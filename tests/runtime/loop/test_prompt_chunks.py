"""Chunks of prompts next to running requests."""

from __future__ import annotations

import pytest

from redraft.runtime.controllers.base import FixedBudget
from redraft.runtime.loop.scheduler import LEAST_CHUNK, MEASURED_EVERY
from redraft.runtime.steps.verifier import PREFILL_CHUNK
from redraft.runtime.trees.offers import Speculation
from redraft.types import Budget
from tests.runtime.fakes import FakeEngine, mixing_rule, plain
from tests.runtime.loop.loops import Wide, letters, loop_of, request
from tests.runtime.loop.test_schedules import UnreliableEngine


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
