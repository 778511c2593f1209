"""Named ranges of time around the parts of a step: one `with` feeds the clock of the metrics and whoever watches.

    step   offers, resample, draft   trees at hand; trees that drafters make, their engine calls inside
           choose, fill              which part of it is verified; the engine's inputs
           verify                    the verifier's engine call; inside, on a device, `wait` for its answer
           accept, commit            what is accepted, rows moved; tokens out, drafter and controller told
    begin  prefill                   a request's prompt, chunk by chunk

Nobody watches unless a profile is taken (`runtime/watchers.py`). Then a range whose seconds the metrics need costs two
readings of the clock, and any other nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from redraft.runtime.metrics import Clock
from redraft.types import Outcome, Tree

STEP = "step"
WAIT = "wait"
FIELDS: Mapping[str, str] = {
    STEP: "total",
    "offers": "draft",
    "draft": "draft",
    "resample": "resample",
    "verify": "verify",
}
"""The clock's field that a stage's seconds are added to. Time of a step in no other field is the host's."""
ENGINE = "engine."
"""What the names of engine calls begin with; a graph's name follows."""


class Watcher(Protocol):
    """Sees every range as it is entered and left, innermost last, and what is counted between.

    waits: whether the ranges of engine calls on a device last until the device is done, which costs a step some time;
    else they last until the work is put in order.
    """

    waits: bool

    def enter(self, name: str) -> None:
        """A range begins."""

    def leave(self, name: str, started: float, ended: float) -> None:
        """The range entered last ends; both times as `time.perf_counter` tells them, in seconds."""

    def count(self, name: str, value: float) -> None:
        """A quantity changes to `value` now."""


class Range:
    """A range that is entered again and again, never while it is open. `latest` is how many seconds it took last."""

    __slots__ = ("_field", "_seconds", "_started", "latest", "name", "watcher")

    def __init__(self, name: str, clock: Clock, field: str | None, watcher: Watcher | None) -> None:
        self.name = name
        self.latest = 0.0
        self.watcher = watcher
        self._seconds = vars(clock)
        self._field = field

    def __enter__(self) -> None:
        if self.watcher is not None:
            self.watcher.enter(self.name)
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        ended = time.perf_counter()
        self.latest = 0.0
        self.add(ended - self._started)
        if self.watcher is not None:
            self.watcher.leave(self.name, self._started, ended)

    def add(self, spent: float) -> None:
        """Count seconds to the latest time, and to the clock's field."""
        self.latest += spent
        if self._field is not None:
            self._seconds[self._field] += spent


class Ranges:
    """The ranges of one runtime, made on first use; `clock` collects their seconds."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.watcher: Watcher | None = None
        self._stages: dict[str, Range | _Nothing] = {}
        self._calls: dict[str, Range] = {}

    def stage(self, name: str) -> Range | _Nothing:
        """The range of a part of a step, to be entered by `with`.

        What follows a space, a drafter's id, tells ranges apart that are shown under one name.
        """
        found = self._stages.get(name)
        if found is None:
            shown = name.partition(" ")[0]
            field = FIELDS.get(shown)
            unseen = field is None and self.watcher is None
            found = self._stages[name] = _NOTHING if unseen else Range(shown, self.clock, field, self.watcher)
        return found

    def call(self, graph: str) -> Range:
        """The range of an engine's call, to be entered by `with`."""
        found = self._calls.get(graph)
        if found is None:
            found = self._calls[graph] = Range(ENGINE + graph, self.clock, "engine", self.watcher)
        return found

    def waited_for(self, stage: str, seconds: float, own: float) -> None:
        """The stage `verify` took longer than its `own` seconds on the device, since work of `stage`, which took
        `seconds` there, came first: so much of the time is that stage's.
        """
        verify, other = self.stage("verify"), self.stage(stage)
        late = min(max(verify.latest - own, 0.0), seconds)
        verify.add(-late)
        other.add(late)

    def count(self, trees: Sequence[Tree], outcomes: Sequence[Outcome]) -> None:
        """Tell who watches, if anyone does, what a step verified and what it accepted."""
        if self.watcher is not None:
            self.watcher.count("tree nodes", sum(map(len, trees)))
            self.watcher.count("accepted tokens", sum([outcome.accepted for outcome in outcomes]))

    @contextmanager
    def watched(self, watcher: Watcher) -> Iterator[None]:
        """Let `watcher` see every range until the end of the block. Enter and leave it between two steps."""
        self._watch(watcher)
        try:
            yield
        finally:
            self._watch(None)

    def _watch(self, watcher: Watcher | None) -> None:
        self.watcher = watcher
        self._stages, self._calls = {}, {}


class _Nothing:
    """A range that nobody watches and no field of the clock counts."""

    __slots__ = ()
    latest = 0.0

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def add(self, spent: float) -> None: ...


_NOTHING = _Nothing()
