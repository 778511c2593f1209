"""The time of every stage of a decoding run, from the ranges of a recording or of Nsight Systems."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from redraft.bench.statistics import median_and_p99
from redraft.errors import UsageError
from redraft.runtime.observe.profiling import ENGINE, FIELDS, STEP, Recorded

HEADER = ("range", "calls", "total ms", "mean ms", "p50 ms", "p99 ms", "share")
ORDER = ("prefill", STEP, "offers", "resample", "draft", "choose", "fill", "verify", "accept", "commit")
Path = tuple[str, ...]
"""Names of the ranges around a range, from the outermost on, and its own name."""


@dataclass(frozen=True)
class Stage:
    """All ranges that were entered by the same path. share: of the time of all steps; None outside of steps."""

    path: Path
    calls: int
    total_ms: float
    mean_ms: float
    p50_ms: float
    p99_ms: float
    share: float | None


@dataclass(frozen=True)
class StageProfile:
    """The time of a run: its stages by path, and the time of all steps by the fields of `Metrics.stage_ms`.

    outside_engines: share of the time of steps outside of engine calls.
    """

    stages: tuple[Stage, ...]
    stage_ms: dict[str, float]
    outside_engines: float

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        stages = [{**asdict(stage), "path": list(stage.path)} for stage in self.stages]
        return {"stages": stages, "stage_ms": self.stage_ms, "outside_engines": self.outside_engines}


def profile(ranges: Iterable[Recorded]) -> StageProfile:
    """Sum up the ranges of a run. Raises UsageError if they contain no step."""
    times: dict[Path, list[float]] = defaultdict(list)
    for path, ms in with_paths(ranges):
        times[path].append(ms)
    steps_ms = sum(times.get((STEP,), ()))
    if not steps_ms:
        raise UsageError("no step was decoded", "raise --max-new-tokens")
    in_steps = {path: sum(values) for path, values in times.items() if path[0] == STEP}
    engine_ms = sum(ms for path, ms in in_steps.items() if path[-1].startswith(ENGINE))
    stage_ms = dict.fromkeys(("draft", "verify", "resample"), 0.0)
    for path, ms in in_steps.items():
        if FIELDS.get(path[-1]) in stage_ms:
            stage_ms[FIELDS[path[-1]]] += ms
    stage_ms["host"] = max(steps_ms - sum(stage_ms.values()), 0.0)
    stages = tuple(_stage(path, times[path], steps_ms) for path in sorted(times, key=_order))
    return StageProfile(stages, stage_ms, 1 - engine_ms / steps_ms)


def with_paths(ranges: Iterable[Recorded]) -> Iterator[tuple[Path, float]]:
    """Yield every range's path and its milliseconds, in order of their beginnings."""
    path: list[str] = []
    for one in sorted(ranges, key=lambda one: (one.started, one.depth)):
        del path[one.depth :]
        path.append(one.name)
        yield tuple(path), (one.ended - one.started) * 1e3


def _stage(path: Path, values: list[float], steps_ms: float) -> Stage:
    total = sum(values)
    share = total / steps_ms if path[0] == STEP else None
    return Stage(path, len(values), total, total / len(values), *median_and_p99(values), share)


def _order(path: Path) -> tuple[int, ...]:
    """Sort stages in the order of a step; stages outside of steps come first."""
    return tuple(ORDER.index(name) if name in ORDER else len(ORDER) for name in path)


def table(profiled: StageProfile) -> list[tuple[str, ...]]:
    """Return rows of text, the header first: every stage below its parent, then the parent's remaining time."""
    step = next(stage for stage in profiled.stages if stage.path == (STEP,))
    rest_ms = step.total_ms - sum(stage.total_ms for stage in profiled.stages if stage.path[:-1] == (STEP,))
    rest = (f"{rest_ms:.1f}", f"{rest_ms / step.calls:.3f}", "", "", f"{rest_ms / step.total_ms:.1%}")
    return [HEADER, *map(_row, profiled.stages), ("  (between)", "", *rest)]


def _row(stage: Stage) -> tuple[str, ...]:
    share = "" if stage.share is None else f"{stage.share:.1%}"
    times = (f"{ms:.3f}" for ms in (stage.mean_ms, stage.p50_ms, stage.p99_ms))
    return ("  " * (len(stage.path) - 1) + stage.path[-1], str(stage.calls), f"{stage.total_ms:.1f}", *times, share)
