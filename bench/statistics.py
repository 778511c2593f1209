"""Figures from pairs: medians with bootstrap intervals, and how much of an output is repetition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LOOP_TOKENS, LONGEST_PERIOD = 64, 16
REPETITIVE_SHARE = 0.2
"""An output counts as repetitive when more than this share of its 4-grams occurred earlier in it."""
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
    """Median and percentile-bootstrap interval (Efron 1979). Raises ValueError on no values."""
    if not values:
        raise ValueError("no values to take a median of")
    data = np.asarray(values, np.float64)
    picks = np.random.default_rng(seed).integers(0, len(data), (RESAMPLES, len(data)))
    medians = np.median(data[picks], axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(medians, (tail, 1 - tail))
    return Estimate(float(np.median(data)), float(low), float(high), len(data))


def repeated_share(token_ids: Sequence[int], size: int = 4) -> float:
    """Share of the n-grams of `size` tokens that occurred earlier in the same sequence; 0 where there is none."""
    grams = list(zip(*(token_ids[start:] for start in range(size)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def is_repetitive(token_ids: Sequence[int]) -> bool:
    """True if more than REPETITIVE_SHARE of the 4-grams of an output occurred earlier in it."""
    return repeated_share(token_ids) > REPETITIVE_SHARE


def loops(token_ids: Sequence[int]) -> bool:
    """True if an output ends in a loop: its last LOOP_TOKENS tokens repeat a period of at most LONGEST_PERIOD tokens.

    Outputs of fewer tokens do not loop. Speculation predicts a loop almost without error, which flatters its figures.
    """
    end = token_ids[-LOOP_TOKENS:]
    return len(end) == LOOP_TOKENS and any(end[p:] == end[:-p] for p in range(1, LONGEST_PERIOD + 1))


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token in which two outputs differ; a prefix differs at its end; None when equal."""
    if list(a) == list(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
