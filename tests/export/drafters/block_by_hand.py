"""The forward pass of DFlash, JetSpec and DSpark for one block, head by head, from their papers and published modules.

It reads the names and shapes of their checkpoints: z-lab/dflash and hao-ai-lab/JetSpec `DFlashDraftModel`,
deepseek-ai/DeepSpec `Qwen3DSparkModel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a module's layers. Head norms and biases count if the checkpoint has them."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = False
    theta: float = 10000.0
    eps: float = 1e-5


def block_states(w: Tensors, sizes: Sizes, features: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """The states [R, n] of a block's embeddings [R, n] after context [T, n of all hidden states]."""
    context = normed(features @ w["fc.weight"].T, w["hidden_norm.weight"], sizes.eps)
    x = block
    for number in range(sizes.layers):
        layer = {name.removeprefix(f"layers.{number}."): tensor for name, tensor in w.items()}
        x = x + _attended(layer, sizes, context, normed(x, layer["input_layernorm.weight"], sizes.eps))
        rows = normed(x, layer["post_attention_layernorm.weight"], sizes.eps)
        gate = rows @ layer["mlp.gate_proj.weight"].T
        up = rows @ layer["mlp.up_proj.weight"].T
        x = x + (gate / (1 + (-gate).exp()) * up) @ layer["mlp.down_proj.weight"].T
    return normed(x, w["norm.weight"], sizes.eps)


def _attended(w: Tensors, sizes: Sizes, context: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """What the block's rows attend to: all context, and their block."""
    every, begin = torch.cat([context, rows]), len(context)
    parts = []
    for head in range(sizes.heads):
        group = head // (sizes.heads // sizes.kv_heads)
        q, k, v = (
            _projected(w, kind, place, sizes, read)
            for kind, place, read in (("q", head, rows), ("k", group, every), ("v", group, every))
        )
        scores = _turned(q, begin, sizes) @ _turned(k, 0, sizes).T / sizes.head_dim**0.5
        if sizes.causal:
            scores = scores.masked_fill(torch.arange(len(every)) > begin + torch.arange(len(rows))[:, None], -torch.inf)
        parts.append(scores.softmax(-1) @ v)
    return torch.cat(parts, dim=-1) @ w["self_attn.o_proj.weight"].T


def _projected(w: Tensors, kind: str, head: int, sizes: Sizes, rows: torch.Tensor) -> torch.Tensor:
    own = slice(head * sizes.head_dim, (head + 1) * sizes.head_dim)
    out = rows @ w[f"self_attn.{kind}_proj.weight"][own].T
    if f"self_attn.{kind}_proj.bias" in w:
        out = out + w[f"self_attn.{kind}_proj.bias"][own]
    gain = w.get(f"self_attn.{kind}_norm.weight")
    return out if gain is None else normed(out, gain, sizes.eps)


def _turned(x: torch.Tensor, first: int, sizes: Sizes) -> torch.Tensor:
    """Rows of one head, rotated for positions from `first` on: pairs are a half apart."""
    half = sizes.head_dim // 2
    angles = (first + torch.arange(len(x)))[:, None] * sizes.theta ** (-torch.arange(half) / half)
    one, two = x[:, :half], x[:, half:]
    return torch.cat([one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()], dim=-1)


def normed(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of the last axis."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain


def token_bias(w: Tensors, token: int) -> torch.Tensor:
    """DSpark's bias W_2 W_1[token] of the next token's logits, [V]."""
    return w["markov_head.markov_w2.weight"] @ w["markov_head.markov_w1.weight"][token]


def chance(w: Tensors, state: torch.Tensor, token: int) -> torch.Tensor:
    """DSpark's confidence in the token that is drafted at a row with this state, after `token`."""
    read = torch.cat([state, w["markov_head.markov_w1.weight"][token]])
    return torch.sigmoid(w["confidence_head.proj.weight"][0] @ read + w["confidence_head.proj.bias"][0])


def sizes_of(config: Any) -> Sizes:
    """The sizes of our configuration."""
    return Sizes(
        config.layers, config.heads, config.kv_heads, config.head_dim, config.causal, config.rope_theta,
        config.rms_norm_eps,
    )  # fmt: skip
