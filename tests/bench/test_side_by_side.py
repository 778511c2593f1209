"""Turns of runtimes that step one at a time."""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager
from types import SimpleNamespace

import pytest

from redraft.bench.side_by_side import WINDOW, Turn, Turns


class Stepping:
    """A runtime with requests, until `end`."""

    def __init__(self) -> None:
        self.block: AbstractContextManager[object] | None = None
        self.health = SimpleNamespace(requests=1)

    def step_within(self, block: AbstractContextManager[object]) -> None:
        self.block = block


def entered(turn: Turn) -> threading.Event:
    """Enter a turn in another thread. Returns the event of its beginning."""
    begun = threading.Event()

    def enter() -> None:
        turn.__enter__()
        begun.set()

    threading.Thread(target=enter, daemon=True).start()
    return begun


def test_a_turn_lasts_for_its_window_and_its_clock_for_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    turns, first, second = Turns(), Stepping(), Stepping()
    one, other = turns.of(first), turns.of(second)
    assert first.block is one
    with one:
        begun = entered(other)
        now[0] += 0.6 * WINDOW
    assert one.seconds() == pytest.approx(0.6 * WINDOW)
    with one:  # still its turn
        assert not begun.wait(0.05)
        now[0] += 0.6 * WINDOW
    assert begun.wait(10)
    now[0] += 1
    assert one.seconds() == pytest.approx(1.2 * WINDOW)
    assert other.seconds() == pytest.approx(1)
    waiting = entered(one)
    assert not waiting.wait(0.05)
    second.health.requests = 0
    other.__exit__(None)
    assert waiting.wait(10)


def test_nobody_steps_while_turns_are_held_and_all_after_their_end() -> None:
    turns, first, second = Turns(), Stepping(), Stepping()
    one, other = turns.of(first), turns.of(second)
    with turns.held():
        begun = entered(one)
        assert not begun.wait(0.05)
    assert begun.wait(10)
    waiting = entered(other)  # the first one keeps its turn, as a runtime that is closed does
    assert not waiting.wait(0.05)
    turns.end()
    assert waiting.wait(10)


@pytest.mark.parametrize("error", [None, ValueError])
def test_a_runtime_that_fails_or_has_no_requests_keeps_no_turn(error: type[Exception] | None) -> None:
    turns, first, second = Turns(), Stepping(), Stepping()
    one, other = turns.of(first), turns.of(second)
    first.health.requests = 0 if error is None else 1
    one.__enter__()
    one.__exit__(error)
    assert entered(other).wait(10)
