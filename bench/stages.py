"""The time of every stage of a decoding run, from the ranges of a recording or of Nsight Systems."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from redraft.errors import UsageError
from redraft.runtime.profiling import ENGINE, FIELDS, STEP, Recorded

HEADER = ("range", "calls", "total ms", "mean ms", "p50 ms", "p99 ms", "share")
METRICS = ("draft", "verify", "resample")


@dataclass(frozen=True)
class Stage:
    """All ranges that were entered by the same path: `path` is their name after those around them.

    share: of the time of all steps; None outside of steps.
    """

    path: tuple[str, ...]
    calls: int
    total_ms: float
    mean_ms: float
    p50_ms: float
    p99_ms: float
    share: float | None

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {**asdict(self), "path": list(self.path)}


@dataclass(frozen=True)
class Profile:
    """The time of a run: its stages by path, and the time of all steps by the fields of `Metrics.stage_ms`.

    outside_engines: share of the time of steps outside of engine calls.
    """

    stages: tuple[Stage, ...]
    stage_ms: dict[str, float]
    outside_engines: float

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        stages = [stage.to_json() for stage in self.stages]
        return {"stages": stages, "stage_ms": self.stage_ms, "outside_engines": self.outside_engines}


def profile(ranges: Iterable[Recorded]) -> Profile:
    """Sum up the ranges of a run. Raises UsageError if they contain no step."""
    times: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for path, ms in with_paths(ranges):
        times[path].append(ms)
    steps_ms = sum(times.get((STEP,), ()))
    if not steps_ms:
        raise UsageError("no step was decoded after the first token", "raise --max-new-tokens")
    stages = tuple(_stage(path, values, steps_ms) for path, values in sorted(times.items(), key=_order))
    within = {path: sum(values) for path, values in times.items() if path[0] == STEP}
    engine_ms = sum(ms for path, ms in within.items() if path[-1].startswith(ENGINE))
    by_field = dict.fromkeys(METRICS, 0.0)
    for path, ms in within.items():
        if FIELDS.get(path[-1]) in by_field:
            by_field[FIELDS[path[-1]]] += ms
    by_field["host"] = max(steps_ms - sum(by_field.values()), 0.0)
    return Profile(stages, by_field, 1 - engine_ms / steps_ms)


def with_paths(ranges: Iterable[Recorded]) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield every range's path from the outermost to itself, and its milliseconds, in order of their beginnings."""
    path: list[str] = []
    for found in sorted(ranges, key=lambda found: (found.started, found.depth)):
        del path[found.depth :]
        path.append(found.name)
        yield tuple(path), (found.ended - found.started) * 1e3


def _stage(path: tuple[str, ...], values: list[float], steps_ms: float) -> Stage:
    total = sum(values)
    p50, p99 = np.percentile(values, [50, 99]).tolist()
    share = total / steps_ms if path[0] == STEP else None
    return Stage(path, len(values), total, total / len(values), p50, p99, share)


def _order(item: tuple[tuple[str, ...], list[float]]) -> tuple[int, ...]:
    """Sort stages in the order of a step; stages outside of steps come first."""
    places = {name: place for place, name in enumerate(ORDER)}
    return tuple(places.get(name, len(places)) for name in item[0])


ORDER = ("begin", "prefill", STEP, "offers", "resample", "draft", "choose", "fill", "verify", "accept", "commit")


def table(found: Profile) -> list[tuple[str, ...]]:
    """Return rows of text, the header first: every stage below its parent, then the parent's remaining time."""
    return [HEADER, *(_row(stage) for stage in found.stages), _rest(found)]


def _row(stage: Stage) -> tuple[str, ...]:
    share = "" if stage.share is None else f"{stage.share:.1%}"
    times = (f"{ms:.3f}" for ms in (stage.mean_ms, stage.p50_ms, stage.p99_ms))
    return ("  " * (len(stage.path) - 1) + stage.path[-1], str(stage.calls), f"{stage.total_ms:.1f}", *times, share)


def _rest(found: Profile) -> tuple[str, ...]:
    step = next(stage for stage in found.stages if stage.path == (STEP,))
    parts_ms = sum(stage.total_ms for stage in found.stages if stage.path[:-1] == (STEP,))
    rest_ms = step.total_ms - parts_ms
    return (
        "  (between)",
        "",
        f"{rest_ms:.1f}",
        f"{rest_ms / step.calls:.3f}",
        "",
        "",
        f"{rest_ms / step.total_ms:.1%}",
    )
