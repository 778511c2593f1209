"""The kernel that makes accepted rows contiguous."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from redraft.errors import KernelError
from redraft.plugins.library import CompactArgs, Kernels

from .cases import NUMPY, compact, compacted, same_bits


def caches_of(seed: int, dtype: str, shape: tuple[int, ...], count: int = 4) -> list[NDArray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(NUMPY[dtype]) for _ in range(count)]


@pytest.mark.parametrize(("dtype", "head_dim", "order"), [("float16", 64, 0), ("bfloat16", 80, 1), ("float32", 256, 5)])
def test_accepted_rows_follow_the_root(any_kernels: Kernels, dtype: str, head_dim: int, order: int) -> None:
    """The checks have more types and paths. Here paths differ, and one is empty."""
    rng = np.random.default_rng(head_dim)
    caches = caches_of(1, dtype, (3, 2, 60, head_dim))
    cache_len, lengths = np.array([0, 17, 30]), np.array([12, 0, 5])
    paths = np.stack([np.sort(rng.choice(np.arange(1, 28), 12, replace=False)) for _ in cache_len])
    if any_kernels.on_cpu:
        any_kernels.set_order(order)
    found = compact(any_kernels, caches, cache_len, paths, lengths)
    assert all(map(same_bits, found, compacted(caches, cache_len, paths, lengths)))


def test_a_path_that_is_in_place_moves_nothing(kernels: Kernels) -> None:
    caches = caches_of(2, "float16", (1, 2, 40, 64))
    found = compact(kernels, caches, np.array([9]), np.arange(1, 11)[None], np.array([10]))
    assert all(map(same_bits, found, caches))


@pytest.mark.parametrize(
    ("past", "path", "length"),
    [(35, [2, 7], 2), (35, [-4, 2**40], 2), (-3, [4, 5], 2), (2**40, [4, 5], 2), (3, [4, 5], -1)],
)
def test_rows_outside_the_cache_stay(kernels: Kernels, past: int, path: list[int], length: int) -> None:
    caches = caches_of(3, "float16", (1, 1, 40, 64))
    found = compact(kernels, caches, np.array([past]), np.array([path]), np.array([length]))
    expected = [cache.copy() for cache in caches]
    if past == 35 and path[0] == 2:  # row 37 is there, row 42 is not
        for cache in expected:
            cache[0, 0, 36] = cache[0, 0, 37]
    assert all(map(same_bits, found, expected))


def test_a_length_beyond_the_path_ends_with_it(kernels: Kernels) -> None:
    caches = caches_of(4, "float32", (1, 1, 40, 64), count=1)
    found = compact(kernels, caches, np.array([5]), np.array([[2, 4]]), np.array([50]))[0]
    assert (found[0, 0, 6:8] == caches[0][0, 0, [7, 9]]).all()
    assert same_bits(found[0, 0, 8:], caches[0][0, 0, 8:])


@pytest.mark.parametrize(
    ("wrong", "value", "line"),
    [
        ("dtype", 3, "dtype: expected 0"),
        ("cache_count", 0, "cache_count: expected 1 or more, found 0"),
        ("batch", -1, "batch: expected 1 or more, found -1"),
        ("head_dim", 72, "head_dim: expected 64, 80, 96, 128 or 256, found 72"),
        ("max_path", 0, "max_path: expected 1 or more, found 0"),
        ("caches", None, "caches: expected a pointer, found null"),
        ("paths", 12, "paths: expected an address at a multiple of 8 bytes"),
        ("path_lengths", None, "path_lengths: expected a pointer, found null"),
    ],
)
def test_bad_arguments_are_named(kernels: Kernels, wrong: str, value: int | None, line: str) -> None:
    good = {
        "dtype": 0, "cache_count": 2, "batch": 1, "kv_heads": 1, "head_dim": 64, "capacity": 8, "max_path": 4,
        "caches": 64, "cache_len": 64, "paths": 64, "path_lengths": 64,
    }  # fmt: skip
    with pytest.raises(KernelError, match=line):
        kernels.compact(CompactArgs(**{**good, wrong: value}))
