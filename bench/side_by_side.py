"""Runtimes that decode at the same time and step in turn, each with a clock that runs in its own turns only.

The speed of a shared machine changes within seconds by more than methods differ: on two cores, the mean of 5 seconds
differed from the next mean by a tenth. Short turns let slow seconds affect all runtimes alike.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from redraft.runtime import Runtime

WINDOW = 0.1
"""Seconds of a turn, at least. It ends with a step."""


class Turns:
    """Hands out turns in order. A runtime without requests keeps none. Call `end` before one is closed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        self._ended = False

    def of(self, runtime: Runtime) -> Turn:
        """Let a runtime step in turn from now on, and return its clock."""
        turn = Turn(self, runtime)
        runtime.step_within(turn)
        return turn

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let no runtime step in the block."""
        nobody = object()
        self.take(nobody)
        try:
            yield
        finally:
            self.leave(nobody)

    def end(self) -> None:
        """Let all runtimes step as they like from now on."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def take(self, turn: object) -> None:
        """Wait for a turn. Returns at once if it has not ended."""
        with self._changed:
            if turn not in self._queue:
                self._queue.append(turn)
            self._changed.wait_for(lambda: self._ended or self._queue[0] is turn)

    def leave(self, turn: object) -> None:
        """End a turn."""
        with self._changed:
            self._queue.remove(turn)
            self._changed.notify_all()


class Turn:
    """The turns of one runtime: a block that its decode loop runs every step in. `seconds` is its clock."""

    def __init__(self, turns: Turns, runtime: Runtime) -> None:
        self._turns, self._runtime = turns, runtime
        self._spent = 0.0
        self._began: float | None = None

    def __enter__(self) -> None:
        self._turns.take(self)
        if self._began is None:
            self._began = time.perf_counter()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        assert self._began is not None
        taken = time.perf_counter() - self._began
        if error is not None or taken >= WINDOW or not self._runtime.health.requests:
            self._spent, self._began = self._spent + taken, None
            self._turns.leave(self)

    def seconds(self) -> float:
        """Return the seconds of its turns so far."""
        began = self._began
        return self._spent + (0.0 if began is None else time.perf_counter() - began)
