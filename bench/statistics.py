"""Figures from pairs: times as fast, medians with bootstrap intervals, loops, and first differences.

`speedup` is the only definition of "times as fast": the ratio of the seconds that a token takes, over the same runs.
`ratio_text` prints it next to its two rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

LOOP_TOKENS, LONGEST_PERIOD = 64, 16
RESAMPLES = 2000
CONFIDENCE = 0.95
FloatArray = NDArray[np.float64]


FEWEST_VALUES = 6
"""Fewer values have no interval: even from the least to the largest, it would hold the median less often than 95 %."""


@dataclass(frozen=True)
class Estimate:
    """A median over `count` values with its bootstrap confidence interval, which is None for too few values."""

    median: float
    low: float | None
    high: float | None
    count: int

    @property
    def interval(self) -> list[float] | None:
        """The interval as JSON."""
        return None if self.low is None or self.high is None else [self.low, self.high]


class Timing(NamedTuple):
    """The tokens of a run after its first, and the seconds of wall time that they took."""

    tokens: int
    seconds: float


@dataclass(frozen=True)
class Speedup:
    """How many times as fast one way of decoding is as another.

    ratio:     seconds a token of the other way over seconds a token of this one: `rate` / `base_rate`.
    interval:  bootstrap interval of the ratio over clusters of runs, None for too few.
    rate, base_rate: tokens a second of this way and of the other one, over all runs together.
    """

    ratio: float
    interval: tuple[float, float] | None
    rate: float
    base_rate: float
    count: int

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return {**vars(self), "interval": None if self.interval is None else list(self.interval)}


def speedup(base: Sequence[Timing], other: Sequence[Timing], clusters: Sequence[Hashable] | None = None) -> Speedup:
    """Return how many times as fast `other` is as `base`. Run i of both decoded the same prompt.

    Long runs count for more, as they do in a user's time. clusters: as in `median_estimate`. Raises ValueError if there
    are no runs.
    """
    if not base:
        raise ValueError("no runs to compare")
    columns = np.array([(*a, *b) for a, b in zip(base, other, strict=True)], float)

    def ratio(sums: FloatArray) -> FloatArray:
        found: FloatArray = sums[..., 1] * sums[..., 2] / (sums[..., 0] * sums[..., 3])
        return found

    base_rate, rate = rate_of(base), rate_of(other)
    bounds = _bootstrap(columns, clusters, lambda picked: ratio(np.nansum(picked, axis=1)))
    return Speedup(rate / base_rate, bounds, rate, base_rate, len(base))


def rate_of(timings: Sequence[Timing]) -> float:
    """Return tokens a second over all runs together."""
    return sum(one.tokens for one in timings) / sum(one.seconds for one in timings)


def rate_text(rate: float) -> str:
    """Return a rate with four significant digits."""
    return f"{rate:.0f}" if rate >= 1e4 else f"{rate:#.4g}".rstrip(".")


def ratio_text(rate: float, base_rate: float, digits: int = 2) -> str:
    """Return the ratio of two rates as they are printed, so that a reader who divides them finds it."""
    return f"{float(rate_text(rate)) / float(rate_text(base_rate)):.{digits}f}"


def median_estimate(values: Sequence[float], clusters: Sequence[Hashable] | None = None) -> Estimate:
    """Return median and percentile-bootstrap interval (Efron 1979). Raises ValueError on no values.

    clusters: of each value. Values of one cluster depend on each other, so that clusters are resampled as wholes. None
    if all values are independent. Under FEWEST_VALUES clusters have no interval.
    """
    if not values:
        raise ValueError("no values to take a median of")
    bounds = _bootstrap(
        np.array(values, float)[:, None], clusters, lambda picked: np.nanmedian(picked[..., 0], axis=1)
    )  # fmt: skip
    low, high = bounds or (None, None)
    return Estimate(float(np.median(values)), low, high, len(values))


def _bootstrap(
    values: FloatArray, clusters: Sequence[Hashable] | None, statistic: Callable[[FloatArray], FloatArray]
) -> tuple[float, float] | None:
    """Return the percentile interval of a statistic over resampled clusters; None under FEWEST_VALUES clusters.

    values: [N, columns].   statistic: of samples [RESAMPLES, values, columns], in which NaN fills short clusters.
    """
    groups: dict[Hashable, list[FloatArray]] = {}
    for cluster, value in zip(range(len(values)) if clusters is None else clusters, values, strict=True):
        groups.setdefault(cluster, []).append(value)
    if len(groups) < FEWEST_VALUES:
        return None
    padded = np.full((len(groups), max(map(len, groups.values())), values.shape[1]), math.nan)
    for place, group in enumerate(groups.values()):
        padded[place, : len(group)] = group
    picks = np.random.default_rng(0).integers(0, len(padded), (RESAMPLES, len(padded)))
    found = statistic(padded[picks].reshape(RESAMPLES, -1, values.shape[1]))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(found, (tail, 1 - tail))
    return float(low), float(high)


def interval_text(low: float | None, high: float | None, digits: int = 2) -> str:
    """Return an interval as a cell of a table, `-` for none."""
    return "-" if low is None or high is None else f"{low:.{digits}f} to {high:.{digits}f}"


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
