"""Named time ranges around the parts of a step, and their listeners: a recording for Perfetto, and NVIDIA's tools.

One `with` updates the clock of the metrics and the listener, if any.

    step   offers, resample, draft   ready trees; trees that drafters make, their engine calls included
           catch-up                  rows that drafters had put off
           choose, fill              cutting the trees; the engine's inputs
           verify                    the verifier's engine call; on a device, it contains `wait` for the result
           accept, commit            accepted tokens, and moved rows; updates of sequences, drafter and controller
    prefill                          a chunk of a prompt in a call of its own

Only profiles have a listener. Without one, a range of the metrics reads the clock twice, and any other range costs
nothing.

A recording is one JSON object in the Trace Event Format. It has complete events (`ph` X), counters (C), and the names
of process and thread (M). `ts` and `dur` are microseconds, and events nest as the format demands.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any, NamedTuple, Protocol, Self

from redraft.runtime.observe.metrics import Clock
from redraft.types import Outcome, Tree

STEP = "step"
WAIT = "wait"
FIELDS: Mapping[str, str] = {
    STEP: "total",
    "offers": "draft",
    "catch-up": "draft",
    "draft": "draft",
    "resample": "resample",
    "verify": "verify",
}
"""The clock field of each stage. The host's time is the time of a step in no field."""
ENGINE = "engine."
"""Prefix of the names of engine calls; a graph's name follows."""


class RangeListener(Protocol):
    """Receives the begin and the end of every range, innermost last, and the counts between them.

    waits: True if the ranges of engine calls on a device last until the device is done, which slows the step. Otherwise
    they last until the work is enqueued.
    """

    waits: bool

    def enter(self, name: str) -> None:
        """Begin a range."""

    def leave(self, name: str, started: float, ended: float) -> None:
        """End the latest open range. Both times are seconds of `time.perf_counter`."""

    def count(self, name: str, value: float) -> None:
        """Record that a quantity changes to `value` now."""


class StageTimer:
    """A range that is entered many times, but never while it is open. `latest` is its last duration in seconds."""

    __slots__ = ("_field", "_seconds", "_started", "latest", "listener", "name")

    def __init__(self, name: str, clock: Clock, field: str | None, listener: RangeListener | None) -> None:
        self.name = name
        self.latest = 0.0
        self.listener = listener
        self._seconds = vars(clock)
        self._field = field

    def __enter__(self) -> Self:
        if self.listener is not None:
            self.listener.enter(self.name)
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        ended = time.perf_counter()
        self.latest = 0.0
        self.add(ended - self._started)
        if self.listener is not None:
            self.listener.leave(self.name, self._started, ended)

    @property
    def elapsed(self) -> float:
        """Seconds since it was entered."""
        return time.perf_counter() - self._started

    def add(self, spent: float) -> None:
        """Add seconds to the latest time, and to the clock's field."""
        self.latest += spent
        if self._field is not None:
            self._seconds[self._field] += spent


class StageTimers:
    """The ranges of one runtime, created on first use; `clock` collects their seconds."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.listener: RangeListener | None = None
        self._stages: dict[str, StageTimer | _NoTimer] = {}

    def stage(self, name: str) -> StageTimer | _NoTimer:
        """Return the range of a part of a step, for use in `with`.

        Text after a space, such as a drafter's id, distinguishes ranges that are shown under one name.
        """
        found = self._stages.get(name)
        if found is None:
            shown = name.partition(" ")[0]
            field = "engine" if shown.startswith(ENGINE) else FIELDS.get(shown)
            unseen = field is None and self.listener is None
            found = self._stages[name] = _NO_TIMER if unseen else StageTimer(shown, self.clock, field, self.listener)
        return found

    def call(self, graph: str) -> StageTimer | _NoTimer:
        """Return the range of an engine's call, for use in `with`."""
        return self.stage(ENGINE + graph)

    def waited_for(self, stage: str, seconds: float, own: float) -> None:
        """Move the time that `verify` waited for the work of `stage` to that stage.

        seconds: time of that work on the device.   own: time of the verification alone.
        """
        verify, other = self.stage("verify"), self.stage(stage)
        late = min(max(verify.latest - own, 0.0), seconds)
        verify.add(-late)
        other.add(late)

    def count(self, trees: Sequence[Tree], outcomes: Sequence[Outcome]) -> None:
        """Report the verified and accepted tokens of a step to the listener, if any."""
        if self.listener is not None:
            self.listener.count("tree nodes", sum(map(len, trees)))
            self.listener.count("accepted tokens", sum([outcome.accepted for outcome in outcomes]))

    @contextmanager
    def listening(self, listener: RangeListener) -> Iterator[None]:
        """Let `listener` receive every range until the end of the block. Enter and leave it between two steps."""
        self.listener = listener
        self._stages = {}
        try:
            yield
        finally:
            self.listener = None
            self._stages = {}


