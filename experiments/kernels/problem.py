"""Problems of tree attention and of compaction in device memory, and their correct results.

The host makes the kernels' inputs and copies them, so that compute-sanitizer knows that they are initialized. With the
CPU build of the kernels and `device="cpu"` all works on host memory, which tests use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from redraft.plugins.library import DTYPES, AttentionArgs, AttentionPlan, CompactArgs, Kernels
from redraft.plugins.traffic import AttentionSizes
from redraft.runtime.tree import ancestor_mask

SPARE_ROWS = 64
"""Rows past `kv_len`, filled with NaN."""

Call = Callable[[], Any]


@dataclass(frozen=True)
class Features:
    """Options of a call; the default is a tree with a mask in bytes, with all rows visible and written."""

    causal: bool = False
    window: int = 0
    softcap: float = 0.0
    counts: tuple[int, ...] | None = None  # nodes of each tree
    bits: bool = False  # the mask comes packed
    written: bool = False  # the rows are in the cache already


PLAIN = Features()


class DeviceProblem:
    """Return random q, k, v, caches and trees on the device; the same sizes for every sequence of the batch."""

    def __init__(self, sizes: AttentionSizes, seed: int = 0, device: str = "cuda", features: Features = PLAIN) -> None:
        torch = self.torch = importlib.import_module("torch")
        self.sizes = s = sizes
        self.device, self.features = device, features
        # Large caches are made on the device: the host would take minutes.
        maker = device if s.batch * s.kv_heads * s.kv_len * s.head_dim > 1 << 22 else "cpu"
        generator = torch.Generator(maker).manual_seed(seed)

        def normal(*shape: int) -> Any:
            values = torch.randn(shape, generator=generator, device=maker, dtype=torch.float32)
            return values.to(getattr(torch, s.dtype))

        self.capacity = s.kv_len + s.nodes + SPARE_ROWS
        self.q = normal(s.batch, s.nodes, s.q_heads, s.head_dim).to(device)
        self.k, self.v = (normal(s.batch, s.nodes, s.kv_heads, s.head_dim).to(device) for _ in range(2))
        caches = [normal(s.batch, s.kv_heads, self.capacity, s.head_dim) for _ in range(2)]
        for cache, rows in zip(caches, (self.k, self.v), strict=True):
            cache[:, :, s.kv_len :] = float("nan")
            if features.written:
                cache[:, :, s.kv_len : s.kv_len + s.nodes] = rows.transpose(1, 2)
        self.keys, self.values = (cache.to(device) for cache in caches)
        rng = np.random.default_rng(seed)
        parents = [[-1, *(int(rng.integers(0, i)) for i in range(1, s.nodes))] for _ in range(s.batch)]
        trees = [np.tri(s.nodes, dtype=np.bool_) if features.causal else ancestor_mask(np.array(p)) for p in parents]
        self.mask = np.stack(trees)  # [B, T, T]
        self.own = s.kv_len + self.mask.sum(axis=2) - 1  # [B, T], positions
        self.mask_bools, self.mask_bits = self._put(self.mask), self._put(_packed(self.mask))
        self.positions, self.cache_len = self._put(self.own), self._put(np.full(s.batch, s.kv_len))
        self.counts = None if features.counts is None else self._put(np.array(features.counts))
        self.out = torch.zeros_like(self.q)
        self.scale = s.head_dim**-0.5

    def args(self, ctas: int = 0) -> AttentionArgs:
        """Return the call, as the C entry takes it."""
        s, features = self.sizes, self.features
        args = AttentionArgs(
            dtype=DTYPES[s.dtype], batch=s.batch, nodes=s.nodes, q_heads=s.q_heads, kv_heads=s.kv_heads,
            head_dim=s.head_dim, capacity=self.capacity, scale=self.scale, window=features.window,
            softcap=features.softcap, ctas=ctas, q=self.q.data_ptr(), key_cache=self.keys.data_ptr(),
            value_cache=self.values.data_ptr(), cache_len=self.cache_len.data_ptr(), out=self.out.data_ptr(),
        )  # fmt: skip
        if not features.written:
            args.k, args.v = self.k.data_ptr(), self.v.data_ptr()
        if not features.causal:
            name = "mask_bits" if features.bits else "mask_bools"
            setattr(args, name, getattr(self, name).data_ptr())
            args.positions = self.positions.data_ptr()
        if self.counts is not None:
            args.node_counts = self.counts.data_ptr()
        return args

    def plan(self, kernels: Kernels, ctas: int = 0) -> AttentionPlan:
        """Return the kernels' launch plan for this problem."""
        return kernels.plan(self.args(ctas))

    def ours(self, kernels: Kernels, ctas: int = 0) -> Call:
        """Return a call of the kernels. It also writes new rows into the cache, as in an engine."""
        args = self.args(ctas)
        scratch = self.torch.empty(kernels.workspace_bytes(args), dtype=self.torch.uint8, device=self.device)

        def call() -> Any:
            kernels.attend(args, scratch.data_ptr(), scratch.nbytes, current_stream(self.device))
            return self.out

        return call

    def reference(self, device: str | None = None) -> Any:
        """Return out [B, T, Hq, D], by head: in float64 on a CPU, in float32 on a device, by default the problem's."""
        s, device = self.sizes, device or self.device
        wide = self.torch.float64 if device == "cpu" else self.torch.float32
        group = s.q_heads // s.kv_heads
        q, k, v = (each.to(device) for each in (self.q, self.k, self.v))
        keys, values = (cache[:, :, : s.kv_len].to(device) for cache in (self.keys, self.values))
        hidden = ~self.torch.from_numpy(self.visible()).to(device)
        heads = []
        for head in range(s.q_heads):
            at = head // group
            rows, weighed = (
                self.torch.cat([cache[:, at], new[:, :, at]], dim=1).to(wide) for cache, new in ((keys, k), (values, v))
            )
            scores = q[:, :, head].to(wide) @ rows.transpose(1, 2) * self.scale
            if self.features.softcap:
                scores = self.features.softcap * (scores / self.features.softcap).tanh()
            heads.append(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ weighed)
        out = self.torch.stack(heads, dim=2)
        for sequence, count in enumerate(self.features.counts or ()):
            out[sequence, count:] = 0
        return out

    def error(self, out: Any, device: str | None = None) -> float:
        """Return the largest difference from the reference over its largest value."""
        expected = self.reference(device)
        return float((out.to(expected) - expected).abs().max() / expected.abs().max())

    def rows_written(self) -> bool:
        """Return True if the caches hold the new rows of each tree, to the bit, and still NaN after them."""
        kv_len = self.sizes.kv_len
        for cache, rows in ((self.keys.cpu(), self.k.cpu()), (self.values.cpu(), self.v.cpu())):
            for sequence in range(self.sizes.batch):
                count = self.sizes.nodes if self.features.counts is None else self.features.counts[sequence]
                if not self.torch.equal(
                    cache[sequence, :, kv_len : kv_len + count], rows[sequence, :count].transpose(0, 1)
                ):
                    return False
                if not self.features.written and not cache[sequence, :, kv_len + count :].isnan().all():
                    return False
        return True

    def visible(self) -> Any:
        """Return rows that each node sees, bool [B, T, live + T]."""
        s = self.sizes
        seen = np.concatenate([np.ones((s.batch, s.nodes, s.kv_len), dtype=np.bool_), self.mask], axis=2)
        if self.features.window:
            at = np.concatenate([np.broadcast_to(np.arange(s.kv_len), (s.batch, s.kv_len)), self.own], axis=1)
            seen &= self.own[:, :, None] - at[:, None] < self.features.window
        return seen

    def _put(self, array: Any) -> Any:
        return self.torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


