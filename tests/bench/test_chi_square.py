"""Chi-square tests of drawn tokens: tables of the distribution, wrong draws that are found, and the promised power."""

from __future__ import annotations

import numpy as np
import pytest

from redraft.bench.chi_square import BINS, LEAST, Distribution, Fit, Tally, critical, fit, survival

LEVEL = 1e-7
PROBS = np.random.default_rng(0).dirichlet(np.full(40, 0.3))


@pytest.mark.parametrize(
    ("value", "df", "expected"),
    [(3.841459, 1, 0.05), (10.827566, 1, 1e-3), (5.991465, 2, 0.05), (18.307038, 10, 0.05), (24.995790, 15, 0.05),
     (44.263225, 15, 1e-4), (124.342113, 100, 0.05), (0.0, 3, 1.0)],
)  # fmt: skip
def test_survival_is_that_of_tables(value: float, df: int, expected: float) -> None:
    assert survival(value, df) == pytest.approx(expected, rel=1e-5)


def test_survival_is_a_probability_far_out() -> None:
    assert survival(50_000.0, 401) == 0
    assert 0 < survival(400.0, 101) < 1e-30
    for df in (1, 15, 64):
        assert survival(critical(LEVEL, df), df) == pytest.approx(LEVEL, rel=1e-6)


def drawn(probs: np.ndarray, draws: int = 20_000, seed: int = 1) -> Tally:
    """Count pairs whose first token is drawn from `probs` and whose second is drawn from PROBS, against PROBS."""
    rng, tally, right = np.random.default_rng(seed), Tally(), Distribution(PROBS)
    tokens = rng.choice(len(probs), draws, p=probs)
    others = rng.choice(len(probs), draws, p=PROBS)
    for first, then, (one, two) in zip(tokens.tolist(), others.tolist(), rng.random((draws, 2)).tolist(), strict=True):
        tally.add_pair(right.uniform(first, one), right.uniform(then, two))
    tally.add_tokens(tokens, PROBS)
    return tally


def least(tally: Tally) -> dict[str, float]:
    return {name: one.p_value for name, one in tally.fits().items()}


def test_right_draws_pass() -> None:
    for seed in range(5):
        found = least(drawn(PROBS, seed=seed))
        assert set(found) == {"ranks", "pairs", "tokens"}
        assert min(found.values()) > 1e-3


def test_two_tokens_that_change_places_are_found() -> None:
    """Their ranks are neighbours, so bins of ranks hide it."""
    order = np.argsort(-PROBS)
    wrong = PROBS.copy()
    wrong[order[3]] += 0.02
    wrong[order[4]] -= 0.02
    assert least(drawn(wrong))["tokens"] < LEVEL


def test_rare_tokens_share_a_bin() -> None:
    tally = Tally()
    probs = np.array([0.6, 0.395, 0.004, 0.001])
    tokens = np.repeat(np.arange(4), (probs * 1000).astype(int))
    tally.add_tokens(tokens, probs)
    (found,) = tally.by_token
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
