"""The verifier's noise, for several positions at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from redraft.runtime.sampling.noise import noise_of, row_key


def noise_rows(seed: int, position: int, count: int, ids: np.ndarray, stream: int = 0) -> np.ndarray:
    """The noise of `count` positions from `position` on, float32 [count, n]."""
    tokens = ids.astype(np.uint32)
    return np.stack([noise_of(row_key(seed, position + step, stream), tokens) for step in range(count)])


def keys_of(seeds: Sequence[int], position: int, count: int, stream: int = 0) -> np.ndarray:
    """The graph's keys of `count` positions from `position` on, for sequences with these seeds."""
    return np.array([[row_key(seed, position + step, stream) for step in range(count)] for seed in seeds])
