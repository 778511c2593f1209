"""Chi-square tests of drawn tokens against known probabilities, and the size of the bias that they find.

A token that was drawn from p becomes a uniform number: the probability of all likelier tokens, plus a random share of
its own probability (probability integral transform). So draws after different texts count in the same bins. If p is
right, numbers of successive tokens are independent.

Of a wrong distribution whose total variation from p is δ over the bins, chi-square has the noncentrality
N Σ Δ² / e >= 4 N δ², by Cauchy and Schwarz. Hence `Fit.detectable`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import erfc, exp, lgamma, log, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from redraft.types import IntArray

Probs = NDArray[np.float64]
BINS, SIDE = 16, 4
"""Bins with equal probability of one token, and of each of two successive tokens."""
LEAST = 100
"""Expected draws of a token that has a bin of its own."""
MOST_TOKENS = 31
"""Most tokens with bins of their own after one text."""
POWER = 0.99


@dataclass(frozen=True)
class Fit:
    """The result of one test."""

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


class Distribution:
    """Probabilities of the next token, and the sum of those of likelier tokens."""

    def __init__(self, probs: Probs) -> None:
        self.probs = probs
        order = np.argsort(-probs, kind="stable")
        self._before = np.empty_like(probs)
        self._before[order] = np.cumsum(probs[order]) - probs[order]

    def uniform(self, token: int, share: float) -> float:
        """Return the token's uniform number. share: a random number from 0 to 1."""
        return float(self._before[token] + share * self.probs[token])


@dataclass
class Tally:
    """Counts of drawn tokens: by bins of their uniform numbers, in pairs, and by token."""

    firsts: IntArray = field(default_factory=lambda: np.zeros(BINS, np.int64))
    pairs: IntArray = field(default_factory=lambda: np.zeros((SIDE, SIDE), np.int64))
    by_token: list[Fit] = field(default_factory=list)

    def add_pair(self, first: float, second: float) -> None:
        """Count the uniform numbers of two successive tokens."""
        self.firsts[_bin(first, BINS)] += 1
        self.pairs[_bin(first, SIDE), _bin(second, SIDE)] += 1

    def add_tokens(self, tokens: IntArray, probs: Probs) -> None:
        """Test first tokens that follow one text. All but the likeliest share a bin."""
        likely = np.argsort(-probs, kind="stable")[:MOST_TOKENS]
        likely = likely[probs[likely] * len(tokens) >= LEAST]
        if len(likely) and (1 - probs[likely].sum()) * len(tokens) < LEAST:
            likely = likely[:-1]  # the last one joins the others, which are too few for a bin
        if len(likely):
            counts, expected = np.bincount(tokens, minlength=len(probs))[likely], probs[likely] * len(tokens)
            rest = len(tokens) - counts.sum(), len(tokens) - expected.sum()
            self.by_token.append(fit(np.append(counts, rest[0]), np.append(expected, rest[1])))

    def fits(self) -> dict[str, Fit]:
        """Return the tests by name."""
        total = int(self.firsts.sum())
        tests = {
            name: fit(counts.ravel(), np.full(counts.size, total / counts.size))
            for name, counts in (("ranks", self.firsts), ("pairs", self.pairs))
        }
        if self.by_token:
            value = sum(one.chi_square for one in self.by_token)
            tests["tokens"] = Fit(total, value, sum(one.degrees_of_freedom for one in self.by_token))
        return tests


def fit(counts: NDArray[np.integer], expected: Probs) -> Fit:
    """Return Pearson's test of counts against the expected ones, whose sums agree."""
    return Fit(int(counts.sum()), float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1)


def _bin(number: float, bins: int) -> int:
    return min(int(number * bins), bins - 1)
