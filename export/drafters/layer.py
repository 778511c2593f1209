"""The decoder layer that drafters share: Llama's form, with attention and rotation given by the caller.

Training attends in torch over many drafts at once. An exported graph attends through `redraft::TreeAttention`. The
weights and all other operations are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from redraft.errors import CheckpointError
from redraft.export.checkpoint import model_config
from redraft.export.checkpoint.model_config import decoder_shape

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""q [B, T, Hq * D], k and v [B, T, Hkv * D], q and k rotated -> [B, T, Hq * D]."""

Keep = Callable[[torch.Tensor], torch.Tensor]
"""Rows [B, T, n] -> the selected rows, [B, R, n]."""


def all_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return all rows."""
    return rows


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """The fields that every drafter's configuration has. `hidden_size` and `vocab_size` are the verifier's.

    draft_logit_scale: factor on the drafter's logits and token information when it builds trees for a greedy
    verifier, measured after training.
    logit_scale:       the verifier multiplies its logits by this.
    draft_vocab_size:  tokens that the drafter can draft; 0 means the whole vocabulary.
    """

    hidden_size: int
    vocab_size: int
    draft_logit_scale: float = 1.0
    logit_scale: float = 1.0
    draft_vocab_size: int = 0

    @property
    def draft_size(self) -> int:
        """Columns of the drafter's logits."""
        return self.draft_vocab_size or self.vocab_size

    def limited(self, tokens: int | None) -> int:
        """Return the size of the draft vocabulary in graphs that can draft at most `tokens` tokens; None: no limit."""
        return min(tokens or self.draft_size, self.draft_size)

    def __post_init__(self) -> None:
        if not 0 <= self.draft_vocab_size <= self.vocab_size:
            raise CheckpointError(
                f"draft_vocab_size must be from 0 to {self.vocab_size}, the vocabulary, not {self.draft_vocab_size}"
            )
        if min(self.hidden_size, self.vocab_size) < 1:
            raise CheckpointError(f"a drafter's sizes must be positive: {self}")
        for name, scale in (("logit_scale", self.logit_scale), ("draft_logit_scale", self.draft_logit_scale)):
            if not 0 < scale < math.inf:
                raise CheckpointError(f"{name} must be positive, not {scale}")


@dataclass(frozen=True, kw_only=True)
class LayerConfig(DrafterConfig):
    """Shape of a drafter's own layer, next to the fields of every drafter.

    qkv_bias: True for biases of queries, keys and values, as Qwen2 has.
    """

    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.intermediate_size, self.heads, self.kv_heads) < 1:
            raise CheckpointError(f"a drafter's sizes must be positive: {self}")
        if self.heads % self.kv_heads or self.head_dim % 2 or self.head_dim < 2:
            raise CheckpointError(
                f"{self.heads} heads of {self.head_dim} over {self.kv_heads} key/value heads: expected a multiple of "
                "the key/value heads and an even head size"
            )


def verifier_sizes(verifier: Any, vocab_size: int) -> dict[str, Any]:
    """Return the fields of a LayerConfig with the sizes of a verifier of this transformers configuration."""
    shape = decoder_shape(verifier)
    return dict(
        hidden_size=shape.hidden,
        vocab_size=vocab_size,
        intermediate_size=int(getattr(verifier, "intermediate_size", None) or 4 * shape.hidden),
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rope_theta=model_config.rope_theta(verifier),
        rms_norm_eps=model_config.norm_eps(verifier),
        logit_scale=model_config.logit_scale(verifier),
    )


L = TypeVar("L", bound=LayerConfig)


def with_sizes(cls: type[L], verifier: Any, vocab_size: int, **own: Any) -> L:
    """Return a drafter's configuration: the sizes of a verifier of this transformers configuration, and `own`.

    A size of 0 in `own` is the verifier's.
    """
    sizes = verifier_sizes(verifier, vocab_size)
    return cls(**{**sizes, **{name: value or sizes.get(name, value) for name, value in own.items()}})


