"""Heads on a trunk as a direct loop over positions, attention heads and tokens, written from the paper."""

from __future__ import annotations

import torch

from redraft.export.drafters.multi_head import MultiHeadConfig, MultiHeadDrafter

from .tiny import randomized


def random_heads(config: MultiHeadConfig, seed: int = 3) -> MultiHeadDrafter:
    """Random heads, as they are stored."""
    return randomized(lambda: MultiHeadDrafter(config), seed)


def head_logits(module: MultiHeadDrafter, head: int, trunk: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """The logits [H] of one head after trunk states [T, n], by the verifier's head, a matrix [H, n]."""
    config = module.config
    weights = {
        name.removeprefix(f"layers.{head}.").removesuffix(".weight"): tensor
        for name, tensor in module.state_dict(keep_vars=True).items()
        if name.startswith((f"layers.{head}.", "norm."))
    }
    place, group, size = len(trunk) - 1, config.heads // config.kv_heads, config.head_dim
    x = trunk[place]
    attended = []
    for number in range(config.heads):
        key_rows = slice(number // group * size, (number // group + 1) * size)
        q = turned(weights["q_proj"][number * size : (number + 1) * size] @ normed(x, weights["input_norm"]), place)
        scores, values = [], []
        for earlier in range(len(trunk)):
            row = normed(trunk[earlier], weights["input_norm"])
            scores.append(q @ turned(weights["k_proj"][key_rows] @ row, earlier) / size**0.5)
            values.append(weights["v_proj"][key_rows] @ row)
        shares = torch.stack(scores).softmax(0)
        attended.append(sum(share * value for share, value in zip(shares, values, strict=True)))
    x = x + weights["o_proj"] @ torch.cat(attended)
    row = normed(x, weights["mlp_norm"])
    gate = weights["gate_proj"] @ row
    x = x + weights["down_proj"] @ (gate * torch.sigmoid(gate) * (weights["up_proj"] @ row))
    found: torch.Tensor = matrix @ normed(x, weights["norm"]) * config.logit_scale
    return found


def normed(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """RMSNorm with the epsilon of these tests."""
    return x / (x.square().mean() + 1e-5).sqrt() * gain


def turned(x: torch.Tensor, place: int) -> torch.Tensor:
    """A head's vector [D], rotated for a position: pairs are a half apart."""
    half = len(x) // 2
    angles = place * 10000.0 ** (-torch.arange(half) / half)
    first, second = x[:half], x[half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()])
