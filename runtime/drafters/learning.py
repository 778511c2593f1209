"""Probabilities of looked-up tokens: the values that learning starts with, and its floor."""

from __future__ import annotations

LEAST_PROBABILITY = 0.03
"""A node less likely than this is not drafted: no budget would verify it. No rate falls below, so all can recover."""
STARTING_RATES = (0.05, 0.15, 0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.82, 0.84, 0.86, 0.88, 0.9, 0.92, 0.94)
"""Share of first candidates that come true after a context of 0 … 16 tokens, before anything is learned."""


def moved(rate: float, observed: float, weight: float) -> float:
    """Return a running mean, moved by `weight` towards an observation."""
    return max(rate + weight * (observed - rate), LEAST_PROBABILITY)
