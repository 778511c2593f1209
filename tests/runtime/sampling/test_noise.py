"""The noise: its definition, its bits on any subset of ids, and the quality of its hash."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest

from redraft.runtime.sampling import noise
from redraft.runtime.sampling.noise import all_ids, gumbel, hashes, largest_hash, noise_of, row_key, uniform

from .statistics import LIMIT, uniformity

VOCABULARY = 49152
IDS = all_ids(VOCABULARY)
WORD = 1 << 32


def test_equal_arguments_give_these_bits_for_ever() -> None:
    """A seed that a user wrote down gives the same text in later versions."""
    assert hashes(row_key(7, 11), IDS[:3]).tolist() == [3369781208, 269159953, 3159355175]
    found = noise_of(row_key(7, 11), IDS[:3]).tolist()
    assert found == pytest.approx([-0.42866331, 2.73770881, -0.28538331], abs=1e-7)


@pytest.mark.parametrize("count", [1, 7, 100, 16384, 16391])
def test_a_subset_has_the_bits_of_the_row(count: int) -> None:
    key = row_key(3, 4)
    some = np.sort(np.random.default_rng(count).choice(VOCABULARY, count, replace=False)).astype(np.uint32)
    assert noise_of(key, some).tobytes() == noise_of(key, IDS)[some].tobytes()


def test_noise_is_finite_and_falls_as_the_hash_grows() -> None:
    ends = np.array([0, 1, 2, noise.SERIES_BELOW - 1, noise.SERIES_BELOW, 1 << 31, WORD - 200, WORD - 1], np.uint32)
    found = gumbel(ends)
    assert np.isfinite(found).all()
    assert (np.diff(found[[0, 1, 2, 3, 5, 6]]) < 0).all()
    assert found[3] == pytest.approx(found[4], abs=1e-6)
    exact = -np.log(-np.log1p(-(ends.astype(np.float64) + 0.5) / WORD))
    assert found[:-2] == pytest.approx(exact[:-2], abs=1e-5)


def test_the_bound_of_a_hash_holds() -> None:
    found = np.concatenate([hashes(row_key(seed, 0), IDS) for seed in range(40)])
    values = gumbel(found)
    for level in (-4.0, -2.0, 0.0, 3.0, 8.0, 12.0):
        bound = largest_hash(level)
        assert found[values >= level].max(initial=0) <= bound
        assert values[found <= bound].min(initial=np.inf) > level - 0.01


@cache
def rows_of(seeds: int, positions: int, count: int, stream: int = 0) -> np.ndarray:
    """Return hashes [seeds * positions, count]."""
    return np.stack([hashes(row_key(s, p, stream), IDS[:count]) for s in range(seeds) for p in range(positions)])


def test_every_byte_is_uniform() -> None:
    found = rows_of(10, 10, VOCABULARY)
    for shift in (0, 8, 16, 24):
        assert abs(uniformity((found >> np.uint32(shift)) & np.uint32(255), 256)) < LIMIT
    rows = [uniformity(row >> np.uint32(24), 256) for row in found]
    assert abs(np.mean(rows)) < 0.5
    assert 0.8 < np.std(rows) < 1.25  # a lattice is too uniform


def pairs(first: np.ndarray, second: np.ndarray) -> float:
    """Return the deviation of pairs of hashes from independence, by their five highest bits."""
    return abs(uniformity((first >> np.uint32(27)) * np.uint32(32) + (second >> np.uint32(27)), 1024))


@pytest.mark.parametrize("distance", [1, 2, 3, 8, 64, 1024, 4096, 32768])
def test_neighbouring_ids_are_independent(distance: int) -> None:
    found = rows_of(10, 10, VOCABULARY)
    assert pairs(found[:, :-distance], found[:, distance:]) < LIMIT


def test_neighbouring_positions_seeds_and_streams_are_independent() -> None:
    by_position, by_seed = rows_of(1, 1000, 2000), rows_of(1000, 1, 2000)
    for distance in (1, 2, 16):
        assert pairs(by_position[:-distance], by_position[distance:]) < LIMIT
        assert pairs(by_seed[:-distance], by_seed[distance:]) < LIMIT
    streams = [rows_of(10, 50, 2000, stream) for stream in range(3)]
    assert max(itertools.starmap(pairs, itertools.combinations(streams, 2))) < LIMIT
    columns = [uniformity(column >> np.uint32(26), 64) for column in by_position.T]
    assert abs(np.mean(columns)) < 0.2
    assert 0.8 < np.std(columns) < 1.25


def test_the_largest_noise_of_a_row_has_its_distribution() -> None:
    """The smallest of n exponential variables times n is exponential (Kolmogorov-Smirnov, 1.95 is a p of 0.001)."""
    smallest = np.array([hashes(row_key(seed, 3), IDS).min() for seed in range(1500)])  # has the largest noise
    least = np.sort(np.exp(-gumbel(smallest).astype(np.float64)) * VOCABULARY)
    places = np.arange(1, len(least) + 1) / len(least)
    assert np.abs(1 - np.exp(-least) - places).max() * np.sqrt(len(least)) < 1.95


def test_uniform_numbers_are_in_the_unit_interval_and_differ() -> None:
    found = [uniform(seed, position) for seed in range(30) for position in range(30)]
    assert len(set(found)) == 900
    assert 0 <= min(found) < max(found) < 1
    assert np.mean(found) == pytest.approx(0.5, abs=0.04)
