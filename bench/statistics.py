"""Statistics of measurements: times as fast with bootstrap intervals, chi-square tests, loops, and first differences.

`speedup` is the only definition of "times as fast": the ratio of the seconds that a token takes, over the same runs.
`ratio_text` prints it next to its two rates.

Of a wrong distribution whose total variation from p is δ over the bins, chi-square has the noncentrality
N Σ Δ² / e >= 4 N δ², by Cauchy and Schwarz. Hence `Fit.detectable`. A proof runs without SciPy, so chi-square's
probabilities are here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import comb, erfc, exp, lgamma, log, sqrt
from statistics import NormalDist, median
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

LOOP_TOKENS, LONGEST_PERIOD = 64, 16
RESAMPLES = 2000
CONFIDENCE = 0.95
FEWEST_VALUES = 6
"""Fewer values have no interval: even from the least to the largest, it would hold the median less often than 95 %."""
POWER = 0.99
"""The probability with which a bias of the size `Fit.detectable` is found."""
FloatArray = NDArray[np.float64]
Interval = tuple[float, float]


class Timing(NamedTuple):
    """Tokens of a run or a block, and the seconds of wall time that they took."""

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


@dataclass(frozen=True)
class Fit:
    """The result of one chi-square test."""

    draws: int
    chi_square: float
    degrees_of_freedom: int

    @property
    def p_value(self) -> float:
        """The probability of so large a value if the probabilities are right."""
        return survival(self.chi_square, self.degrees_of_freedom)

    def detectable(self, level: float) -> float:
        """Return the smallest total variation over the bins that fails a test at this level, with probability POWER."""
        df, z = self.degrees_of_freedom, NormalDist().inv_cdf(POWER)
        # Noncentral chi-square is about normal with mean df + x and variance 2 (df + 2 x): solve for x.
        above = critical(level, df) - df
        shift = above + 2 * z * z + z * sqrt(4 * above + 4 * z * z + 2 * df)
        return min(1.0, sqrt(shift / (4 * self.draws)))


def fit(counts: NDArray[np.integer], expected: FloatArray) -> Fit:
    """Return Pearson's test of counts against the expected ones, whose sums agree."""
    return Fit(int(counts.sum()), float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1)


def survival(chi_square: float, df: int) -> float:
    """Return the probability that chi-square with this many degrees of freedom, at least 1, is larger."""
    half = chi_square / 2
    if half <= 0:
        return 1.0
    first = (df % 2) / 2
    terms = (exp((first + i) * log(half) - half - lgamma(first + i + 1)) for i in range(df // 2))
    return min(1.0, sum(terms) + (erfc(sqrt(half)) if df % 2 else 0.0))


def critical(level: float, df: int) -> float:
    """Return the value that chi-square exceeds with probability `level`."""
    low, high = 0.0, 2.0 * df + 200 - 10 * log(level)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if survival(middle, df) > level else (low, middle)
    return high


def median_interval(values: Sequence[float]) -> tuple[float, Interval | None]:
    """Return the median of independent values, and its interval between two of them; None under FEWEST_VALUES.

    With n values, k or fewer are under the median as often as a coin falls on one side (the sign test).
    """
    count, ordered = len(values), sorted(values)
    cut, tail = -1, 0.5**count
    while tail <= (1 - CONFIDENCE) / 2:
        cut += 1
        tail += comb(count, cut + 1) * 0.5**count
    return median(values), None if cut < 0 else (ordered[cut], ordered[-1 - cut])


def median_and_p99(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile of at least one value, interpolated between values."""
    p50, p99 = np.percentile(values, [50, 99]).tolist()
    return p50, p99


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
