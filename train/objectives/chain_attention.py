"""Attention of many drafts of a text at once: each reads the text's rows up to its start, and its own later rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from redraft.export.drafters.layer import LayerConfig


class ChainAttention:
    """Attention of parallel chains: call it once a step, in order. `redraft.export.drafters.layer` has the shapes.

    Step 0 computes all L rows of a text. Later steps have only the S rows of chains that start at `starts` [B, S].
    """

    def __init__(self, config: LayerConfig, starts: torch.Tensor) -> None:
        self._config, self._starts = config, starts
        self._keys: list[torch.Tensor] = []  # a step's rows, [B, Hq, L or S, D], key heads repeated
        self._values: list[torch.Tensor] = []

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend for one step's rows."""
        config = self._config
        q = q.unflatten(-1, (config.heads, config.head_dim)).transpose(1, 2)
        k, v = (
            x.unflatten(-1, (config.kv_heads, config.head_dim))
            .transpose(1, 2)
            .repeat_interleave(config.heads // config.kv_heads, dim=1)
            for x in (k, v)
        )
        self._keys.append(k)
        self._values.append(v)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True) if len(self._keys) == 1 else self._later(q)
        return out.transpose(1, 2).flatten(-2)

    def _later(self, q: torch.Tensor) -> torch.Tensor:
        scale = self._config.head_dim**-0.5
        rows = self._keys[0].shape[2]
        hidden = torch.arange(rows, device=q.device) > self._starts[:, None, :, None]  # [B, 1, S, L]
        first = (q @ self._keys[0].mT * scale).masked_fill(hidden, float("-inf"))  # [B, Hq, S, L]
        own = [(q * k).sum(-1, keepdim=True) * scale for k in self._keys[1:]]  # [B, Hq, S, 1] each
        weights = torch.cat([first, *own], dim=-1).softmax(-1)
        out = weights[..., :rows].to(q.dtype) @ self._values[0]
        for step, value in enumerate(self._values[1:]):
            out = out + weights[..., rows + step, None].to(q.dtype) * value
        return out
