"""One problem of tree attention in device memory, and the ways to solve it that are compared.

With the CPU build of the kernels and `device="cpu"` all but FlashInfer works on host memory, which tests use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from redraft.plugins.library import DTYPES, AttentionArgs, Kernels
from redraft.plugins.traffic import AttentionSizes
from redraft.runtime.tree import ancestor_mask

SPARE_ROWS = 64
"""Rows past the live end, filled with NaN."""


class DeviceProblem:
    """Random q, k, v, caches and trees on the device; the same sizes for every sequence of the batch."""

    def __init__(self, sizes: AttentionSizes, seed: int = 0, device: str = "cuda") -> None:
        torch = self.torch = importlib.import_module("torch")
        self.sizes = s = sizes
        self.device = device
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Any:
            values = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
            return values.to(getattr(torch, s.dtype))

        self.capacity = s.live + s.nodes + SPARE_ROWS
        self.q = normal(s.batch, s.nodes, s.q_heads, s.head_dim)
        self.k, self.v = (normal(s.batch, s.nodes, s.kv_heads, s.head_dim) for _ in range(2))
        self.keys, self.values = (normal(s.batch, s.kv_heads, self.capacity, s.head_dim) for _ in range(2))
        for cache in (self.keys, self.values):
            cache[:, :, s.live :] = float("nan")
        rng = np.random.default_rng(seed)
        parents = [[-1, *(int(rng.integers(0, i)) for i in range(1, s.nodes))] for _ in range(s.batch)]
        self.mask = np.stack([ancestor_mask(np.array(tree)) for tree in parents])  # [B, T, T]
        self.mask_bools = torch.from_numpy(self.mask).to(device)
        self.past_len = torch.full((s.batch,), s.live, dtype=torch.int64, device=device)
        self.out = torch.zeros_like(self.q)
        self.scale = s.head_dim**-0.5

    def ours(self, kernels: Kernels, ctas: int = 0) -> Callable[[], None]:
        """The kernels, new rows written into the cache and the mask packed in the same call, as in an engine."""
        s = self.sizes
        args = AttentionArgs(
            dtype=DTYPES[s.dtype], batch=s.batch, nodes=s.nodes, q_heads=s.q_heads, kv_heads=s.kv_heads,
            head_dim=s.head_dim, capacity=self.capacity, scale=self.scale, ctas=ctas, q=self.q.data_ptr(),
            k=self.k.data_ptr(), v=self.v.data_ptr(), key_cache=self.keys.data_ptr(),
            value_cache=self.values.data_ptr(), mask_bools=self.mask_bools.data_ptr(),
            past_len=self.past_len.data_ptr(), out=self.out.data_ptr(),
        )  # fmt: skip
        scratch = self.torch.empty(kernels.workspace_bytes(args), dtype=self.torch.uint8, device=self.device)

        def call() -> None:
            stream = self.torch.cuda.current_stream().cuda_stream if self.device == "cuda" else 0
            kernels.attend(args, scratch.data_ptr(), scratch.nbytes, stream)

        return call

    def sdpa(self) -> Callable[[], None]:
        """PyTorch's attention over the live rows with a mask of them; the rows are in the cache already."""
        seen = self._visible()[:, None]
        keys, values = self._live()
        queries = self.q.transpose(1, 2)
        grouped = self.sizes.q_heads != self.sizes.kv_heads
        attention = self.torch.nn.functional.scaled_dot_product_attention

        def call() -> None:
            attention(queries, keys, values, seen, scale=self.scale, enable_gqa=grouped)

        return call

    def flashinfer(self) -> Callable[[], None]:
        """FlashInfer's attention of one sequence with a custom mask. Raises ImportError, or ValueError for a batch."""
        if self.sizes.batch != 1:
            raise ValueError("compared for one sequence")
        module = importlib.import_module("flashinfer")
        keys, values = (rows[0] for rows in self._live())  # [Hkv, S, D]
        seen = self._visible()[0]

        def call() -> None:
            module.single_prefill_with_kv_cache(
                self.q[0], keys, values, custom_mask=seen, kv_layout="HND", sm_scale=self.scale
            )

        return call

    def reference(self) -> Any:
        """out [B, T, Hq, D] in float32 from float32 products, a head at a time. The rows must be in the cache."""
        group = self.sizes.q_heads // self.sizes.kv_heads
        keys, values = self._live()
        hidden = ~self._visible()
        heads = []
        for head in range(self.sizes.q_heads):
            scores = self.q[:, :, head].float() @ keys[:, head // group].float().transpose(1, 2) * self.scale
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            heads.append(weights @ values[:, head // group].float())
        return self.torch.stack(heads, dim=2)

    def _live(self) -> tuple[Any, Any]:
        end = self.sizes.live + self.sizes.nodes
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _visible(self) -> Any:
        """Rows that each node sees, bool [B, T, live + T]."""
        committed = np.ones((self.sizes.batch, self.sizes.nodes, self.sizes.live), dtype=np.bool_)
        return self.torch.from_numpy(np.concatenate([committed, self.mask], axis=2)).to(self.device)
