"""Figures from pairs: medians with bootstrap intervals, loops, and first differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LOOP_TOKENS, LONGEST_PERIOD = 64, 16
RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A median with its bootstrap confidence interval over `count` values."""

    median: float
    low: float
    high: float
    count: int


def median_estimate(values: Sequence[float], seed: int = 0) -> Estimate:
    """Return median and percentile-bootstrap interval (Efron 1979). Raises ValueError on no values."""
    if not values:
        raise ValueError("no values to take a median of")
    data = np.asarray(values, np.float64)
    picks = np.random.default_rng(seed).integers(0, len(data), (RESAMPLES, len(data)))
    medians = np.median(data[picks], axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(medians, (tail, 1 - tail))
    return Estimate(float(np.median(data)), float(low), float(high), len(data))


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
