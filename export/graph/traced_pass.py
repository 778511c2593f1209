"""The forward pass that torch traces: each attention call becomes a `redraft::TreeAttention` over the KV buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from redraft.errors import UnsupportedModelError
from redraft.export.graph.attention import CURRENT, POSITION_STEP, AttentionCall, LayerAttention


@dataclass
class TracedPass:
    """A forward pass whose attention calls become operators, over the KV buffers of its inputs.

    layers: attention of each layer.   order: number of a layer by the identity of its module.
    output_rows: rows that the head computes, if the pass has a head.
    """

    layers: Sequence[LayerAttention]
    order: Mapping[int, int]
    tree_mask: torch.Tensor
    positions: torch.Tensor
    cache_len: torch.Tensor
    kv_len: torch.Tensor
    caches: list[torch.Tensor]
    output_rows: torch.Tensor | None = None
    presents: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    features: dict[str, torch.Tensor] = field(default_factory=dict)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within the context, the model's calls go to this pass."""
        token = CURRENT.set(self)
        try:
            yield
        finally:
            CURRENT.reset(token)

    def mask(self, mask_function: Callable[..., Any]) -> Any:
        """Return None: the operator's attributes describe a layer's mask."""
        return None

    def positions_of(self, like: torch.Tensor) -> torch.Tensor:
        """Return the graph's input of positions."""
        return self.positions

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the operator's node, with heads padded to the size of the KV buffers."""
        if id(call.module) not in self.order:
            raise UnsupportedModelError(f"{call.name} attends in some calls and not in others")
        layer = self.order[id(call.module)]
        key_cache, value_cache = self.caches[2 * layer : 2 * layer + 2]
        _, kv_heads, _, head_dim = key_cache.shape
        batch, q_heads, nodes, _ = call.query.shape
        query, key = _with_positions(call, self.positions) if call.slopes is not None else (call.query, call.key)
        key, value = (_repeated(x, kv_heads // x.shape[1]) for x in (key, call.value))
        flat = [_padded(x, head_dim).transpose(1, 2).reshape(batch, nodes, -1) for x in (query, key, value)]
        mask, sinks = self.layers[layer].mask, call.sinks
        if sinks is None and any(other.sinks for other in self.layers):
            sinks = query.new_full((q_heads,), torch.finfo(query.dtype).min)  # a sink without weight
        out, *present = torch.ops.redraft.tree_attention(
            *flat, key_cache, value_cache, self.tree_mask, self.positions, self.cache_len, self.kv_len, sinks,
            call.scaling, call.softcap, mask.window, mask.chunk, q_heads, kv_heads,
        )  # fmt: skip
        self.presents[layer] = (present[0], present[1])
        attended: torch.Tensor = out.view(batch, nodes, q_heads, head_dim)
        return attended if head_dim == call.value.shape[-1] else attended[..., : call.value.shape[-1]]


def _repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    """Repeat each head of x [B, H, T, D] `times` times."""
    return x if times == 1 else x.repeat_interleave(times, dim=1)


def _padded(x: torch.Tensor, size: int) -> torch.Tensor:
    """Pad the heads of x [B, H, T, D] to `size` with zeros."""
    return x if x.shape[-1] == size else nn.functional.pad(x, (0, size - x.shape[-1]))


def _with_positions(call: AttentionCall, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return query and key with two more components, whose product is ALiBi's bias: slope times the key's position.

    ALiBi (arXiv 2108.12409, section 3) subtracts slope times the distance. The query's part of the distance is equal
    for all keys of a row and cancels in the softmax.
    """
    assert call.slopes is not None
    query, key = call.query, call.key
    slopes = (call.slopes / call.scaling).to(query.dtype).view(1, -1, 1, 1).expand(*query.shape[:3], 1)
    steps, rest = positions // POSITION_STEP, positions % POSITION_STEP
    places = torch.stack([steps, rest], -1)[:, None].to(key.dtype).expand(-1, key.shape[1], -1, -1)
    return torch.cat([query, slopes * POSITION_STEP, slopes], -1), torch.cat([key, places], -1)
