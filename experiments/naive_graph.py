"""The baseline graph: transformers' own modules, traced unchanged, over TensorScatter and Attention (opset 24).

No product is joined, no norm or rotary embedding is one operator, and attention reads the whole buffer, like a
straightforward export. Only measurements use it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from onnxscript.onnx_opset import opset24 as op
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface

NAME = "redraft_naive"


@torch.library.custom_op("redraft_bench::naive_attention", mutates_args=())
def naive_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cache_len: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention over buffers that get the new rows at `cache_len`: query [B, Hq, T, D], mask [B, 1, T, C]."""
    rows = cache_len[:, None] + torch.arange(key.shape[2])
    keys, values = key_cache.clone(), value_cache.clone()
    for sequence, targets in enumerate(rows):
        keys[sequence, :, targets], values[sequence, :, targets] = key[sequence], value[sequence]
    out = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return out, keys, values


@naive_attention.register_fake
def _(query, key, value, key_cache, value_cache, cache_len, mask, scale):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return torch.empty_like(query), torch.empty_like(key_cache), torch.empty_like(value_cache)


def _lower(query, key, value, key_cache, value_cache, cache_len, mask, scale: float):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    keys = op.TensorScatter(key_cache, key, cache_len, axis=2)
    values = op.TensorScatter(value_cache, value, cache_len, axis=2)
    out, _, _, _ = op.Attention(query, keys, values, mask, scale=scale)
    return out, keys, values


class _Verifier(torch.nn.Module):
    """Buffers in, buffers out: `caches` alternate key and value by layer."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        cache_len: torch.Tensor,
        mask: torch.Tensor,
        caches: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        updated: list[torch.Tensor] = []

        def attend(module: Any, query: Any, key: Any, value: Any, _mask: Any, scaling: float, **_: Any) -> Any:
            layer = 2 * module.layer_idx
            out, keys, values = naive_attention(
                query, key, value, caches[layer], caches[layer + 1], cache_len, mask, scaling
            )
            updated.extend((keys, values))
            return out.transpose(1, 2).contiguous(), None

        AttentionInterface.register(NAME, attend)
        states = self.model.model(input_ids=token_ids, position_ids=positions, use_cache=False).last_hidden_state
        return self.model.lm_head(states), states, *updated


def export_naive(checkpoint: Path, out: Path, capacity: int) -> None:
    """Write the graph for one sequence to `out`, weights next to it."""
    AttentionInterface.register(NAME, lambda *_: None)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation=NAME, dtype=torch.float32).eval()
    config, nodes = model.config, 4
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    caches = [torch.zeros(1, heads, capacity, size) for _ in range(2 * layers)]
    mask = torch.ones(1, 1, nodes, capacity, dtype=torch.bool)
    arguments = (torch.ones(1, nodes, dtype=torch.long), torch.arange(nodes)[None], torch.zeros(1, dtype=torch.long))
    count = torch.export.Dim("T", min=1, max=capacity)
    program = torch.onnx.export(
        _Verifier(model).eval(),
        (*arguments, mask, caches),
        dynamo=True,
        opset_version=24,
        dynamic_shapes=({1: count}, {1: count}, None, {2: count}, [None] * len(caches)),
        custom_translation_table={torch.ops.redraft_bench.naive_attention.default: _lower},
        verbose=False,
    )
    assert program is not None
    program.save(str(out), external_data=True)
