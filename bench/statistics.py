"""Figures from pairs: medians with bootstrap intervals, loops, and first differences."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

LOOP_TOKENS, LONGEST_PERIOD = 64, 16
RESAMPLES = 2000
CONFIDENCE = 0.95


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


def median_estimate(values: Sequence[float], clusters: Sequence[Hashable] | None = None, seed: int = 0) -> Estimate:
    """Return median and percentile-bootstrap interval (Efron 1979). Raises ValueError on no values.

    clusters: of each value. Values of one cluster depend on each other, so that clusters are resampled as wholes. None
    if all values are independent. Under FEWEST_VALUES clusters have no interval.
    """
    if not values:
        raise ValueError("no values to take a median of")
    median = float(np.median(values))
    groups: dict[Hashable, list[float]] = {}
    for cluster, value in zip(range(len(values)) if clusters is None else clusters, values, strict=True):
        groups.setdefault(cluster, []).append(value)
    if len(groups) < FEWEST_VALUES:
        return Estimate(median, None, None, len(values))
    longest = max(map(len, groups.values()))
    padded = np.array([group + [math.nan] * (longest - len(group)) for group in groups.values()])
    picks = np.random.default_rng(seed).integers(0, len(padded), (RESAMPLES, len(padded)))
    medians = np.nanmedian(padded[picks].reshape(RESAMPLES, -1), axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(medians, (tail, 1 - tail))
    return Estimate(median, float(low), float(high), len(values))


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
