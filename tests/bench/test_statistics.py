"""Statistics worked out by hand: speedups, intervals, loops, differences, and chi-square tests of drawn tokens."""

from __future__ import annotations

import numpy as np
import pytest

from redraft.bench.draws import BINS, LEAST, Drawn, uniform_numbers
from redraft.bench.statistics import (
    Fit,
    Speedup,
    Timing,
    bootstrap,
    critical,
    first_difference,
    fit,
    loops,
    median_and_p99,
    median_interval,
    rate_text,
    ratio_text,
    speedup,
    survival,
)

LEVEL = 1e-7
PROBS = np.random.default_rng(0).dirichlet(np.full(40, 0.3))


def test_times_as_fast_is_the_ratio_of_times_of_the_same_runs() -> None:
    """40 tokens take 1 + 3 s plainly, 1 + 1 s otherwise. The median of the pairs' ratios would be another: 1 and 3."""
    found = speedup([Timing(10, 1.0), Timing(30, 3.0)], [Timing(10, 1.0), Timing(30, 1.0)])
    assert found == Speedup(2.0, None, 20.0, 10.0, 2)
    with pytest.raises(ValueError, match="no runs"):
        speedup([], [])


def test_printed_rates_have_four_digits_and_divide_to_the_printed_ratio() -> None:
    """To its last digit, whatever the rates."""
    random = np.random.default_rng(0)
    for _ in range(500):
        base, other = ([Timing(100, seconds) for seconds in random.uniform(0.001, 90.0, 3)] for _ in range(2))
        found = speedup(base, other)
        shown = float(rate_text(found.rate)) / float(rate_text(found.base_rate))
        assert ratio_text(found.rate, found.base_rate) == f"{shown:.2f}"
        assert abs(shown / found.ratio - 1) < 1e-3
    assert list(map(rate_text, (91.4, 1234.0, 12340.0, 0.5123))) == ["91.40", "1234", "12340", "0.5123"]


def test_the_interval_of_a_ratio_is_over_prompts() -> None:
    """Eight prompts are 2 to 3 times as fast. Runs of one prompt are one sample."""
    base = [Timing(10, 1.0)] * 16
    other = [Timing(10, 1 / (2 + number / 7)) for number in range(8)] * 2
    found = speedup(base, other, [*range(8)] * 2)
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


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1] * 63, False),
        (list(range(16)) * 4, True),
        (list(range(17)) * 4, False),
        ([*range(100, 200), *[1, 2] * 32], True),
        ([1] * 70 + [2], False),
        ([2] + [1] * 63, False),
    ],
)
def test_a_loop_repeats_a_short_period_over_the_last_64_tokens(tokens: list[int], expected: bool) -> None:
    assert loops(tokens) is loops(tuple(tokens)) is expected


@pytest.mark.parametrize(
    ("a", "b", "place"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [4], 0)]
)
def test_first_difference(a: list[int], b: list[int], place: int | None) -> None:
    assert first_difference(a, b) == place


def test_chi_squares_probabilities_are_those_of_tables_also_far_out() -> None:
    tables = [(3.841459, 1, 0.05), (5.991465, 2, 0.05), (44.263225, 15, 1e-4), (124.342113, 100, 0.05), (0.0, 3, 1.0)]
    for value, df, expected in tables:
        assert survival(value, df) == pytest.approx(expected, rel=1e-5)
    assert survival(50_000.0, 401) == 0
    assert 0 < survival(400.0, 101) < 1e-30
    for df in (1, 15, 64):
        assert survival(critical(LEVEL, df), df) == pytest.approx(LEVEL, rel=1e-6)


def p_values(probs: np.ndarray, seed: int = 1, draws: int = 20_000) -> dict[str, float]:
    """The tests of pairs whose first token is drawn from `probs` and whose second is from PROBS, against PROBS."""
    rng, drawn = np.random.default_rng(seed), Drawn()
    tokens = rng.choice(len(probs), draws, p=probs)
    pairs = np.stack([tokens, rng.choice(len(probs), draws, p=PROBS)], axis=1)
    drawn.add(uniform_numbers(PROBS, pairs, rng.random((draws, 2))), tokens, PROBS)
    return {name: one.p_value for name, one in drawn.fits().items()}


def test_right_draws_pass_and_two_tokens_that_change_places_are_found() -> None:
    """Their ranks are neighbours, so bins of ranks hide it."""
    for seed in range(5):
        found = p_values(PROBS, seed)
        assert set(found) == {"ranks", "pairs", "tokens"}
        assert min(found.values()) > 1e-3
    order = np.argsort(-PROBS)
    wrong = PROBS.copy()
    wrong[order[3:5]] += 0.02, -0.02
    assert p_values(wrong)["tokens"] < LEVEL


def test_rare_tokens_share_a_bin() -> None:
    drawn, probs = Drawn(), np.array([0.6, 0.395, 0.004, 0.001])
    tokens = np.repeat(np.arange(4), (probs * 1000).astype(int))
    drawn.add(np.zeros((1000, 2)), tokens, probs)
    (found,) = drawn.by_token
    assert found.degrees_of_freedom == 1
    assert found.chi_square == pytest.approx(0, abs=1e-9)
    assert 1000 * probs[2:].sum() < LEAST


def test_the_promised_bias_is_found() -> None:
    """The bias that is hardest to find, of the promised size: half of the bins gain as much as the others lose."""
    draws = 40_000
    size = Fit(draws, 0.0, BINS - 1).detectable(LEVEL)
    probs = np.full(BINS, 1 / BINS)
    probs[::2] += 2 * size / BINS
    probs[1::2] -= 2 * size / BINS
    assert np.abs(probs - 1 / BINS).sum() / 2 == pytest.approx(size)
    rng, expected = np.random.default_rng(5), np.full(BINS, draws / BINS)
    found = sum(fit(rng.multinomial(draws, probs), expected).p_value < LEVEL for _ in range(500))
    assert 480 <= found < 500
    assert Fit(200_000, 0.0, BINS - 1).detectable(1e-6) < 0.0105


def test_the_median_and_the_99th_percentile() -> None:
    assert median_and_p99(range(101)) == (50, 99)


@pytest.mark.parametrize(("count", "cut"), [(6, 0), (8, 0), (9, 1), (20, 5), (100, 39)])
def test_a_medians_interval_is_that_of_the_sign_test(count: int, cut: int) -> None:
    """Tables of that test have the 6th and 15th of 20 values, and the 40th and 61st of 100."""
    values = [float(value) for value in range(count)]
    assert median_interval(values[::-1]) == ((count - 1) / 2, (values[cut], values[-1 - cut]))


def test_five_values_have_a_median_without_an_interval() -> None:
    assert median_interval([5.0, 1.0, 2.0, 8.0, 3.0]) == (3.0, None)