class _NoTimer:
    """A range without a listener or a field of the clock."""

    __slots__ = ()
    latest = elapsed = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def add(self, spent: float) -> None: ...


_NO_TIMER = _NoTimer()


NVTX_DOMAIN = "redraft"
PROCESS = "redraft"


class Recorded(NamedTuple):
    """A closed range: seconds of `time.perf_counter`, and how many ranges were open around it."""

    name: str
    started: float
    ended: float
    depth: int


class Recording:
    """Records every range and every count. `ranges` are in the order in which they ended, `counts` are
    (name, seconds, value).
    """

    waits = True

    def __init__(self) -> None:
        self.ranges: list[Recorded] = []
        self.counts: list[tuple[str, float, float]] = []
        self._depth = 0

    def enter(self, name: str) -> None:
        self._depth += 1

    def leave(self, name: str, started: float, ended: float) -> None:
        self._depth -= 1
        self.ranges.append(Recorded(name, started, ended, self._depth))

    def count(self, name: str, value: float) -> None:
        self.counts.append((name, time.perf_counter(), value))

    def write(self, file: IO[str], about: Mapping[str, Any] | None = None) -> None:
        """Write the trace, one event a line, with `about` as its metadata."""
        events = ",\n".join(json.dumps(event, separators=(",", ":")) for event in self._events())
        file.write(f'{{"otherData":{json.dumps(about or {})},"displayTimeUnit":"ms","traceEvents":[\n{events}\n]}}\n')

    def _events(self) -> Iterator[dict[str, Any]]:
        """Yield every event, those that begin earlier and enclose others first. Time begins with the first range.

        It rounds both ends to nanoseconds before it takes their difference, so that nested ranges stay nested.
        """
        place = {"pid": os.getpid(), "tid": threading.get_native_id()}
        for kind, name in (("process_name", PROCESS), ("thread_name", "decoding")):
            yield {"ph": "M", "name": kind, **place, "args": {"name": name}}
        origin = min((found.started for found in self.ranges), default=0.0)
        for name, started, ended, _ in sorted(self.ranges, key=lambda found: (found.started, found.depth)):
            start_ns, end_ns = round((started - origin) * 1e9), round((ended - origin) * 1e9)
            category = "engine" if name.startswith(ENGINE) else "stage"
            times = {"ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3}
            yield {"ph": "X", "name": name, "cat": category, **place, **times}
        for name, at, value in self.counts:
            yield {"ph": "C", "name": name, **place, "ts": round((at - origin) * 1e9) / 1e3, "args": {"value": value}}


class Nvtx:
    """Passes every range to NVIDIA's tools, in the domain `redraft`. Raises ModuleNotFoundError without `nvtx`."""

    waits = False  # the tools measure the end of the device's work

    def __init__(self) -> None:
        import nvtx

        self._domain = nvtx.get_domain(NVTX_DOMAIN)
        self._attributes: dict[str, Any] = {}

    def enter(self, name: str) -> None:
        """Begin a range. The tools register each name once."""
        attributes = self._attributes.get(name)
        if attributes is None:
            attributes = self._attributes[name] = self._domain.get_event_attributes(message=name)
        self._domain.push_range(attributes)

    def leave(self, name: str, started: float, ended: float) -> None:
        self._domain.pop_range()

    def count(self, name: str, value: float) -> None:
        """Ignore counts."""