class CompactionProblem:
    """Caches [B, Hkv, C, D] in which every second row after the root was accepted."""

    def __init__(
        self, cache_count: int, batch: int, kv_heads: int, path: int, dtype: str = "float16", head_dim: int = 128,
        kv_len: int = 400, device: str = "cuda",
    ) -> None:  # fmt: skip
        torch = self.torch = importlib.import_module("torch")
        self.device, self.kv_len, self.path = device, kv_len, path
        capacity = kv_len + 2 * path + 1
        shape = (batch, kv_heads, capacity, head_dim)
        host = torch.arange(capacity, dtype=torch.float32)[:, None].expand(shape).to(getattr(torch, dtype)).contiguous()
        self.caches = [host.to(device, copy=True) for _ in range(cache_count)]
        self.held = [
            torch.tensor([cache.data_ptr() for cache in self.caches]).to(device),
            torch.full((batch,), kv_len).to(device),
            (2 * torch.arange(1, path + 1)).repeat(batch, 1).to(device),
            torch.full((batch,), path).to(device),
        ]
        names = ("caches", "cache_len", "paths", "path_lengths")
        self.args = CompactArgs(
            dtype=DTYPES[dtype], cache_count=cache_count, batch=batch, kv_heads=kv_heads, head_dim=head_dim,
            capacity=capacity, max_path=path,
            **{name: held.data_ptr() for name, held in zip(names, self.held, strict=True)},
        )  # fmt: skip

    def ours(self, kernels: Kernels) -> Call:
        """Return a call that launches once over all caches."""
        return lambda: kernels.compact(self.args, current_stream(self.device))

    def right(self) -> bool:
        """Return True if one call has put the accepted rows after the root, and changed no other."""
        torch = self.torch
        rows = torch.arange(self.caches[0].shape[2])
        rows[self.kv_len + 1 : self.kv_len + 1 + self.path] = self.kv_len + 2 * torch.arange(1, self.path + 1)
        expected = rows[:, None].to(self.caches[0].dtype)
        return all(bool((cache.cpu() == expected).all()) for cache in self.caches)


def current_stream(device: str) -> int:
    """Return the address of PyTorch's stream; the CPU build has none."""
    return int(importlib.import_module("torch").cuda.current_stream().cuda_stream) if device == "cuda" else 0


def _packed(mask: Any) -> Any:
    """Return a mask's rows as words of 32 bits, lowest first."""
    bits = np.zeros((*mask.shape[:-1], -(-mask.shape[-1] // 32) * 32), dtype=np.uint8)
    bits[..., : mask.shape[-1]] = mask
    return np.packbits(bits, axis=-1, bitorder="little").view(np.int32)
