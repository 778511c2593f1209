"""Small calls that together run every kernel, compared with float64: the program for compute-sanitizer.

    python -m tests.plugins.checks

They cover every type and head size with each number of query rows a tile may have, in batches of long and empty
prefixes. They also cover every feature of a call in each type, compaction, and calls of random sizes and features. The
host computes references, so the device runs only the kernels and copies.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from redraft.errors import KernelError
from redraft.plugins.library import DTYPES, HEAD_DIMS, Kernels, open_kernels

from .cases import (
    NUMPY,
    HostMemory,
    attend,
    attention_args,
    compact,
    compacted,
    error_of,
    random_case,
    reference,
    relative_error,
    same_bits,
)

BATCH = 3
TREES = ((1, (2, 2)), (20, (2, 2)), (13, (4, 1)), (64, (1, 1)), (33, (4, 1)))
"""Nodes and heads: 1, 20, 52, 64 and 132 query rows a key head. The last needs several tiles, of the largest size."""
FEATURES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": 70},
    "softcap": {"softcap": 2.0},
    "node counts": {"counts": [20, 3, 0]},
    "mask bits": {"bits": True},
    "rows in the cache": {"write": False},
    "all": {"window": 70, "softcap": 2.0, "counts": [20, 3, 0], "bits": True},
}


def checks(kernels: Kernels, kv_len: int = 517, random_calls: int = 12) -> Iterator[dict[str, Any]]:
    """Yield one entry for each correct call. Raises KernelError at the first wrong one. random_calls: of each type."""
    lengths = [kv_len, 0, kv_len // 2]
    for dtype, (name, features) in product(DTYPES, FEATURES.items()):
        yield _attended(kernels, name, dtype, lengths, 20, (4, 2), 64, features)
    for dtype, path in product(DTYPES, (1, 4, 19)):
        yield _compacted(kernels, dtype, path)
    for dtype, head_dim, (nodes, heads) in product(DTYPES, HEAD_DIMS, TREES):
        yield _attended(kernels, "tree", dtype, lengths, nodes, heads, head_dim, {})
    for dtype, seed in product(DTYPES, range(random_calls)):
        yield _attended(kernels, "random", dtype, *_random(seed, kv_len))


def _random(seed: int, longest: int) -> tuple[list[int], int, tuple[int, int], int, dict[str, Any]]:
    rng = np.random.default_rng(seed)
    batch, nodes = int(rng.integers(1, 5)), int(rng.integers(1, 80))
    kv_heads, group = int(rng.integers(1, 4)), int(rng.integers(1, 8))
    counts = rng.integers(0, nodes + 1, batch).tolist() if rng.random() < 0.5 else None
    features = {
        "counts": counts, "window": int(rng.choice([0, 1, 33, 200])), "softcap": float(rng.choice([0.0, 3.0])),
        "causal": bool(rng.random() < 0.2), "bits": bool(rng.random() < 0.5), "write": bool(rng.random() < 0.7),
    }  # fmt: skip
    lengths = rng.integers(1, longest + 1, batch).tolist()
    return lengths, nodes, (group * kv_heads, kv_heads), int(rng.choice(HEAD_DIMS)), features


def _attended(
    kernels: Kernels, name: str, dtype: str, cache_len: list[int], nodes: int, heads: tuple[int, int], head_dim: int,
    features: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    options = {"bits": False} | {key: value for key, value in features.items() if key in ("bits", "write")}
    shape = {key: value for key, value in features.items() if key not in options}
    case = random_case(nodes, dtype, head_dim, cache_len, nodes, heads, scale=head_dim**-0.5, **shape)
    _, keys, values = reference(case)
    given = case if options.get("write", True) else replace(case, key_cache=keys, value_cache=values)
    out, *caches = attend(kernels, given, **options)
    error, ratio = relative_error(case, out), error_of(case, out, truncated=True)
    what = f"{dtype}, head size {head_dim}, {nodes} nodes, {name}"
    if not ratio < 1:
        raise KernelError(f"{what}: error {error}, {ratio:.3g} times the allowed one")
    if not all(map(same_bits, caches, (keys, values))):
        raise KernelError(f"{what}: expected the new rows in the cache, found others")
    rows = kernels.plan(attention_args(case, HostMemory())).rows
    return {"dtype": dtype, "head_dim": head_dim, "nodes": nodes, "what": name, "rows": rows, "error": error}


def _compacted(kernels: Kernels, dtype: str, path: int) -> dict[str, Any]:
    rng = np.random.default_rng(path)
    caches = [rng.standard_normal((BATCH, 2, 30 + 2 * path + 1, 80)).astype(NUMPY[dtype]) for _ in range(4)]
    paths = np.tile(2 * np.arange(1, path + 1), (BATCH, 1))  # every second row after the root
    given = caches, np.full(BATCH, 30), paths, np.full(BATCH, path)
    if not all(map(same_bits, compact(kernels, *given), compacted(*given))):
        raise KernelError(f"{dtype}, compaction of {path} rows: expected the accepted rows in order, found others")
    return {"dtype": dtype, "what": "compaction", "path": path}


if __name__ == "__main__":
    for entry in checks(open_kernels()):
        print(json.dumps(entry))
