"""Verification costs: milliseconds by sequences and nodes, which every call corrects.

A curve that was measured on a busy machine is wrong, and the load changes after the first opening. So calls correct the
level and the shape of the estimated curve (`VerifyCosts`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

SETTLED_STEPS = 16
"""Calls before a correction of the estimate, which uses the median of each size."""
_CLIP = math.log(4)
"""Largest correction, as a logarithm. Only interrupted calls differ more from the measured time."""
_FORGET = 0.8
"""Weight that a size's earlier calls keep after a correction."""


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

    def __init__(self, curves: Mapping[int, CostCurve], estimated: Mapping[int, CostCurve] | None = None) -> None:
        """curves: measured, by sequences, all of one length.   estimated: the latest estimates, if known."""
        self.measured = dict(sorted(curves.items()))
        self.steps = 0
        self._tables: dict[int, list[float]] = {}
        self._logs: dict[int, np.ndarray[Any, np.dtype[np.float64]]] = {}
        self._known: dict[int, np.ndarray[Any, np.dtype[np.float64]]] = {}
        self._calls: list[tuple[int, int, float]] = []
        for sequences, curve in (estimated or self.measured).items():
            self._add(sequences, np.log(curve.table_ms[1:]))

    @property
    def largest(self) -> int:
        """Largest number of nodes of one sequence's tree, root included."""
        return next(iter(self.measured.values())).largest

    @property
    def estimated(self) -> dict[int, CostCurve]:
        """Estimated curves of the measured numbers of sequences."""
        return {sequences: CostCurve(tuple(self.table_ms(sequences))) for sequences in self.measured}

    def table_ms(self, sequences: int) -> list[float]:
        """Return milliseconds by nodes, which never fall; entry 0 is 0. A correction makes a new list."""
        table = self._tables.get(sequences)
        if table is None:
            if sequences not in self._logs:
                self._add(sequences, self._between(sequences))
            table = self._tables[sequences] = [0.0, *np.exp(self._logs[sequences]).tolist()]
        return table

    def observe(self, sequences: int, nodes: int, ms: float) -> None:
        """Record a call over `sequences` trees of at most `nodes` nodes."""
        self._calls.append((sequences, nodes, ms))
        if len(self._calls) >= SETTLED_STEPS:
            self._settle()

    def drift(self, saved: Mapping[int, CostCurve]) -> float:
        """Return the largest relative difference between the estimate and `saved`."""
        pairs = [
            (new, old)
            for sequences, curve in saved.items()
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
