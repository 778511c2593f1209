"""Chi-square tests with a normal approximation, which needs no library: (chi2 - df) / sqrt(2 df) is about N(0, 1)."""

from __future__ import annotations

import numpy as np

LIMIT = 5.0
"""Deviations beyond this have a probability under 1e-6; the seeds of all tests are fixed."""


def deviation(counts: np.ndarray, expected: np.ndarray) -> float:
    """Return how many standard deviations chi-square of these counts is above its mean."""
    df = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - df) / np.sqrt(2 * df))


def uniformity(values: np.ndarray, bins: int) -> float:
    """Return the deviation of whole numbers from a uniform distribution over `bins`."""
    counts = np.bincount(values.ravel().astype(np.int64), minlength=bins)
    return deviation(counts, np.full(bins, values.size / bins))


def binned(probs: np.ndarray, draws: int, least: float = 20.0) -> np.ndarray:
    """Return a bin for each token: one a token if it is expected `least` times, one for all others."""
    rare = probs * draws < least
    bins = np.cumsum(~rare)
    bins[rare] = 0
    return bins


def fit(tokens: np.ndarray, probs: np.ndarray) -> float:
    """Return the deviation of drawn tokens from a distribution over a vocabulary."""
    bins = binned(probs, len(tokens))
    expected = np.bincount(bins, probs, bins.max() + 1) * len(tokens)
    counts = np.bincount(bins[tokens], minlength=len(expected))
    used = expected > 1
    assert counts[~used].sum() <= 5
    return deviation(counts[used], expected[used])
