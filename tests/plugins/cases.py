"""Random problems of tree attention, their answer in float64, and the kernels' answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from redraft.plugins.library import DTYPES, AttentionArgs, Kernels
from redraft.runtime.tree import ancestor_mask

NUMPY = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 4e-6}
"""Error allowed, relative to the largest value, for small scores: a few last places of the type."""


@dataclass(frozen=True, eq=False)
class Case:
    """One call: its inputs, as the C entry takes them."""

    dtype: str
    q: NDArray  # [B, T, Hq, D]
    k: NDArray  # [B, T, Hkv, D]
    v: NDArray
    key_cache: NDArray  # [B, Hkv, C, D]
    value_cache: NDArray
    cache_len: NDArray[np.int64]  # [B]
    counts: NDArray[np.int64] | None = None  # [B]
    mask: NDArray[np.bool_] | None = None  # [B, T, T]; None: causal
    positions: NDArray[np.int64] | None = None  # [B, T]
    scale: float = 0.1
    softcap: float = 0.0
    window: int = 0


def random_parents(rng: np.random.Generator, nodes: int) -> NDArray[np.int64]:
    """A random tree: every node has an earlier node as its parent."""
    return np.array([-1, *(rng.integers(0, node) for node in range(1, nodes))], dtype=np.int64)


def random_case(
    seed: int,
    dtype: str,
    head_dim: int,
    cache_len: list[int],
    nodes: int,
    heads: tuple[int, int] = (2, 1),
    counts: list[int] | None = None,
    causal: bool = False,
    spare: int = 5,
    magnitude: float = 1.0,
    **options: float,
) -> Case:
    """Caches with NaN in rows past `kv_len` and in the rows that the nodes will take."""
    rng = np.random.default_rng(seed)
    q_heads, kv_heads = heads
    batch, capacity = len(cache_len), max(cache_len) + nodes + spare

    def normal(*shape: int) -> NDArray:
        return (rng.standard_normal(shape) * magnitude).astype(NUMPY[dtype])

    caches = [normal(batch, kv_heads, capacity, head_dim) for _ in range(2)]
    for cache in caches:
        for b, past in enumerate(cache_len):
            cache[b, :, past:] = np.nan
    mask = positions = None
    if not causal:
        trees = [random_parents(rng, nodes) for _ in cache_len]
        mask = np.stack([ancestor_mask(parents) for parents in trees])
        positions = np.array(cache_len)[:, None] + mask.sum(axis=2) - 1
    return Case(
        dtype,
        normal(batch, nodes, q_heads, head_dim),
        normal(batch, nodes, kv_heads, head_dim),
        normal(batch, nodes, kv_heads, head_dim),
        *caches,
        np.array(cache_len),
        None if counts is None else np.array(counts),
        mask,
        positions,
        **options,  # type: ignore[arg-type]
    )


def reference(case: Case) -> tuple[NDArray[np.float64], NDArray, NDArray]:
    """Return out [B, T, Hq, D] in float64, and the caches afterwards."""
    batch, nodes, q_heads, head_dim = case.q.shape
    group = q_heads // case.k.shape[2]
    keys, values = case.key_cache.copy(), case.value_cache.copy()
    out = np.zeros((batch, nodes, q_heads, head_dim))
    for b in range(batch):
        past = int(case.cache_len[b])
        count = nodes if case.counts is None else int(case.counts[b])
        keys[b, :, past : past + count] = case.k[b, :count].swapaxes(0, 1)
        values[b, :, past : past + count] = case.v[b, :count].swapaxes(0, 1)
        seen = np.ones((count, past + count), dtype=bool)
        seen[:, past:] = np.tri(count) if case.mask is None else case.mask[b, :count, :count]
        if case.window:
            own = np.arange(past, past + count) if case.positions is None else case.positions[b, :count]
            at = np.concatenate([np.arange(past), own])
            seen &= own[:, None] - at[None] < case.window
        for head in range(q_heads):
            rows = keys[b, head // group, : past + count].astype(np.float64)
            scores = case.q[b, :count, head].astype(np.float64) @ rows.T * case.scale
            if case.softcap:
                scores = case.softcap * np.tanh(scores / case.softcap)
            scores[~seen] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            out[b, :count, head] = weights @ values[b, head // group, : past + count].astype(np.float64)
    return out, keys, values


GUARD = 4096
"""Elements before and after every array that a kernel writes."""


def guarded(array: NDArray) -> tuple[NDArray, NDArray]:
    """Return a copy in the middle of a longer array of 7s, and that whole array."""
    whole = np.full(array.size + 2 * GUARD, 7, dtype=array.dtype)
    inner = whole[GUARD : GUARD + array.size].reshape(array.shape)
    inner[...] = array
    return inner, whole


def guards_hold(whole: NDArray) -> bool:
    """Return True if nothing was written before or after the array."""
    return bool((whole[:GUARD] == 7).all() and (whole[-GUARD:] == 7).all())


def pack_bits(mask: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """Return rows of a mask as words of 32 bits, lowest first."""
    nodes = mask.shape[-1]
    padded = np.zeros((*mask.shape[:-1], -(-nodes // 32) * 32), dtype=np.uint8)
    padded[..., :nodes] = mask
    return np.packbits(padded, axis=-1, bitorder="little").view(np.uint32)


def run(
    kernels: Kernels,
    case: Case,
    *,
    bits: bool = True,
    ctas: int = 0,
    order: int = 0,
    write: bool = True,
    truncate: bool = False,
) -> tuple[NDArray, NDArray, NDArray]:
    """Return out [B, T, Hq, D] and the caches afterwards, by the CPU build. Fails if a kernel wrote past an array's
    end.
    """
    batch, nodes, q_heads, head_dim = case.q.shape
    out, whole_out = guarded(np.full(case.q.shape, np.nan, dtype=case.q.dtype))
    keys, whole_keys = guarded(case.key_cache)
    values, whole_values = guarded(case.value_cache)
    inputs = [np.ascontiguousarray(array) for array in (case.q, case.k, case.v)]
    mask = None if case.mask is None else pack_bits(case.mask) if bits else case.mask.copy()
    args = AttentionArgs(
        dtype=DTYPES[case.dtype], batch=batch, nodes=nodes, q_heads=q_heads, kv_heads=case.k.shape[2],
        head_dim=head_dim, capacity=keys.shape[2], window=case.window, scale=case.scale, softcap=case.softcap,
        ctas=ctas,
        q=inputs[0].ctypes.data, k=inputs[1].ctypes.data if write else None,
        v=inputs[2].ctypes.data if write else None, key_cache=keys.ctypes.data, value_cache=values.ctypes.data,
        cache_len=case.cache_len.ctypes.data, out=out.ctypes.data,
        positions=None if case.positions is None else case.positions.ctypes.data,
        node_counts=None if case.counts is None else case.counts.ctypes.data,
        **({} if mask is None else {"mask_bits" if bits else "mask_bools": mask.ctypes.data}),
    )  # fmt: skip
    scratch, whole_scratch = guarded(np.full(kernels.workspace_bytes(args), 255, dtype=np.uint8))
    kernels.set_order(order)
    kernels.truncate_sums(truncate)
    kernels.attend(args, scratch.ctypes.data, scratch.nbytes)
    for whole in (whole_out, whole_keys, whole_values, whole_scratch):
        assert guards_hold(whole)
    return out, keys, values


def error_of(case: Case, out: NDArray, truncated: bool = False) -> float:
    """Return the largest difference from the reference, relative to the largest value, in units of the allowed error.

    Float32 sums that tensor cores cut off may err twice as far as those to the nearest. A score in float32 is off by
    its size times 2^-22 or so, and its weight by as much.
    """
    expected, _, _ = reference(case)
    error = np.abs(out.astype(np.float64) - expected).max() / max(np.abs(expected).max(), 1e-30)
    group = case.q.shape[2] // case.k.shape[2]
    keys = np.concatenate([np.nan_to_num(case.key_cache.astype(np.float64)), case.k.swapaxes(1, 2)], axis=2)
    scores = np.einsum("bthd,bhcd->bthc", case.q.astype(np.float64), keys.repeat(group, axis=1)) * case.scale
    allowed = TOLERANCE[case.dtype] * (2 if truncated and case.dtype == "float32" else 1)
    return float(error / (allowed + np.abs(scores).max() * 2.0**-22))


def with_lengths(case: Case, cache_len: list[int]) -> Case:
    """Return the same call with other lengths."""
    return replace(case, cache_len=np.array(cache_len))
