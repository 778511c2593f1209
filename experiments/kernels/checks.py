"""Small calls that together run every kernel, compared with float64: the program for compute-sanitizer.

    python -m experiments.kernels.speed --check

They cover every type and head size with each number of query rows a tile may have. They also cover every feature of a
call in each type, compaction, and calls of random sizes and features. The host computes references, so the device runs
only the kernels and copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from experiments.kernels.problem import PLAIN, CompactionProblem, DeviceProblem, Features
from redraft.errors import KernelError
from redraft.plugins.library import DTYPES, HEAD_DIMS, Kernels
from redraft.plugins.traffic import AttentionSizes

LARGEST_ERROR = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-5}
BATCH = 3
TREES = ((1, (2, 2)), (20, (2, 2)), (13, (8, 2)), (64, (2, 2)), (33, (8, 2)))
"""Nodes and heads: 1, 20, 52, 64 and 132 query rows a key head. The last needs several tiles, of the largest size."""
RANDOM_CALLS = 12
"""Of each type."""
FEATURES = {
    "causal": Features(causal=True),
    "window": Features(window=70),
    "softcap": Features(softcap=2.0),
    "node counts": Features(counts=(20, 3, 0)),
    "mask bits": Features(bits=True),
    "rows in the cache": Features(written=True),
    "all": Features(window=70, softcap=2.0, counts=(20, 3, 0), bits=True),
}


def checks(kernels: Kernels, device: str = "cuda", kv_len: int = 517) -> Iterator[dict[str, Any]]:
    """Yield one entry for each correct call. Raises KernelError at the first wrong one."""
    for dtype, (name, features) in product(DTYPES, FEATURES.items()):
        sizes = AttentionSizes(dtype, BATCH, kv_len, 20, 4, 2, 64)
        yield _checked(kernels, sizes, device, name, features)
    for dtype, path in product(DTYPES, (1, 4, 19)):
        yield _compacted(kernels, dtype, path, device)
    for dtype, head_dim, (nodes, heads) in product(DTYPES, HEAD_DIMS, TREES):
        sizes = AttentionSizes(dtype, BATCH, kv_len, nodes, *heads, head_dim)
        yield _checked(kernels, sizes, device, "tree", PLAIN)
    for dtype, seed in product(DTYPES, range(RANDOM_CALLS)):
        yield _checked(kernels, *_random(dtype, seed, kv_len, device))


def _random(dtype: str, seed: int, longest: int, device: str) -> tuple[AttentionSizes, str, str, Features]:
    rng = np.random.default_rng(seed)
    batch, nodes = int(rng.integers(1, 5)), int(rng.integers(1, 80))
    kv_heads, group = int(rng.integers(1, 4)), int(rng.integers(1, 8))
    counts = tuple(int(count) for count in rng.integers(0, nodes + 1, batch)) if rng.random() < 0.5 else None
    kv_len = int(rng.integers(1, longest + 1))
    sizes = AttentionSizes(dtype, batch, kv_len, nodes, group * kv_heads, kv_heads, int(rng.choice(HEAD_DIMS)))
    features = Features(
        causal=rng.random() < 0.2, window=int(rng.choice([0, 1, 33, 200])), softcap=float(rng.choice([0.0, 3.0])),
        counts=counts, bits=rng.random() < 0.5, written=rng.random() < 0.3,
    )  # fmt: skip
    return sizes, device, "random", features


def _checked(
    kernels: Kernels, sizes: AttentionSizes, device: str, name: str, features: Features
) -> dict[str, Any]:  # fmt: skip
    problem = DeviceProblem(sizes, device=device, features=features)
    problem.ours(kernels)()
    error = problem.error(problem.out, "cpu")
    what = f"{sizes.dtype}, head size {sizes.head_dim}, {sizes.nodes} nodes, {name}"
    if not error < LARGEST_ERROR[sizes.dtype]:
        raise KernelError(f"{what}: error {error}, expected less than {LARGEST_ERROR[sizes.dtype]}")
    if not problem.rows_written():
        raise KernelError(f"{what}: expected the new rows in the cache, found others")
    return {"dtype": sizes.dtype, "head_dim": sizes.head_dim, "nodes": sizes.nodes, "what": name,
            "rows": problem.plan(kernels).rows, "error": error}  # fmt: skip


def _compacted(kernels: Kernels, dtype: str, path: int, device: str) -> dict[str, Any]:
    problem = CompactionProblem(4, BATCH, 2, path, dtype, head_dim=80, kv_len=30, device=device)
    problem.ours(kernels)()
    if not problem.right():
        raise KernelError(f"{dtype}, compaction of {path} rows: expected the accepted rows in order, found others")
    return {"dtype": dtype, "what": "compaction", "path": path}
