"""Chi-square tests with a normal approximation, which needs no library: (chi2 - df) / sqrt(2 df) is about N(0, 1)."""

from __future__ import annotations

import numpy as np

LIMIT = 5.0
"""Deviations beyond this have a probability under 1e-6; the seeds of all tests are fixed."""
LEAST, BINS = 20, 40
"""Draws that are expected of a token with a bin of its own, and the number of bins with equal probability."""


def deviation(counts: np.ndarray, expected: np.ndarray) -> float:
    """Return how many standard deviations chi-square of these counts is above its mean."""
    df = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - df) / np.sqrt(2 * df))


def uniformity(values: np.ndarray, bins: int) -> float:
    """Return the deviation of whole numbers from a uniform distribution over `bins`."""
    counts = np.bincount(values.ravel().astype(np.int64), minlength=bins)
    return deviation(counts, np.full(bins, values.size / bins))


def fit(tokens: np.ndarray, probs: np.ndarray) -> float:
    """Return the larger deviation of drawn tokens from a distribution over a vocabulary, by two sets of bins.

    Many bins, one a token that is expected often enough, find a wrong token. Few, of likely and unlikely tokens, find
    that all of them are a little too likely.
    """
    rare = probs * len(tokens) < LEAST
    fine = np.where(rare, 0, np.cumsum(~rare))
    order = np.argsort(-probs, kind="stable")
    coarse = np.empty(len(probs), np.int64)
    coarse[order] = (np.cumsum(probs[order]) - probs[order] / 2) * BINS
    return max(_fit(tokens, probs, fine), _fit(tokens, probs, coarse))


def _fit(tokens: np.ndarray, probs: np.ndarray, bins: np.ndarray) -> float:
    """Return the deviation of the counts of each bin. Hardly any token may be in a bin that is expected to be empty."""
    expected = np.bincount(bins, probs) * len(tokens)
    counts = np.bincount(bins[tokens], minlength=len(expected))
    used = expected > 1
    assert counts[~used].sum() <= 5
    return deviation(counts[used], expected[used])
