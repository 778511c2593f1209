"""Watchers of ranges: a recording for Perfetto, and NVIDIA's tools.

A trace is one JSON object in the Trace Event Format. It has complete events (`ph` X), counters
(C), and the names of process and thread (M). `ts` and `dur` are microseconds, and events nest as the format demands.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from typing import IO, Any, NamedTuple

from redraft.runtime.ranges import ENGINE

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
        """Open a range."""
        self._depth += 1

    def leave(self, name: str, started: float, ended: float) -> None:
        """Record the range."""
        self._depth -= 1
        self.ranges.append(Recorded(name, started, ended, self._depth))

    def count(self, name: str, value: float) -> None:
        """Record the count."""
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
        """End the range."""
        self._domain.pop_range()

    def count(self, name: str, value: float) -> None:
        """Ignore counts."""
