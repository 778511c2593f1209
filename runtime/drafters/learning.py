"""Probabilities of looked-up tokens: their initial values and their lower limit."""

from __future__ import annotations

LEAST_PROBABILITY = 0.03
"""Least probability of a drafted node: no budget would verify a less likely one. Rates stay above it to recover."""
STARTING_RATES = (0.05, 0.15, 0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.82, 0.84, 0.86, 0.88, 0.9, 0.92, 0.94)
"""Share of first candidates that are correct after a context of 0 … 16 tokens, before anything is learned."""


def moved(rate: float, observed: float, weight: float) -> float:
    """Return a running mean, moved by `weight` towards an observation."""
    return max(rate + weight * (observed - rate), LEAST_PROBABILITY)
