"""Timed problems of the kernels in device memory, and PyTorch's attention over the same problems."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from tests.plugins.cases import pack_bits
from tests.plugins.devices import current_stream

from experiments.kernels.floors import AttentionSizes
from redraft.plugins.library import DTYPES, AttentionArgs, CompactArgs, Kernels
from redraft.runtime.trees.tree import ancestor_mask

SPARE_ROWS = 64
"""Rows past `kv_len`, filled with NaN."""
BIAS_COLUMNS = 16
"""PyTorch's memory-efficient attention wants rows of a bias at multiples of this; else it copies the bias each call."""
Call = Callable[[], torch.Tensor]
Way = tuple[Call, Callable[[torch.Tensor], torch.Tensor]]
"""A call in the layout of a library, and a function that brings its result to [B, T, Hq, D]."""


class AttentionProblem:
    """Random q, k, v, caches and trees on the device; the same sizes for every sequence of the batch."""

    def __init__(self, sizes: AttentionSizes, seed: int = 0) -> None:
        self.sizes = s = sizes
        generator = torch.Generator("cuda").manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            values = torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32)
            return values.to(getattr(torch, s.dtype))

        self.end, self.capacity = s.kv_len + s.nodes, s.kv_len + s.nodes + SPARE_ROWS
        self.q = normal(s.batch, s.nodes, s.q_heads, s.head_dim)
        self.k, self.v = (normal(s.batch, s.nodes, s.kv_heads, s.head_dim) for _ in range(2))
        self.keys, self.values = (normal(s.batch, s.kv_heads, self.capacity, s.head_dim) for _ in range(2))
        for cache in (self.keys, self.values):
            cache[:, :, s.kv_len :] = float("nan")
        rng = np.random.default_rng(seed)
        parents = [[-1, *(int(rng.integers(0, i)) for i in range(1, s.nodes))] for _ in range(s.batch)]
        mask = np.stack([ancestor_mask(np.array(one)) for one in parents])  # [B, T, T]
        visible = np.concatenate([np.ones((s.batch, s.nodes, s.kv_len), dtype=np.bool_), mask], axis=2)
        self.visible = torch.from_numpy(visible).cuda()  # [B, T, kv_len + T]
        self.mask = torch.from_numpy(pack_bits(mask).view(np.int32)).cuda()
        self.positions = torch.from_numpy(s.kv_len + mask.sum(axis=2) - 1).cuda()
        self.cache_len = torch.full((s.batch,), s.kv_len, device="cuda")
        self.out = torch.zeros_like(self.q)
        self.scale = s.head_dim**-0.5

    def ours(self, kernels: Kernels) -> Call:
        """Return a call of the kernels. It also writes new rows into the cache, as in an engine."""
        s = self.sizes
        arrays = {
            "q": self.q, "k": self.k, "v": self.v, "key_cache": self.keys, "value_cache": self.values,
            "cache_len": self.cache_len, "mask_bits": self.mask, "positions": self.positions, "out": self.out,
        }  # fmt: skip
        args = AttentionArgs(
            dtype=DTYPES[s.dtype], batch=s.batch, nodes=s.nodes, q_heads=s.q_heads, kv_heads=s.kv_heads,
            head_dim=s.head_dim, capacity=self.capacity, scale=self.scale,
            **{name: array.data_ptr() for name, array in arrays.items()},
        )  # fmt: skip
        scratch = torch.empty(kernels.workspace_bytes(args), dtype=torch.uint8, device="cuda")

        def call() -> torch.Tensor:
            kernels.attend(args, scratch.data_ptr(), scratch.nbytes, current_stream())
            return self.out

        return call

    def error(self, out: torch.Tensor) -> float:
        """Return the largest difference from the answer in float32 over its largest value. Needs the new rows."""
        group = self.sizes.q_heads // self.sizes.kv_heads
        heads = []
        for head in range(self.sizes.q_heads):  # one by one, which bounds memory
            keys, values = (cache[:, head // group, : self.end].float() for cache in (self.keys, self.values))
            scores = self.q[:, :, head].float() @ keys.transpose(1, 2) * self.scale
            heads.append(scores.masked_fill(~self.visible, float("-inf")).softmax(-1) @ values)
        expected = torch.stack(heads, dim=2)
        return float((out.to(expected) - expected).abs().max() / expected.abs().max())

    def pytorchs_ways(self) -> Mapping[str, Callable[[], Way]]:
        """Return the ways of PyTorch's attention that fit, by name: none writes the new rows."""
        queries, s = self.q.transpose(1, 2), self.sizes
        ways = {
            "sdpa_bool": lambda: self._sdpa(queries, self.visible[:, None]),
            "sdpa_bias": lambda: self._sdpa(queries, self._bias(1)),
        }
        if s.q_heads != s.kv_heads:
            ways["sdpa_folded"] = self._folded
        if s.nodes == 1:
            ways["sdpa_unmasked"] = lambda: self._sdpa(queries, None)
        return ways

    def _folded(self) -> Way:
        """Join queries of heads that share a key head into one, so that each key is read once for all of them."""
        s = self.sizes
        group = s.q_heads // s.kv_heads
        split = self.q.view(s.batch, s.nodes, s.kv_heads, group, s.head_dim).permute(0, 2, 3, 1, 4)
        queries = split.reshape(s.batch, s.kv_heads, group * s.nodes, s.head_dim)

        def answer(out: torch.Tensor) -> torch.Tensor:
            unfolded = out.view(s.batch, s.kv_heads, group, s.nodes, s.head_dim).permute(0, 3, 1, 2, 4)
            return unfolded.reshape(self.q.shape)

        return self._sdpa(queries, None if s.nodes == 1 else self._bias(group))[0], answer

    def _sdpa(self, queries: torch.Tensor, mask: torch.Tensor | None) -> Way:
        keys, values = self.keys[:, :, : self.end], self.values[:, :, : self.end]
        grouped = queries.shape[1] != keys.shape[1]

        def call() -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(
                queries, keys, values, mask, scale=self.scale, enable_gqa=grouped
            )

        return call, lambda out: out.transpose(1, 2)

    def _bias(self, group: int) -> torch.Tensor:
        """Return 0 for visible rows and minus infinity for others, [B, 1, group T, kv_len + T], with aligned rows."""
        s = self.sizes
        columns = -(-self.end // BIAS_COLUMNS) * BIAS_COLUMNS
        whole = torch.zeros(s.batch, 1, group * s.nodes, columns, dtype=self.q.dtype, device="cuda")
        hidden = ~self.visible.repeat(1, group, 1)[:, None]
        return whole[..., : self.end].masked_fill_(hidden, float("-inf"))


class CompactionProblem:
    """Caches [B, Hkv, C, 128] of fp16 in which every second row after the root was accepted."""

    def __init__(self, cache_count: int, batch: int, kv_heads: int, path: int, kv_len: int = 400) -> None:
        capacity = kv_len + 2 * path + 1
        rows = torch.arange(capacity, device="cuda", dtype=torch.float16)[:, None]
        self.caches = [rows.expand(batch, kv_heads, capacity, 128).contiguous() for _ in range(cache_count)]
        self.expected = rows.clone()
        self.expected[kv_len + 1 : kv_len + 1 + path] = rows[kv_len + 2 : kv_len + 2 + 2 * path : 2]
        self.held = {
            "caches": torch.tensor([cache.data_ptr() for cache in self.caches], device="cuda"),
            "cache_len": torch.full((batch,), kv_len, device="cuda"),
            "paths": (2 * torch.arange(1, path + 1, device="cuda")).repeat(batch, 1),
            "path_lengths": torch.full((batch,), path, device="cuda"),
        }
        self.args = CompactArgs(
            dtype=DTYPES["float16"], cache_count=cache_count, batch=batch, kv_heads=kv_heads, head_dim=128,
            capacity=capacity, max_path=path, **{name: held.data_ptr() for name, held in self.held.items()},
        )  # fmt: skip

    def ours(self, kernels: Kernels) -> Callable[[], None]:
        """Return a call that launches once over all caches."""
        return lambda: kernels.compact(self.args, current_stream())

    def right(self) -> bool:
        """Return True if one call has put the accepted rows after the root, and changed no other."""
        return all(bool((cache == self.expected).all()) for cache in self.caches)
