"""What verification costs on this machine: milliseconds by the number of nodes verified at once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from redraft.engines.tensorrt.driver import find_gpu
from redraft.errors import BackendError
from redraft.runtime.drafters.base import Drafter
from redraft.runtime.verifier import Verifier
from redraft.types import Costs

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
"""Tree sizes that are measured, root included."""
MEASURED_LIVE = 256
"""Rows live while measuring."""
_SECONDS = 1.2
_ROUNDS = range(3, 40)
_TURNS, _TYPICAL_NODES, _TYPICAL_ROWS = 60, 6, 2


@dataclass(frozen=True)
class CostCurve:
    """`table_ms[n]` is the time of one verification of n nodes a sequence, root included; entry 0 is 0.

    It never falls and is interpolated between the sizes measured.
    """

    table_ms: tuple[float, ...]

    @classmethod
    def from_points(cls, points: Mapping[int, float]) -> CostCurve:
        """The curve through milliseconds by size. Raises ValueError where a time is not positive and finite."""
        sizes = sorted(points)
        times = np.array([points[size] for size in sizes], dtype=np.float64)
        if not sizes or sizes[0] != 1 or not np.all(np.isfinite(times)) or times.min() <= 0:
            raise ValueError(f"no cost curve: {dict(points)}")
        table = np.interp(np.arange(1, sizes[-1] + 1), sizes, np.maximum.accumulate(times))
        return cls((0.0, *table.tolist()))

    @property
    def largest(self) -> int:
        """Largest number of nodes the curve covers, root included."""
        return len(self.table_ms) - 1


def measure_curve(verifier: Verifier, sizes: tuple[int, ...] = SIZES, seconds: float = _SECONDS) -> CostCurve:
    """Time `verifier` at full batch, the sizes taking turns: the least time of each. Takes about `seconds`.

    Overwrites KV rows, so no request may be running.
    """
    fitting = [size for size in sizes if size <= min(verifier.capacity, verifier.largest_tree)]
    best = dict.fromkeys(fitting, float("inf"))
    start = time.perf_counter()
    for done in range(_ROUNDS.stop):
        if done >= _ROUNDS.start and time.perf_counter() - start > seconds:
            break
        for size in fitting:
            taken = verifier.measure_ms(verifier.slots, size, MEASURED_LIVE)
            best[size] = min(best[size], taken) if done else best[size]
    return CostCurve.from_points(best)


def cached_curve(verifier: Verifier, identity: Mapping[str, str | int]) -> CostCurve:
    """The curve measured before under this `identity` on this machine, else measured now and kept.

    Of the device `cuda` the machine's GPU is part of what it is kept under. A cache that cannot be read or written is
    done without, and so is one for a GPU that nobody can name.
    """
    path = _file(identity)
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        return CostCurve.from_points({int(n): float(ms) for n, ms in _read(path).items()})
    curve = measure_curve(verifier)
    with contextlib.suppress(OSError):
        _write(path, {str(size): ms for size, ms in enumerate(curve.table_ms) if size})
    return curve


def cached_costs(verifier: Verifier, drafter: Drafter, identity: Mapping[str, str | int]) -> Costs:
    """What a drafter's calls cost under this `identity` on this machine, measured once and kept, like the curve.

    Calls take turns with the verifier's, as in decoding, where each finds the other's weights in the caches.
    """
    if not drafter.has_engines:
        return Costs()
    path = _file(identity)
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
        values = _read(path)
        return Costs(float(values["fresh_ms"]), float(values["resample_ms"]))
    taken = []
    for _ in range(_TURNS):
        verifier.measure_ms(1, _TYPICAL_NODES, MEASURED_LIVE)
        taken.append(drafter.measure_ms(_TYPICAL_ROWS, MEASURED_LIVE))
    fresh, resampled = (min(times) for times in zip(*taken, strict=True))  # decoding corrects what is too low
    with contextlib.suppress(OSError):
        _write(path, {"fresh_ms": fresh, "resample_ms": resampled})
    return Costs(fresh, resampled)


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "redraft" / "curves"


def _file(identity: Mapping[str, str | int]) -> Path | None:
    """Where what was measured under `identity` here is kept; None where the GPU cannot be named."""
    try:
        return _cache_folder() / f"{_key(identity)}.json"
    except BackendError:
        return None


def _key(identity: Mapping[str, str | int]) -> str:
    """Names everything that a time depends on. Raises BackendError where the device is a GPU that has no name."""
    machine = {
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "live": MEASURED_LIVE,
        **(_gpu() if identity.get("device") == "cuda" else {}),
    }
    return hashlib.sha256(json.dumps({**identity, **machine}, sort_keys=True).encode()).hexdigest()[:32]


def _gpu() -> dict[str, object]:
    """The GPU that engines run on: the first visible one."""
    found = find_gpu()
    return {"gpu": found.name, "compute_capability": found.compute_capability}


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _read(path: Path | None) -> Any:
    """The JSON value in a file. Raises OSError, ValueError."""
    if path is None:
        raise FileNotFoundError
    return json.loads(path.read_bytes())


def _write(path: Path | None, values: Mapping[str, float]) -> None:
    """Write all or nothing, so that a reader never sees half a curve."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(values, file)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
