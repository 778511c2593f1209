"""Speedups, intervals, loops and first differences on values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from redraft.bench.statistics import Timing, bootstrap, first_difference, loops, rate_text, ratio_text, speedup


def test_times_as_fast_is_the_ratio_of_times_of_the_same_runs() -> None:
    """40 tokens take 1 + 3 s plainly, 1 + 1 s otherwise. The median of the pairs' ratios would be another: 1 and 3."""
    found = speedup([Timing(10, 1.0), Timing(30, 3.0)], [Timing(10, 1.0), Timing(30, 1.0)])
    assert (found.ratio, found.interval, found.rate, found.base_rate, found.count) == (2.0, None, 20.0, 10.0, 2)
    with pytest.raises(ValueError, match="no runs"):
        speedup([], [])


def test_printed_rates_divide_to_the_printed_ratio() -> None:
    """To its last digit, whatever the rates."""
    random = np.random.default_rng(0)
    for _ in range(500):
        base, other = ([Timing(100, seconds) for seconds in random.uniform(0.001, 90.0, 3)] for _ in range(2))
        found = speedup(base, other)
        shown = float(rate_text(found.rate)) / float(rate_text(found.base_rate))
        assert ratio_text(found.rate, found.base_rate) == f"{shown:.2f}"
        assert found.ratio == found.rate / found.base_rate
        assert abs(shown / found.ratio - 1) < 1e-3


@pytest.mark.parametrize(
    ("rate", "text"), [(91.4, "91.40"), (1234.0, "1234"), (12340.0, "12340"), (0.5123, "0.5123"), (3.0, "3.000")]
)
def test_a_rate_has_four_digits(rate: float, text: str) -> None:
    assert rate_text(rate) == text


def test_the_interval_of_a_ratio_is_over_prompts() -> None:
    """Eight prompts are 2 to 3 times as fast. Runs of one prompt are one sample."""
    base = [Timing(10, 1.0)] * 16
    other = [Timing(10, 1 / (2 + number / 7)) for number in range(8)] * 2
    prompts = [*range(8)] * 2
    found = speedup(base, other, prompts)
    assert found.interval is not None
    assert 2 < found.interval[0] < found.ratio < found.interval[1] < 3
    assert found.interval == pytest.approx(speedup(base[:8], other[:8]).interval)
    assert found.interval != pytest.approx(speedup(base, other).interval)
    assert speedup(base, other, [0] * 16).interval is None


def test_the_interval_of_a_mean_is_that_of_its_standard_error() -> None:
    """Of 200 values with a deviation of 0.1: the mean ± 1.96 · 0.1 / √200, up to the chance of resampling."""
    values = np.random.default_rng(1).normal(2.0, 0.1, 200)
    interval = bootstrap(values[:, None], lambda sums: sums[..., 0] / 200)
    half = 1.96 * values.std() / 200**0.5
    assert interval == pytest.approx((values.mean() - half, values.mean() + half), abs=0.1 * half)


def test_under_six_values_have_no_interval() -> None:
    """The range of five independent values misses their distribution's median once in 16 times."""
    values = np.arange(6.0)[:, None]
    assert bootstrap(values[:5], lambda sums: sums[..., 0]) is None
    assert bootstrap(values, lambda sums: sums[..., 0]) is not None


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
