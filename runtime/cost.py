"""Verification costs on this machine: milliseconds by sequences and nodes, measured shortly and corrected later.

A large model has time for a few sizes only; a line through the largest two continues the curve. A curve that was
measured on a busy machine is wrong, and the load changes after the first opening. So every call corrects the level and
the shape of the estimated curve (`VerifyCosts`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol, Self

import numpy as np

from redraft.runtime.measurements import Identity, kept_file, read_kept, write_kept
from redraft.runtime.verifier import Verifier
from redraft.types import Costs

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
"""Tree sizes that are measured if there is time, root included."""
_FIRST_ROWS, _LEAST_SIZES = 8, 2
"""Rows of the second size that is measured, and the sizes that are measured however long they take."""
MEASURED_KV_LEN = 256
"""KV rows in use while measuring."""
SETTLED_STEPS = 16
"""Calls before a correction of the estimate, which uses the median of each size."""
_SECONDS = 0.8
_ROUNDS = 40
_DRAFT_SECONDS, _TURNS = 0.5, range(3, 60)
_TYPICAL_NODES, _TYPICAL_ROWS = 6, 2
_CLIP = math.log(4)
"""Largest correction, as a logarithm. Only interrupted calls differ more from the measured time."""
_FORGET = 0.8
"""Weight that a size's earlier calls keep after a correction."""
_KEPT_DRIFT = 0.05
"""Smallest relative change of a time that is written to disk."""
_LOG = logging.getLogger("redraft.costs")


@dataclass(frozen=True)
class CostCurve:
    """`table_ms[n]` is the time of one verification of n nodes a sequence, root included; entry 0 is 0.

    It never falls. Sizes between the measured ones are interpolated, larger ones extrapolated.
    """

    table_ms: tuple[float, ...]

    @classmethod
    def from_points(cls, points: Mapping[int, float], largest: int = 0) -> CostCurve:
        """Return the curve through milliseconds by size, up to the size `largest` or the largest of `points`.

        Raises ValueError if a time is not positive and finite.
        """
        sizes = sorted(points)
        times = np.array([points[size] for size in sizes], dtype=np.float64)
        if not sizes or sizes[0] != 1 or not np.all(np.isfinite(times)) or times.min() <= 0:
            raise ValueError(f"no cost curve: {dict(points)}")
        times = np.maximum.accumulate(times)
        if largest > sizes[-1]:
            rise = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 1 else 0.0
            times = np.append(times, times[-1] + rise * (largest - sizes[-1]))
            sizes.append(largest)
        table = np.interp(np.arange(1, sizes[-1] + 1), sizes, times)
        return cls((0.0, *table.tolist()))

    @property
    def largest(self) -> int:
        """Largest number of nodes in the curve, root included."""
        return len(self.table_ms) - 1


