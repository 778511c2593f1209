"""Medians, loops and first differences on values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from redraft.bench.statistics import first_difference, loops, median_estimate


def test_median_and_interval_of_known_values() -> None:
    values = list(np.random.default_rng(1).normal(2.0, 0.1, 200))
    estimate = median_estimate(values)
    assert estimate.median == np.median(values)
    assert estimate.low < estimate.median < estimate.high
    assert estimate.high - estimate.low < 0.06
    assert estimate == median_estimate(values)


def test_one_value_is_its_own_interval() -> None:
    estimate = median_estimate([3.0])
    assert (estimate.median, estimate.low, estimate.high, estimate.count) == (3.0, 3.0, 3.0, 1)


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
