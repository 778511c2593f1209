"""Random problems of the kernels, their answers in NumPy, and the answers of the CPU build or of a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from redraft.plugins.library import DTYPES, AttentionArgs, CompactArgs, Kernels
from redraft.runtime.trees.tree import ancestor_mask

from .devices import DeviceMemory

NUMPY = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 4e-6}
"""Error allowed, relative to the largest value, for small scores: a few last places of the type."""
GUARD = 1 << 14
"""Bytes before and after every array of the host that a kernel gets."""


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
    """Return a call over random trees. Rows of the caches are NaN past `kv_len`, and where the nodes' rows will be."""
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
        parents = [np.array([-1, *(rng.integers(0, node) for node in range(1, nodes))]) for _ in cache_len]
        mask = np.stack([ancestor_mask(one) for one in parents])
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


def relative_error(case: Case, out: NDArray) -> float:
    """Return the largest difference from the reference, relative to the largest value."""
    expected, _, _ = reference(case)
    return float(np.abs(out.astype(np.float64) - expected).max() / max(np.abs(expected).max(), 1e-30))


def error_of(case: Case, out: NDArray, truncated: bool = False) -> float:
    """Return the relative error in units of the allowed one.

    Float32 sums that tensor cores cut off may err twice as far as those to the nearest. A score in float32 is off by
    its size times 2^-22 or so, and its weight by as much.
    """
    group = case.q.shape[2] // case.k.shape[2]
    keys = np.concatenate([np.nan_to_num(case.key_cache.astype(np.float64)), case.k.swapaxes(1, 2)], axis=2)
    scores = np.einsum("bthd,bhcd->bthc", case.q.astype(np.float64), keys.repeat(group, axis=1)) * case.scale
    allowed = TOLERANCE[case.dtype] * (2 if truncated and case.dtype == "float32" else 1)
    return relative_error(case, out) / float(allowed + np.abs(scores).max() * 2.0**-22)


class Memory(Protocol):
    """Memory of kernels: `put` returns the address of a copy of an array, `get` the array now at an address."""

    def put(self, array: NDArray) -> int: ...

    def get(self, address: int, like: NDArray) -> NDArray: ...


class HostMemory:
    """Every array is in the middle of a longer one of 7s. `get` fails if a kernel wrote before or after any array."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[NDArray, NDArray]] = {}

    def put(self, array: NDArray) -> int:
        whole = np.full(array.nbytes + 2 * GUARD, 7, dtype=np.uint8)
        inner = whole[GUARD:-GUARD].view(array.dtype).reshape(array.shape)
        inner[...] = array
        self.held[inner.ctypes.data] = inner, whole
        return inner.ctypes.data

    def get(self, address: int, like: NDArray) -> NDArray:
        for _, whole in self.held.values():
            assert (whole[:GUARD] == 7).all()
            assert (whole[-GUARD:] == 7).all()
        return self.held[address][0]


def pack_bits(mask: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """Return rows of a mask as words of 32 bits, lowest first."""
    nodes = mask.shape[-1]
    padded = np.zeros((*mask.shape[:-1], -(-nodes // 32) * 32), dtype=np.uint8)
    padded[..., :nodes] = mask
    return np.packbits(padded, axis=-1, bitorder="little").view(np.uint32)


def attention_args(
    case: Case, memory: Memory, *, bits: bool = True, ctas: int = 0, write: bool = True
) -> AttentionArgs:
    """Return the call over copies in `memory`. `out` is NaN. write: False leaves out k and v."""
    arrays: dict[str, Any] = {
        "q": case.q, "key_cache": case.key_cache, "value_cache": case.value_cache, "cache_len": case.cache_len,
        "out": np.full(case.q.shape, np.nan, dtype=case.q.dtype), "positions": case.positions,
        "node_counts": case.counts, **({"k": case.k, "v": case.v} if write else {}),
    }  # fmt: skip
    if case.mask is not None:
        arrays |= {"mask_bits": pack_bits(case.mask)} if bits else {"mask_bools": case.mask}
    batch, nodes, q_heads, head_dim = case.q.shape
    return AttentionArgs(
        dtype=DTYPES[case.dtype], batch=batch, nodes=nodes, q_heads=q_heads, kv_heads=case.k.shape[2],
        head_dim=head_dim, capacity=case.key_cache.shape[2], window=case.window, scale=case.scale,
        softcap=case.softcap, ctas=ctas,
        **{name: memory.put(array) for name, array in arrays.items() if array is not None},
    )  # fmt: skip


def memory_of(kernels: Kernels) -> Memory:
    """Return new memory whose addresses these kernels take."""
    return HostMemory() if kernels.on_cpu else DeviceMemory()


def attend(
    kernels: Kernels, case: Case, *, order: int = 0, truncate: bool = False, **options: Any
) -> tuple[NDArray, NDArray, NDArray]:
    """Return out [B, T, Hq, D] and the caches afterwards. Fails if the CPU build wrote past an array's end.

    order, truncate: of the CPU build (`Kernels.set_order`, `Kernels.truncate_sums`).   options: of `attention_args`.
    """
    if kernels.on_cpu:
        kernels.set_order(order)
        kernels.truncate_sums(truncate)
    memory = memory_of(kernels)
    args = attention_args(case, memory, **options)
    scratch = np.full(kernels.workspace_bytes(args), 255, dtype=np.uint8)
    kernels.attend(args, memory.put(scratch), scratch.nbytes)
    like = {"out": case.q, "key_cache": case.key_cache, "value_cache": case.value_cache}
    out, keys, values = (memory.get(getattr(args, name), array) for name, array in like.items())
    return out, keys, values


def compact(
    kernels: Kernels, caches: list[NDArray], cache_len: NDArray, paths: NDArray, lengths: NDArray
) -> list[NDArray]:
    """Return the caches [B, Hkv, C, D] afterwards."""
    memory = memory_of(kernels)
    addresses = [memory.put(cache) for cache in caches]
    batch, kv_heads, capacity, head_dim = caches[0].shape
    dtype = {kind: name for name, kind in NUMPY.items()}[caches[0].dtype]
    kernels.compact(
        CompactArgs(
            dtype=DTYPES[dtype], cache_count=len(caches), batch=batch, kv_heads=kv_heads, head_dim=head_dim,
            capacity=capacity, max_path=paths.shape[1], caches=memory.put(np.array(addresses, dtype=np.uint64)),
            cache_len=memory.put(cache_len), paths=memory.put(paths), path_lengths=memory.put(lengths),
        )
    )  # fmt: skip
    return [memory.get(address, cache) for address, cache in zip(addresses, caches, strict=True)]


def compacted(caches: list[NDArray], cache_len: NDArray, paths: NDArray, lengths: NDArray) -> list[NDArray]:
    """Return the caches as they must be after compaction: the rows of each path follow its root."""
    expected = [cache.copy() for cache in caches]
    for cache, before in zip(expected, caches, strict=True):
        for b, (past, length) in enumerate(zip(cache_len, lengths, strict=True)):
            cache[b, :, past + 1 : past + 1 + length] = before[b, :, past + paths[b, :length]].swapaxes(0, 1)
    return expected


def same_bits(a: NDArray, b: NDArray) -> bool:
    """Return True if both arrays have the same bytes."""
    return a.tobytes() == b.tobytes()
