"""Replacements for attention functions of architectures that do not use transformers' attention interface.

The rest of their modules stays. Each replacement calls the interface with the inputs of the module's own function:
queries, keys and values, the scale, a window, ALiBi's slopes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from redraft.errors import UnsupportedModelError
from redraft.export.graph.attention import INTERFACE, attend, current_positions

COMPLEX_ROTATIONS = {"Llama4TextRotaryEmbedding": ("llama4", 2), "DeepseekV2RotaryEmbedding": ("deepseek_v2", 1)}
"""For rotary modules that return complex numbers, by class: model type, and the rotated tensor's axis of heads."""
CLASS_TABLES = {
    "gptj": ("GPTJ_ATTENTION_CLASSES", "GPTJAttention"),
    "gpt_neo": ("GPT_NEO_ATTENTION_CLASSES", "GPTNeoSelfAttention"),
    "falcon": ("FALCON_ATTENTION_CLASSES", "FalconAttention"),
}
"""By model type: the table in which transformers looks up attention classes, and the class to find there."""


def register(model_type: str) -> None:
    """Let transformers build a model that looks up its attention classes by implementation."""
    if model_type == "mpt":
        _keep_masks("mpt")
    if model_type in CLASS_TABLES:
        table, name = CLASS_TABLES[model_type]
        module = _modeling(model_type)
        getattr(module, table)[INTERFACE] = getattr(module, name)


def replace(model: nn.Module) -> None:
    """Replace the attention function of every module that does not use the interface."""
    for module in model.modules():
        if type(module).__name__ in COMPLEX_ROTATIONS:
            _rotate_by_reals(module, *COMPLEX_ROTATIONS[type(module).__name__])
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            _scale_by_position(module)
        method, function = REPLACEMENTS.get(type(module).__name__, ("", None))
        if function is not None:
            setattr(module, method, MethodType(function, module))


def _scaled(self: Any, query: Any, key: Any, value: Any, attention_mask: Any = None) -> tuple[torch.Tensor, None]:
    """GPT-J and CodeGen: scores divided by `scale_attn`."""
    out, none = attend(self, query, key, value, attention_mask, scaling=1 / float(self.scale_attn))
    return out.transpose(1, 2), none


def _local(self: Any, query: Any, key: Any, value: Any, attention_mask: Any = None) -> tuple[torch.Tensor, None]:
    """GPT-Neo: scores without a scale, every second layer within a window."""
    window = self.config.window_size if self.attention_type == "local" else None
    out, none = attend(self, query, key, value, attention_mask, scaling=1.0, sliding_window=window)
    return out.transpose(1, 2), none


def _falcon(
    self: Any, hidden_states: Any, alibi: Any, attention_mask: Any, position_embeddings: Any = None, **_: Any
) -> tuple[torch.Tensor, None]:
    """Falcon with rotary embeddings; keys and values keep the heads that the checkpoint has."""
    if alibi is not None:
        raise UnsupportedModelError("falcon rounds its ALiBi biases to bfloat16, which the attention does not take")
    query, key, value = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
    repeats = key.shape[1] // self.num_kv_heads
    query, key = _modeling("falcon").apply_rotary_pos_emb(query, key[:, ::repeats], *position_embeddings)
    out, none = attend(self, query, key, value[:, ::repeats], attention_mask, scaling=self.inv_norm_factor)
    return self.dense(out.flatten(2)), none


def _bloom(
    self: Any, hidden_states: Any, residual: Any, alibi: Any, attention_mask: Any, **_: Any
) -> tuple[torch.Tensor, None]:
    """BLOOM: ALiBi."""
    slopes = _modeling("bloom")._get_alibi_slopes(self.num_heads, hidden_states.device)
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    out, none = attend(self, query, key, value, attention_mask, scaling=self.inv_norm_factor, alibi_slopes=slopes)
    return self.dense(out.flatten(2)) + residual, none


