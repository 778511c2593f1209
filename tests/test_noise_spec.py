"""The noise is Gumbel noise: its words are uniform, and those of neighbours in every argument are independent."""

from __future__ import annotations

import numpy as np
import pytest

from redraft import noise_spec
from redraft.noise_spec import row_key
from tests.noise import gumbel, words

VOCABULARY, ROWS = 4096, 192
LARGEST_Z = 5.0
"""Standard deviations that a sum of squares of counts may be off: once in three million tests of good noise."""


def fast_words(key: tuple[int, int]) -> np.ndarray:
    """The words of ids 0 to VOCABULARY - 1, in wrapping arithmetic."""
    mask, x = np.uint32(2**noise_spec.WORD_BITS - 1), np.arange(VOCABULARY, dtype=np.uint32) + np.uint32(key[0])
    for number in range(noise_spec.ROUNDS):
        x = x + (x >> np.uint32(noise_spec.SHIFT)) if number else x
        x = (x * (x + x + np.uint32(key[(number + 1) % 2]))) & mask
    return x


@pytest.fixture(scope="module")
def table() -> np.ndarray:
    """Words of several seeds, positions and streams: [seed, position, stream, id]."""
    rows = [fast_words(row_key(s, p, t)) for s in range(4) for p in range(100, 100 + ROWS // 8) for t in (0, 1)]
    return np.array(rows).reshape(4, ROWS // 8, 2, VOCABULARY)


def deviation(cells: np.ndarray, count: int) -> float:
    """How far Pearson's statistic of equally likely cells is from its mean, in standard deviations."""
    counts = np.bincount(cells.ravel(), minlength=count)
    expected = counts.sum() / count
    return float((((counts - expected) ** 2 / expected).sum() - (count - 1)) / np.sqrt(2 * (count - 1)))


def of_pairs(first: np.ndarray, second: np.ndarray) -> float:
    """The deviation of pairs of words, by the upper five bits of each."""
    shift = noise_spec.WORD_BITS - 5
    return deviation((first >> shift).astype(np.int64) * 32 + (second >> shift), 1024)


def test_wrapping_arithmetic_gives_the_words_of_the_definition() -> None:
    for key in (row_key(0, 0), row_key(12345, 678, 2), (1, 1), (2**30 - 1, 2**30 - 1)):
        np.testing.assert_array_equal(fast_words(key), words(key, np.arange(VOCABULARY)))


def test_words_are_uniform(table: np.ndarray) -> None:
    shift = noise_spec.WORD_BITS - 12
    assert abs(deviation(table >> shift, 4096)) < LARGEST_Z
    rows = [deviation(row >> noise_spec.WORD_BITS - 8, 256) for row in table.reshape(-1, VOCABULARY)]
    assert max(map(abs, rows)) < LARGEST_Z
    tokens = [deviation(column >> noise_spec.WORD_BITS - 4, 16) for column in table.reshape(-1, VOCABULARY).T]
    assert max(map(abs, tokens)) < 2 * LARGEST_Z  # of 192 words each, whose statistic has a longer tail


@pytest.mark.parametrize("distance", [1, 2, 3, 4, 16, 64, 1024])
def test_neighbouring_ids_are_independent(table: np.ndarray, distance: int) -> None:
    assert abs(of_pairs(table[..., :-distance], table[..., distance:])) < LARGEST_Z


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["seeds", "positions", "streams"])
def test_neighbouring_rows_are_independent(table: np.ndarray, axis: int) -> None:
    moved = np.moveaxis(table, axis, 0)
    assert abs(of_pairs(moved[:-1], moved[1:])) < LARGEST_Z


def test_keys_are_odd_words_that_differ() -> None:
    keys = {row_key(seed, position, stream) for seed in range(20) for position in range(200) for stream in range(3)}
    assert len(keys) == 20 * 200 * 3
    assert all(0 < part < 2**noise_spec.WORD_BITS and part % 2 == 1 for key in keys for part in key)
    assert row_key(2**64 + 5, 3) == row_key(5, 3)


def test_noise_is_finite_and_falls_as_its_word_grows() -> None:
    ends = np.array([0, 1, noise_spec.SERIES_BELOW - 1, noise_spec.SERIES_BELOW, 2**noise_spec.WORD_BITS - 1])
    noise = gumbel(ends)
    assert np.isfinite(noise).all()
    assert (np.diff(noise) <= 0).all()
    assert noise[0] == pytest.approx(31 * np.log(2), abs=1e-5)
    found = gumbel(np.linspace(0, 2**noise_spec.WORD_BITS - 1, 100_001).astype(np.int64))
    assert found.mean() == pytest.approx(np.euler_gamma, abs=1e-3)
    assert found.var() == pytest.approx(np.pi**2 / 6, abs=1e-2)