_NAMES = {"input_layernorm": "input_norm", "post_attention_layernorm": "mlp_norm", "self_attn.": "", "mlp.": ""}


def renamed(name: str) -> str:
    """Return a parameter's name in a drafter's layer, from its name in transformers' Llama layer."""
    for old, new in _NAMES.items():
        name = name.replace(old, new)
    return name


class Rotary(nn.Module):
    """Rotates halves of each head by its position (RoFormer, §3.2.2), in torch; graphs put an operator here."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.head_dim, self.theta = config.head_dim, config.rope_theta

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of `positions` [...], each [..., D / 2]."""
        exponents = torch.arange(0, self.head_dim, 2, device=positions.device).float() / self.head_dim
        angles = positions[..., None].float() * self.theta**-exponents
        return angles.cos(), angles.sin()

    def forward(self, x: torch.Tensor, positions: torch.Tensor, heads: int) -> torch.Tensor:
        """Rotate x [B, T, heads * D] at `positions` [B, T] or [T]."""
        cos, sin = (t.unsqueeze(-2) for t in self.tables(positions))  # [.., T, 1, D / 2]
        first, second = x.unflatten(-1, (heads, self.head_dim)).chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)


class DrafterLayer(nn.Module):
    """x + attention(norm(x)), then + SwiGLU(norm(.)), for rows [B, T, n] at positions [B, T].

    inputs: numbers of a row that attention reads; 0 is n. The residual x then has its own value.
    input_norm: False if attention reads the rows as they are.
    outputs: rows of n that SwiGLU returns side by side, each added to a copy of its residual.
    """

    def __init__(self, config: LayerConfig, inputs: int = 0, input_norm: bool = True, outputs: int = 1) -> None:
        super().__init__()
        n, width = config.hidden_size, config.heads * config.head_dim
        kv_width, inputs = config.kv_heads * config.head_dim, inputs or config.hidden_size
        self.config, self.outputs = config, outputs
        self.input_norm = nn.RMSNorm(inputs, eps=config.rms_norm_eps) if input_norm else None
        self.q_proj = nn.Linear(inputs, width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(inputs, kv_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(inputs, kv_width, bias=config.qkv_bias)
        for product in (self.q_proj, self.k_proj, self.v_proj):
            if product.bias is not None:  # zero, so that a start from a layer without biases is that layer
                nn.init.zeros_(product.bias)
        self.o_proj = nn.Linear(width, n, bias=False)
        self.mlp_norm = nn.RMSNorm(n, eps=config.rms_norm_eps)
        self.gate_proj = nn.Linear(n, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(n, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, outputs * n, bias=False)
        self.rotary = Rotary(config)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, attend: Attend, keep: Keep = all_rows,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Compute the layer. Every row is a key. Only the rows that `keep` selects continue after attention.

        x: [B, T, inputs].   residual: [B, T, n]; None is x.
        """
        q, k, v = self.read(x)
        q = self.rotary(q, positions, self.config.heads)
        k = self.rotary(k, positions, self.config.kv_heads)
        return self.write(keep(x if residual is None else residual), keep(attend(q, k, v)))

    def read(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the queries, keys and values of rows [B, T, inputs], not rotated yet."""
        return self.project(x if self.input_norm is None else self.input_norm(x))

    def project(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the products of `read`, of rows after the norm."""
        return self.q_proj(normed), self.k_proj(normed), self.v_proj(normed)

    def write(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return the output of rows from their residual [B, R, n] and what they attended to, [B, R, Hq * D].

        It is [B, R, outputs * n].
        """
        x = residual + self.o_proj(attended)
        normed = self.mlp_norm(x)
        copies = torch.cat([x] * self.outputs, dim=-1) if self.outputs > 1 else x
        out: torch.Tensor = copies + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))
        return out
