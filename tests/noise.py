"""The noise of `redraft.noise_spec` in NumPy, written from its definition alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from redraft import noise_spec
from redraft.noise_spec import row_key


def words(key: Sequence[int], ids: np.ndarray) -> np.ndarray:
    """The hash of each id, int64[n], in numbers of any size."""
    x = [int(token) + key[0] for token in ids]
    for number in range(noise_spec.ROUNDS):
        if number:
            x = [word + (word >> noise_spec.SHIFT) for word in x]
        added = key[(number + 1) % 2]
        x = [word * (2 * word + added) % 2**noise_spec.WORD_BITS for word in x]
    return np.array(x, np.int64)


def gumbel(found: np.ndarray) -> np.ndarray:
    """The noise of each word, float32."""
    v = found.astype(np.float32) * np.float32(noise_spec.UNIFORM_SCALE) + np.float32(noise_spec.UNIFORM_OFFSET)
    series = v * (1 + v * (np.float32(0.5) + v * np.float32(1 / 3)))
    return -np.log(np.where(found < noise_spec.SERIES_BELOW, series, -np.log(1 - v)))


def noise_rows(seed: int, position: int, count: int, ids: np.ndarray, stream: int = 0) -> np.ndarray:
    """The noise of `count` positions from `position` on, float32 [count, n]."""
    return np.stack([gumbel(words(row_key(seed, position + step, stream), ids)) for step in range(count)])


def keys_of(seeds: Sequence[int], position: int, count: int, stream: int = 0) -> np.ndarray:
    """The graph's keys of `count` positions from `position` on, for sequences with these seeds."""
    return np.array([[row_key(seed, position + step, stream) for step in range(count)] for seed in seeds])