class VerifyCosts:
    """t(B, n): milliseconds of a verification of n nodes for each of B sequences, as measured and as estimated now.

    An estimate is the measured time, times a factor. After `SETTLED_STEPS` calls, all factors move by the median call's
    error, which corrects the level: the machine's load. Then the factors of the called sizes move by their remaining
    errors, which corrects the shape. Other sizes move less the further away they are, and the more calls they have had.
    """

    def __init__(self, curves: Mapping[int, CostCurve], believed: Mapping[int, CostCurve] | None = None) -> None:
        """curves: measured, by sequences, all of one length.   believed: the latest estimates, if known."""
        self.measured = dict(sorted(curves.items()))
        self.steps = 0
        self._tables: dict[int, list[float]] = {}
        self._logs: dict[int, np.ndarray[Any, np.dtype[np.float64]]] = {}
        self._known: dict[int, np.ndarray[Any, np.dtype[np.float64]]] = {}
        self._calls: list[tuple[int, int, float]] = []
        for sequences, curve in (believed or self.measured).items():
            self._add(sequences, np.log(curve.table_ms[1:]))

    @classmethod
    def of(cls, curve: CostCurve, sequences: int = 1) -> Self:
        """Return costs with one known curve."""
        return cls({sequences: curve})

    @property
    def largest(self) -> int:
        """Largest number of nodes of one sequence's tree, root included."""
        return next(iter(self.measured.values())).largest

    @property
    def believed(self) -> dict[int, CostCurve]:
        """Estimated curves, by sequences."""
        return {sequences: CostCurve(tuple(self.table_ms(sequences))) for sequences in sorted(self._logs)}

    def table_ms(self, sequences: int) -> list[float]:
        """Return milliseconds by nodes, which never fall; entry 0 is 0. A correction makes a new list."""
        table = self._tables.get(sequences)
        if table is None:
            if sequences not in self._logs:
                self._add(sequences, self._between(sequences))
            table = self._tables[sequences] = [0.0, *np.exp(self._logs[sequences]).tolist()]
        return table

    def observe(self, sequences: int, nodes: int, ms: float) -> bool:
        """Record a call over `sequences` trees of at most `nodes` nodes. Returns true if the estimate has changed."""
        self._calls.append((sequences, nodes, ms))
        if len(self._calls) < SETTLED_STEPS:
            return False
        self._settle()
        return True

    def drift(self, kept: Mapping[int, CostCurve]) -> float:
        """Return the largest relative difference between the estimate and `kept`."""
        pairs = [
            (new, old)
            for sequences, curve in kept.items()
            for new, old in zip(self.table_ms(sequences)[1:], curve.table_ms[1:], strict=True)
        ]
        return max(abs(new / old - 1) for new, old in pairs)

    def _settle(self) -> None:
        self.steps += len(self._calls)
        by_size: dict[tuple[int, int], list[float]] = {}
        for sequences, nodes, ms in self._calls:
            if 1 <= nodes <= self.largest and ms > 0:
                by_size.setdefault((sequences, nodes), []).append(ms)
        self._calls.clear()
        wrong = {
            size: min(max(math.log(median(times) / self.table_ms(size[0])[size[1]]), -_CLIP), _CLIP)
            for size, times in by_size.items()
        }
        if not wrong:
            return
        level = median([wrong[size] for size, times in by_size.items() for _ in times])
        for number, logs in self._logs.items():
            logs += level
            self._known[number] *= _FORGET
        for (sequences, nodes), times in by_size.items():
            self._reshape(sequences, nodes, wrong[sequences, nodes] - level, len(times))
        for logs in self._logs.values():
            np.maximum.accumulate(logs, out=logs)
        self._tables.clear()

    def _reshape(self, sequences: int, nodes: int, wrong: float, calls: int) -> None:
        """Move the logarithm of t(sequences, nodes) by most of `wrong`, and those of other sizes by less."""
        sizes = np.log2(np.arange(1, self.largest + 1))
        for other, logs in self._logs.items():
            away = np.abs(sizes - math.log2(nodes)) + 2 * abs(math.log2(other / sequences))
            free = 1 / (1 + self._known[other])
            logs += wrong * calls / (calls + 0.5) * (free * np.exp2(-away) + (1 - free) * np.exp2(-6 * away))
        self._known[sequences][nodes - 1] += calls

    def _add(self, sequences: int, logs: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        self._logs[sequences] = logs.copy()
        self._known[sequences] = np.zeros(len(logs))

    def _between(self, sequences: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Interpolate between the known numbers of sequences, both as logarithms."""
        known = sorted(self._logs)
        below = max([number for number in known if number <= sequences], default=known[0])
        above = min([number for number in known if number >= sequences], default=known[-1])
        if below == above:
            return self._logs[below]
        share = math.log(sequences / below) / math.log(above / below)
        return (1 - share) * self._logs[below] + share * self._logs[above]


def measure_curve(
    verifier: Verifier, sizes: tuple[int, ...] = SIZES, seconds: float = _SECONDS, sequences: int | None = None
) -> CostCurve:
    """Measure the least time of each size over `sequences` sequences. Sizes take turns.

    This takes about `seconds`, or two calls of two sizes if these take longer. Larger sizes than the measured ones are
    extrapolated. It overwrites KV rows, so no request may be running.
    """
    batch = sequences or verifier.max_num_seqs
    fitting = [size for size in sizes if size <= min(verifier.max_model_len, verifier.largest_tree)]
    best: dict[int, float] = {}
    start = time.perf_counter()
    for size in _most_telling(fitting, batch):
        if len(best) >= _LEAST_SIZES and time.perf_counter() - start > seconds:
            break
        verifier.measure_ms(batch, size, MEASURED_KV_LEN)  # the first call of a size prepares it
        best[size] = verifier.measure_ms(batch, size, MEASURED_KV_LEN)
    for _ in range(_ROUNDS):
        for size, least in best.items():
            if time.perf_counter() - start > seconds:
                return CostCurve.from_points(best, fitting[-1])
            best[size] = min(least, verifier.measure_ms(batch, size, MEASURED_KV_LEN))
    return CostCurve.from_points(best, fitting[-1])


def _most_telling(sizes: list[int], sequences: int) -> list[int]:
    """Order sizes: one node, about eight rows in all, powers of two, all others."""
    first = (1, max(2, _FIRST_ROWS // sequences), *(size for size in sizes if size.bit_count() == 1))
    return [size for size in dict.fromkeys((*first, *sizes)) if size in sizes]


def measure_costs(verifier: Verifier) -> VerifyCosts:
    """Measure the curves of one sequence and of a full batch."""
    batches = sorted({1, verifier.max_num_seqs})
    return VerifyCosts({n: measure_curve(verifier, seconds=_SECONDS / len(batches), sequences=n) for n in batches})


def load_costs(verifier: Verifier, identity: Identity) -> VerifyCosts:
    """Load the estimate of the last run with this `identity` on this machine; otherwise measure and save one."""
    path = kept_file({**identity, "kv_len": MEASURED_KV_LEN})
    if path is not None and path.exists():
        kept = read_kept(path)
        costs = parse_costs(kept, verifier) if kept and kept.get("identity") == dict(identity) else None
        if costs is not None:
            return costs
        _LOG.warning("%s holds no costs of these engines: they are measured again", path)
    costs = measure_costs(verifier)
    keep_costs(costs, identity)
    return costs


def keep_costs(costs: VerifyCosts, identity: Identity) -> None:
    """Save the measured and the estimated costs, unless the file holds nearly the same."""
    path = kept_file({**identity, "kv_len": MEASURED_KV_LEN})
    kept = _curves((read_kept(path) or {}).get("believed"))
    if kept and set(kept) <= set(costs.measured) and _same_length(kept, costs) and costs.drift(kept) < _KEPT_DRIFT:
        return
    believed = {sequences: CostCurve(tuple(costs.table_ms(sequences))) for sequences in costs.measured}
    parts = {"measured": costs.measured, "believed": believed}
    curves = {name: {str(n): curve.table_ms[1:] for n, curve in part.items()} for name, part in parts.items()}
    write_kept(path, {"identity": dict(identity), **curves})


def _largest(verifier: Verifier) -> int:
    return max(size for size in SIZES if size <= min(verifier.max_model_len, verifier.largest_tree))


def parse_costs(values: dict[str, Any] | None, verifier: Verifier) -> VerifyCosts | None:
    """Return the costs in a file's JSON; None if they do not fit the verifier or have another form."""
    measured, believed = (_curves((values or {}).get(name)) for name in ("measured", "believed"))
    if (
        measured is None
        or believed is None
        or set(measured) != set(believed)
        or set(measured) != {1, verifier.max_num_seqs}
    ):
        return None
    lengths = {curve.largest for curve in (*measured.values(), *believed.values())}
    return VerifyCosts(measured, believed) if lengths == {_largest(verifier)} else None


def _curves(part: Any) -> dict[int, CostCurve] | None:
    try:
        return {int(n): CostCurve.from_points(dict(enumerate(map(float, ms), 1))) for n, ms in part.items()} or None
    except (ValueError, TypeError, AttributeError):
        return None


def _same_length(kept: Mapping[int, CostCurve], costs: VerifyCosts) -> bool:
    return all(curve.largest == costs.largest for curve in kept.values())


class TimedDrafter(Protocol):
    """A drafter with engines, whose calls can be timed."""

    def measure_ms(self, rows: int, kv_len: int) -> tuple[float, float]:
        """Return milliseconds of a draft with `rows` pending rows after `kv_len` ones, and of a resampling."""


def cached_costs(verifier: Verifier, drafter: TimedDrafter, identity: Identity) -> Costs:
    """Return the costs of a drafter's calls with this `identity` on this machine, measured once and saved.

    Calls alternate with the verifier's, since in decoding each evicts the other's weights from the caches.
    """
    path = kept_file({**identity, "kv_len": MEASURED_KV_LEN})
    values = read_kept(path) or {}
    with contextlib.suppress(KeyError, TypeError, ValueError):
        kept = Costs(float(values["fresh_ms"]), float(values["resample_ms"]))
        if all(math.isfinite(ms) and ms >= 0 for ms in (kept.fresh_ms, kept.resample_ms)):
            return kept
    taken: list[tuple[float, float]] = []
    start = time.perf_counter()
    while len(taken) < _TURNS.stop and (len(taken) < _TURNS.start or time.perf_counter() - start < _DRAFT_SECONDS):
        verifier.measure_ms(1, _TYPICAL_NODES, MEASURED_KV_LEN)
        taken.append(drafter.measure_ms(_TYPICAL_ROWS, MEASURED_KV_LEN))
    fresh, resampled = (min(times) for times in zip(*taken, strict=True))  # decoding corrects times that are too low
    write_kept(path, {"fresh_ms": fresh, "resample_ms": resampled})
    return Costs(fresh, resampled)
