"""KV of many rows that are written together, and attention that reads it without repeating key heads.

The layers keep their rows in buffers with spare positions, because a new buffer for every token costs as much as the
attention itself. With one query row, the query heads of a key head are rows of one product: no key head is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "redraft_batched"
"""Name of the attention, for `set_attn_implementation`."""
_SPARE = 64


class _Layer(DynamicLayer):
    """A layer's keys and values [R, Hkv, positions, D], as views of buffers that grow by `_SPARE` positions."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append rows. Returns all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._buffers = (key_states[:, :, :0], value_states[:, :, :0])
            self._length = 0
        end = self._length + key_states.shape[2]
        if end > self._buffers[0].shape[2]:
            keys, values = self._buffers
            self._buffers = self._grown(keys, end + _SPARE), self._grown(values, end + _SPARE)
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, self._length : end] = states
        self._length = end
        self.keys, self.values = self.held
        return self.held

    @property
    def held(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all positions."""
        keys, values = (buffer[:, :, : self._length] for buffer in self._buffers)
        return keys, values

    def _grown(self, buffer: torch.Tensor, positions: int) -> torch.Tensor:
        rows, heads, _, width = buffer.shape
        grown = buffer.new_empty(rows, heads, positions, width)
        grown[:, :, : self._length] = buffer[:, :, : self._length]
        return grown

    def select(self, rows: torch.Tensor) -> None:
        """Keep only these rows."""
        keys, values = self._buffers
        self._buffers = keys.index_select(0, rows), values.index_select(0, rows)
        self.keys, self.values = self.held


class BatchedCache(Cache):
    """A cache for full attention in every layer."""

    def __init__(self, layers: int) -> None:
        self.growing = [_Layer() for _ in range(layers)]  # type: ignore[no-untyped-call]
        super().__init__(layers=[*self.growing])

    def select(self, rows: torch.Tensor) -> None:
        """Keep only these rows of the batch."""
        for layer in self.growing:
            layer.select(rows)

    def join(self, parts: Sequence[BatchedCache]) -> None:
        """Take the rows of several caches, in order. This cache must be empty."""
        for index, layer in enumerate(self.growing):
            held = [part.growing[index].held for part in parts]
            layer.update(torch.cat([keys for keys, _ in held]), torch.cat([values for _, values in held]))


def _attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, scaling: float | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attend as `sdpa` does. One unmasked query row [R, Hq, 1, D] takes the product without repeated heads."""
    rows, heads, length, width = query.shape
    if length > 1 or attention_mask is not None:
        found = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return found[0], None
    grouped = query.reshape(rows, key.shape[1], -1, width)  # [R, Hkv, Hq / Hkv, D]
    out = F.scaled_dot_product_attention(grouped, key, value, scale=scaling)
    return out.reshape(rows, 1, heads, -1), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