def _mpt(
    self: Any, hidden_states: Any, position_bias: Any, past_key_values: Any = None, attention_mask: Any = None, **_: Any
) -> tuple[torch.Tensor, None]:
    """MPT: ALiBi, and optionally clipped products."""
    mixed = self.Wqkv(hidden_states)
    if self.clip_qkv:
        mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = (x.unflatten(2, (self.n_heads, -1)).transpose(1, 2) for x in mixed.chunk(3, dim=2))
    biases = _modeling("mpt").build_mpt_alibi_tensor(self.n_heads, 2)[:, 0]  # for two positions: [Hq, 2]
    slopes = biases[:, 1] - biases[:, 0]
    out, none = attend(self, query, key, value, attention_mask, scaling=self.softmax_scale, alibi_slopes=slopes)
    return self.out_proj(out.flatten(2)), none


class _Mask:
    """A mask for the interface that stays unchanged when the model converts masks to booleans."""

    def __init__(self, mask: Any) -> None:
        self._mask = mask

    def to(self, dtype: torch.dtype) -> Any:
        """Return the mask unchanged."""
        return self._mask


def _keep_masks(model_type: str) -> None:
    """Let a model that converts its mask pass on the interface's mask."""
    modeling = _modeling(model_type)
    create_mask = modeling.create_causal_mask
    if getattr(create_mask, "keeps_masks", False):
        return

    def create_causal_mask(config: Any, **arguments: Any) -> Any:
        mask = create_mask(config=config, **arguments)
        return _Mask(mask) if config._attn_implementation == INTERFACE else mask

    create_causal_mask.keeps_masks = True  # type: ignore[attr-defined]
    modeling.create_causal_mask = create_causal_mask


def _rotate_by_reals(module: Any, model_type: str, heads_axis: int) -> None:
    """Rotate by pairs of cosine and sine instead of complex numbers, which ONNX does not have."""
    modeling = _modeling(model_type)
    complex_rotation = modeling.apply_rotary_emb

    def turns(x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        angles = position_ids[..., None].float() * module.inv_freq.float()
        turn: torch.Tensor = torch.stack([angles.cos(), angles.sin()], -1) * module.attention_scaling
        return turn  # [B, T, D / 2, 2]

    def rotate(query: torch.Tensor, key: torch.Tensor, turn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if turn.is_complex():
            rotated: tuple[torch.Tensor, torch.Tensor] = complex_rotation(query, key, turn)
            return rotated
        turn = turn.unsqueeze(heads_axis)
        return _turned(query, turn), _turned(key, turn)

    module.forward = turns
    if not getattr(complex_rotation, "takes_reals", False):
        rotate.takes_reals = True  # type: ignore[attr-defined]
        modeling.apply_rotary_emb = rotate


def _turned(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of neighbouring components of x [B, T, H, D] or [B, H, T, D] by `turn` [B, T, 1, D / 2, 2]."""
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = turn.unbind(-1)
    return torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2).to(x.dtype)


def _scale_by_position(module: Any) -> None:
    """Let Llama 4's layers without rotary embedding scale queries by the given positions, not by their own count.

    The scale of a position p is 1 + attn_scale * log(1 + floor((p + 1) / floor_scale)).
    """
    module.attn_temperature_tuning = False
    queries = module.q_proj.forward

    def scaled(x: torch.Tensor) -> torch.Tensor:
        steps = torch.floor((current_positions(x).float() + 1.0) / module.floor_scale)
        scales = torch.log1p(steps) * module.attn_scale + 1.0
        tuned: torch.Tensor = queries(x) * scales[..., None].to(x.dtype)
        return tuned

    module.q_proj.forward = scaled


REPLACEMENTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "GPTJAttention": ("_attn", _scaled),
    "CodeGenAttention": ("_attn", _scaled),
    "GPTNeoSelfAttention": ("_attn", _local),
    "FalconAttention": ("forward", _falcon),
    "BloomAttention": ("forward", _bloom),
    "MptAttention": ("forward", _mpt),
}
"""The method to replace and its replacement, by class."""


def _modeling(model_type: str) -> Any:
    return importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
