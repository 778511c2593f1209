"""Medians, loops and first differences on values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from redraft.bench.statistics import Estimate, first_difference, loops, median_estimate


def test_median_and_interval_of_known_values() -> None:
    values = list(np.random.default_rng(1).normal(2.0, 0.1, 200))
    estimate = median_estimate(values)
    assert estimate.median == np.median(values)
    assert estimate.low < estimate.median < estimate.high
    assert estimate.high - estimate.low < 0.06
    assert estimate == median_estimate(values)


def test_under_six_values_have_no_interval() -> None:
    """The range of five independent values misses their distribution's median once in 16 times."""
    assert median_estimate([1.0, 2.0, 3.0, 4.0, 9.0]) == Estimate(3.0, None, None, 5)
    assert median_estimate([1.0, 2.0, 3.0, 4.0, 9.0, 9.0]).interval is not None
    assert median_estimate([3.0]).interval is None


def test_clusters_are_resampled_as_wholes() -> None:
    """Ten equal values in each of eight clusters say no more than eight values."""
    values = list(np.random.default_rng(1).normal(2.0, 0.1, 8))
    repeated = [value for value in values for _ in range(10)]
    clusters = [number for number in range(8) for _ in range(10)]
    whole, single = median_estimate(repeated, clusters), median_estimate(values)
    assert whole.interval == single.interval
    assert whole.count == 80
    assert median_estimate(repeated).interval != single.interval
    assert median_estimate(repeated[:50], clusters[:50]).interval is None


def test_clusters_may_differ_in_size() -> None:
    estimate = median_estimate([1.0] * 9 + [5.0] * 7, [0] * 3 + [1] * 3 + [2] * 3 + [*range(3, 10)])
    assert estimate == Estimate(1.0, 1.0, 5.0, 16)


def test_no_values_have_no_median() -> None:
    with pytest.raises(ValueError, match="no values"):
        median_estimate([])


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], False),
        ([1] * 63, False),
        ([1] * 64, True),
        (list(range(16)) * 4, True),
        (list(range(17)) * 4, False),
        ([5, 6, 7] * 22, True),
        ([*range(100, 200), *[1, 2] * 32], True),
        ([*range(100, 200), *[1, 2] * 31, 1], False),
        ([1] * 63 + [2], False),
        ([1] * 70 + [2], False),
        ([2] + [1] * 63, False),
    ],
)
def test_a_loop_repeats_a_short_period_over_the_last_64_tokens(tokens: list[int], expected: bool) -> None:
    assert loops(tokens) is expected
    assert loops(tuple(tokens)) is expected


@pytest.mark.parametrize(
    ("a", "b", "place"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [4], 0)]
)
def test_first_difference(a: list[int], b: list[int], place: int | None) -> None:
    assert first_difference(a, b) == place
