"""Small calls that together run every kernel, compared with float32: the program for compute-sanitizer.

    python -m experiments.kernels.speed --check

They cover every type and head size with each number of query rows a tile may have. They also cover every feature of a
call in each type, and compaction. The host computes references, so the device runs only the kernels and copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from experiments.kernels.problem import PLAIN, CompactionProblem, DeviceProblem, Features
from redraft.errors import KernelError
from redraft.plugins.library import DTYPES, HEAD_DIMS, Kernels
from redraft.plugins.traffic import AttentionSizes

LARGEST_ERROR = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-5}
BATCH = 3
TREES = ((1, (2, 2)), (20, (2, 2)), (13, (8, 2)), (64, (2, 2)))
"""Nodes and heads: 1, 20, 52 and 64 query rows a key head, which need tiles of 16, 32 and 64 rows."""
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
