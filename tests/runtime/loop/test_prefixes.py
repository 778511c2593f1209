"""Rows of earlier prompts are computed once, while their slots are free."""

from __future__ import annotations

import pytest

from redraft.runtime.loop import slots
from redraft.runtime.loop.decode_loop import DecodeLoop
from redraft.runtime.requests.request import Request
from tests.runtime.fakes import engine_of, mixing_rule, plain
from tests.runtime.loop.loops import letters, loop_of, request


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


def test_a_prefix_that_moves_is_as_old_as_before() -> None:
    loop = loop_of(most=1, spare=2)
    prompts = [[97 + number] * 50 for number in range(4)]
    for prompt in prompts:  # each one takes the first slot, whose prefix moves
        computed_rows(loop, request(prompt, 2))
    assert computed_rows(loop, request(prompts[1], 2)) == 1
    assert computed_rows(loop, request(prompts[0], 2)) == 49


def test_a_prefix_whose_rows_a_request_has_is_dropped_first() -> None:
    loop, turn = loop_of(most=1, spare=2), letters(64)
    computed_rows(loop, request(turn, 2))
    computed_rows(loop, request([98] * 50, 2))
    longer = request([*turn, *letters(40, 3)], 2)
    computed_rows(loop, longer)
    assert longer.cached_tokens == 64
    computed_rows(loop, request([99] * 50, 2))
    assert computed_rows(loop, request([98] * 50, 2)) == 1  # used before the first turn, which the second one has


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
