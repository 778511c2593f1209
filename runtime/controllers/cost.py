"""Verification costs: milliseconds by sequences and rows, which every call corrects.

A curve that was measured on a busy machine is wrong, and the load changes after the first opening. So calls correct the
level and the shape of the estimated curve (`VerifyCosts`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from redraft.types import IntArray

Logs = np.ndarray[Any, np.dtype[np.float64]]

SETTLED_STEPS = 16
"""Calls before a correction of the estimate, which uses the median of each number of rows."""
_CLIP = math.log(4)
"""Largest correction, as a logarithm. Only interrupted calls differ more from the measured time."""
_FORGET = 0.8
"""Weight that earlier calls of a number of rows keep after a correction."""


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
    """t(B, N): milliseconds of a verification of N rows of B sequences, as measured and as estimated now.

    An estimate is the measured time, times a factor. After `SETTLED_STEPS` calls, all factors move by the median call's
    error, which corrects the level: the machine's load. Then the factors of the called numbers of rows move by their
    remaining errors, which corrects the shape. Others move less the further away they are, and the more calls they have
    had.

    packed: True if a call computes the nodes of all trees; False if it pads them to the size of the largest.
    """

    def __init__(
        self, curves: Mapping[int, CostCurve], estimated: Mapping[int, CostCurve] | None = None, packed: bool = True
    ) -> None:
        """curves: measured with trees of equal size, by sequences, all of one length.

        estimated: the latest tables (`table_ms`) of the same numbers of sequences, if known.
        """
        self.measured = dict(sorted(curves.items()))
        self.packed = packed
        self.steps = 0
        self._tables: dict[int, list[float]] = {}
        self._logs: dict[int, Logs] = {}
        self._known: dict[int, Logs] = {}
        self._calls: list[tuple[int, int, float]] = []
        for sequences, curve in self.measured.items():
            equal = sequences * np.arange(1, curve.largest + 1)
            between = np.interp(self._rows(sequences), equal, curve.table_ms[1:])
            self._add(sequences, np.log(between if estimated is None else estimated[sequences].table_ms[1:]))

    @property
    def largest(self) -> int:
        """Most nodes of a tree, root included, if all trees of a call are equal."""
        return next(iter(self.measured.values())).largest

    @property
    def estimated(self) -> dict[int, CostCurve]:
        """Estimated curves of the measured numbers of sequences, for trees of equal size."""
        return {n: CostCurve((0.0, *self.table_ms(n)[1::n])) for n in self.measured}

    def table_ms(self, sequences: int) -> list[float]:
        """Return milliseconds of calls over one tree a sequence, which never fall. A correction makes a new list.

        Entry 1 + k is the time of k drafted nodes in all, so of B + k rows; entry 0 is 0.
        """
        table = self._tables.get(sequences)
        if table is None:
            if sequences not in self._logs:
                self._add(sequences, self._between(sequences))
            table = self._tables[sequences] = [0.0, *np.exp(self._logs[sequences]).tolist()]
        return table

    def rows(self, sizes: Sequence[int]) -> int:
        """Return the rows of a call over trees of these sizes."""
        return sum(sizes) if self.packed else len(sizes) * max(sizes)

    def expected_ms(self, sequences: int, rows: int) -> float:
        """Return the estimated time of a call of so many rows, or of the largest that is known."""
        table = self.table_ms(sequences)
        return table[min(rows - sequences + 1, len(table) - 1)]

    def plain_share(self, sequences: int, rows: int) -> float:
        """Return the part of a call's time that one row a sequence would take: at most as measured, and as estimated.

        Estimates of sizes that were not called for long may be far off.
        """
        share = self.table_ms(sequences)[1] / self.expected_ms(sequences, rows)
        curve = self.measured.get(sequences)
        if curve is None:
            return share
        nodes, left = divmod(min(rows, sequences * self.largest), sequences)
        before, after = curve.table_ms[nodes], curve.table_ms[min(nodes + 1, self.largest)]
        return min(share, curve.table_ms[1] / (before + (after - before) * left / sequences))

    def observe(self, sequences: int, rows: int, ms: float) -> None:
        """Record a call over `rows` rows of `sequences` sequences."""
        self._calls.append((sequences, rows, ms))
        if len(self._calls) >= SETTLED_STEPS:
            self._settle()

    def drift(self, saved: Mapping[int, CostCurve]) -> float:
        """Return the largest relative difference between the estimates and `saved` tables."""
        pairs = [
            (new, old)
            for sequences, curve in saved.items()
            for new, old in zip(self.table_ms(sequences)[1:], curve.table_ms[1:], strict=True)
        ]
        return max(abs(new / old - 1) for new, old in pairs)

    def _settle(self) -> None:
        self.steps += len(self._calls)
        by_size: dict[tuple[int, int], list[float]] = {}
        for sequences, rows, ms in self._calls:
            if sequences <= rows <= sequences * self.largest and ms > 0:
                by_size.setdefault((sequences, rows), []).append(ms)
        self._calls.clear()
        wrong = {
            (number, rows): min(max(math.log(median(times) / self.table_ms(number)[rows - number + 1]), -_CLIP), _CLIP)
            for (number, rows), times in by_size.items()
        }
        if not wrong:
            return
        level = median([wrong[size] for size, times in by_size.items() for _ in times])
        for number, logs in self._logs.items():
            logs += level
            self._known[number] *= _FORGET
        for (sequences, rows), times in by_size.items():
            self._reshape(sequences, rows, wrong[sequences, rows] - level, len(times))
        for logs in self._logs.values():
            np.maximum.accumulate(logs, out=logs)
        self._tables.clear()

    def _reshape(self, sequences: int, rows: int, wrong: float, calls: int) -> None:
        """Move the logarithm of t(sequences, rows) by most of `wrong`, and others by less."""
        for other, logs in self._logs.items():
            away = np.abs(np.log2(self._rows(other)) - math.log2(rows)) + 2 * abs(math.log2(other / sequences))
            free = 1 / (1 + self._known[other])
            logs += wrong * calls / (calls + 0.5) * (free * np.exp2(-away) + (1 - free) * np.exp2(-6 * away))
        self._known[sequences][rows - sequences] += calls

    def _rows(self, sequences: int) -> IntArray:
        """Return the numbers of rows in a table, from one a sequence up to the largest trees."""
        return np.arange(sequences, sequences * self.largest + 1)

    def _add(self, sequences: int, logs: Logs) -> None:
        self._logs[sequences] = logs.copy()
        self._known[sequences] = np.zeros(len(logs))

    def _between(self, sequences: int) -> Logs:
        """Interpolate between the known numbers of sequences at equal rows, both as logarithms."""
        known = sorted(self._logs)
        below = max([number for number in known if number <= sequences], default=known[0])
        above = min([number for number in known if number >= sequences], default=known[-1])
        if below == above:
            return self._at(below, sequences)
        share = math.log(sequences / below) / math.log(above / below)
        return (1 - share) * self._at(below, sequences) + share * self._at(above, sequences)

    def _at(self, known: int, sequences: int) -> Logs:
        """Return a known number's logarithms at the rows of another number. Straight lines continue the curve.

        Below its first row, a curve falls no faster than in proportion to the rows.
        """
        times, first, rows = np.exp(self._logs[known]), known, self._rows(sequences)
        last = first + len(times) - 1
        found = np.interp(rows, self._rows(known), times)
        if len(times) > known:
            found += (times[-1] - times[-1 - known]) / known * np.maximum(rows - last, 0)
            found -= (times[known] - times[0]) / known * np.maximum(first - rows, 0)
        logs: Logs = np.log(np.maximum(found, times[0] * np.minimum(rows / first, 1)))
        return logs
