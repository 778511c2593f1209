"""Figures from runs of the same prompts: times as fast with bootstrap intervals, loops, and first differences.

`speedup` is the only definition of "times as fast": the ratio of the seconds that a token takes, over the same runs.
`ratio_text` prints it next to its two rates.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

LOOP_TOKENS, LONGEST_PERIOD = 64, 16
RESAMPLES = 2000
CONFIDENCE = 0.95
FEWEST_VALUES = 6
"""Fewer values have no interval: even from the least to the largest, it would hold the median less often than 95 %."""
FloatArray = NDArray[np.float64]
Interval = tuple[float, float]


class Timing(NamedTuple):
    """The tokens of a run after its first, and the seconds of wall time that they took."""

    tokens: int
    seconds: float


@dataclass(frozen=True)
class Speedup:
    """The speed of one way of decoding over another: `rate` / `base_rate`.

    interval: of the ratio, over clusters of runs; None for too few.
    rate, base_rate: tokens a second of this way and of the other one, over all runs together.
    """

    ratio: float
    interval: Interval | None
    rate: float
    base_rate: float
    count: int

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return {**vars(self), "interval": self.interval and list(self.interval)}


def speedup(base: Sequence[Timing], other: Sequence[Timing], clusters: Sequence[Hashable] | None = None) -> Speedup:
    """Return how many times as fast `other` is as `base`. Run i of both decoded the same prompt.

    Long runs count for more, as they do in a user's time. clusters: as in `bootstrap`. Raises ValueError without runs.
    """
    if not base:
        raise ValueError("no runs to compare")

    def ratio(sums: FloatArray) -> FloatArray:
        tokens, seconds, other_tokens, other_seconds = np.moveaxis(sums, -1, 0)
        times: FloatArray = seconds * other_tokens / (tokens * other_seconds)
        return times

    columns = [(*a, *b) for a, b in zip(base, other, strict=True)]
    base_rate, rate = rate_of(base), rate_of(other)
    return Speedup(rate / base_rate, bootstrap(columns, ratio, clusters), rate, base_rate, len(base))


def rate_of(timings: Sequence[Timing]) -> float:
    """Return tokens a second over all runs together."""
    return sum(one.tokens for one in timings) / sum(one.seconds for one in timings)


def bootstrap(
    rows: ArrayLike, statistic: Callable[[FloatArray], FloatArray], clusters: Sequence[Hashable] | None = None
) -> Interval | None:
    """Return the percentile-bootstrap interval of a statistic (Efron 1979); None under FEWEST_VALUES clusters.

    rows:      a row of columns for each run.   statistic: takes sums of the columns [RESAMPLES, columns].
    clusters:  of each row. Rows of one cluster depend on each other, so clusters are resampled as wholes. None if all
               rows are independent.
    """
    sums: dict[Hashable, FloatArray] = {}
    values = np.asarray(rows, float)
    for cluster, row in zip(range(len(values)) if clusters is None else clusters, values, strict=True):
        sums[cluster] = sums[cluster] + row if cluster in sums else row
    if len(sums) < FEWEST_VALUES:
        return None
    drawn = np.random.default_rng(0).integers(0, len(sums), (RESAMPLES, len(sums)))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(statistic(np.array([*sums.values()])[drawn].sum(axis=1)), (tail, 1 - tail))
    return float(low), float(high)


def rate_text(rate: float) -> str:
    """Return a rate with four significant digits."""
    return f"{rate:.0f}" if rate >= 1e4 else f"{rate:#.4g}".rstrip(".")


def ratio_text(rate: float, base_rate: float, digits: int = 2) -> str:
    """Return the ratio of two rates as they are printed, so that a reader who divides them gets it."""
    return f"{float(rate_text(rate)) / float(rate_text(base_rate)):.{digits}f}"


def interval_text(interval: Sequence[float] | None, digits: int = 2) -> str:
    """Return an interval as a cell of a table, `-` for none."""
    return "-" if interval is None else f"{interval[0]:.{digits}f} to {interval[1]:.{digits}f}"


def loops(token_ids: Sequence[int]) -> bool:
    """Return True if an output ends in a loop: its last LOOP_TOKENS tokens repeat a period of at most LONGEST_PERIOD.

    Outputs of fewer tokens do not loop. Speculation predicts a loop almost without error, which flatters its figures.
    """
    end = token_ids[-LOOP_TOKENS:]
    return len(end) == LOOP_TOKENS and any(end[p:] == end[:-p] for p in range(1, LONGEST_PERIOD + 1))


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Return the index of the first token that differs; a prefix differs at its end; None if both are equal."""
    if list(a) == list(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
