"""Progress of a build: its stage, the share that is done, and the time left, renewed every second."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

from redraft.garbage import return_memory

if TYPE_CHECKING:
    from redraft.assembly.resolve import ResolvedBuild

TRACE, REFERENCE, WEIGHTS, MEASURE, STATES, DRAFTERS, CHECK, WRITE = (
    "tracing the model", "running the model in fp32", "writing weights", "measuring quality", "computing hidden states",
    "building drafters", "checking engines", "finishing the bundle",
)  # fmt: skip
"""Stages of a build, in order."""
Reporter = Callable[[str], None]
"""Receives one line of progress."""
SECONDS_BETWEEN_LINES = 1.0
BAR = 20
"""Characters of the bar."""
SILENT_SHARE = 0.95
"""Largest share of a stage that is assumed to be done."""


def expected_seconds(build: ResolvedBuild, traced: bool, referenced: bool) -> dict[str, float]:
    """Return the expected seconds of each stage on two cores, from the sizes of the work.

    traced, referenced: True if an earlier build has done these stages.
    """
    layers = int(build.checkpoint.config.get("num_hidden_layers") or 24)
    billions = sum(math.prod(entry.shape) for entry in build.checkpoint.tensors.values()) / 1e9
    rounded = build.config.rounds_products
    measured = bool(build.texts) * build.tokens / 1000
    return {
        TRACE: 0 if traced else 2 + 0.6 * layers,
        REFERENCE: 0 if referenced else measured * (2 + 22 * billions),
        WEIGHTS: 1 + (8 if rounded else 1) * billions,
        MEASURE: measured * (2 + 14 * billions),
        STATES: bool(build.state_texts) * (4 + 135 * billions),
        DRAFTERS: 8.0 * len(build.drafters),
        CHECK: build.check * (5 + 6 * billions if rounded else 10 + 10 * billions),
        WRITE: 1 + 3 * billions,
    }


class BuildProgress:
    """Reports a build's stages as lines such as `######.... 62 %, 35 s left: writing weights 40 %`.

    The time left comes from the expected seconds of each stage, times how much slower the finished ones were.
    A thread repeats the latest line with new times, since a stage may be silent for long. It then counts as done in
    proportion to its expected time, but never as all done.
    """

    def __init__(self, report: Reporter) -> None:
        self._report, self._expected = report, dict[str, float]()
        self._stage, self._share, self._inside = "", 0.0, False
        self._started = self._stage_started = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def expect(self, seconds: Mapping[str, float]) -> None:
        """Set the seconds of each stage on an idle machine, in order. Stages that are skipped count as done at once."""
        self._expected = dict(seconds)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    @contextmanager
    def stage(self, name: str) -> Iterator[Callable[[int, int], None]]:
        """Begin a stage. Yields a function that receives what of it is done, and the whole of it.

        A stage within another one changes nothing.
        """
        if self._inside:
            yield lambda done, total: None
            return
        self._inside = True
        self._stage, self._share, self._stage_started = name, 0.0, time.monotonic()
        self._report(self.line())

        def update(done: int, total: int) -> None:
            self._share = done / total if total else 0.0

        try:
            yield update
        finally:
            self._inside = False
        return_memory()
        self._share = 1.0

    def say(self, line: str) -> None:
        """Report a line that is not about time."""
        self._report(line)

    def line(self) -> str:
        """Return the build's share and time left, and the latest stage with its share.

        Nothing is known of the time left before expect(): the line has the seconds so far.
        """
        elapsed = time.monotonic() - self._started
        if not self._expected:
            return f"{self._stage}, {elapsed:.0f} s so far"
        done, left = self._seconds()
        pace = elapsed / done if done > 1 else 1.0
        share = f" {100 * self._share:.0f} %" if self._share else ""
        whole = done / max(done + left, 1e-9)
        bar = ("#" * round(BAR * whole)).ljust(BAR, ".")
        return f"{bar} {100 * whole:.0f} %, {pace * left:.0f} s left: {self._stage}{share}"

    def _seconds(self) -> tuple[float, float]:
        """Return the expected seconds of what is done and of what is left."""
        order = list(self._expected)
        place = order.index(self._stage) if self._stage in order else 0
        before = sum(self._expected[name] for name in order[:place])
        stage, elapsed = self._expected.get(self._stage, 0.0), time.monotonic() - self._stage_started
        done = before + (self._share * stage or min(elapsed, SILENT_SHARE * stage))
        return done, sum(self._expected.values()) - done

    def _repeat(self) -> None:
        while not self._ended.wait(SECONDS_BETWEEN_LINES):
            if self._stage:
                self._report(self.line())
