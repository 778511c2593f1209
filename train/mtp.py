"""The depth-1 multi-token-prediction module of DeepSeek-V3 (section 2.2, equations 21 to 23).

    h'_t = M [RMSNorm(h_t) ; RMSNorm(E(x_{t+1}))]        M: 2n -> n
    h1_t = DecoderLayer(h')_t                            causal over t
    p(x_{t+2}) = softmax(E RMSNorm(h1_t))                embedding and head shared with the verifier

`h_t` is the verifier's hidden state after its final norm. Exported verifiers give it as `last`.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding


class MtpModule(nn.Module):
    """Predicts the token after next. Embedding and head belong to the verifier, so they are not parameters here."""

    def __init__(self, config: LlamaConfig) -> None:
        """`config` is the verifier's."""
        super().__init__()
        config = copy.deepcopy(config)
        config._attn_implementation = "sdpa"  # causal without a mask, unlike eager attention
        n = config.hidden_size
        self.hidden_norm = LlamaRMSNorm(n, eps=config.rms_norm_eps)
        self.embedding_norm = LlamaRMSNorm(n, eps=config.rms_norm_eps)
        self.projection = nn.Linear(2 * n, n, bias=False)
        self.layer = LlamaDecoderLayer(config, layer_idx=0)
        self.norm = LlamaRMSNorm(n, eps=config.rms_norm_eps)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, hidden: torch.Tensor, next_embeddings: torch.Tensor) -> torch.Tensor:
        """Return hidden states for x_{t+2}, from hidden states of x_t and embeddings of x_{t+1}, [B, T, n] each."""
        joined = torch.cat([self.hidden_norm(hidden), self.embedding_norm(next_embeddings)], dim=-1)  # [B, T, 2n]
        states = self.projection(joined)
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        states = self.layer(
            states, attention_mask=None, position_ids=positions, position_embeddings=self.rotary(states, positions)
        )
        return self.norm(states)  # type: ignore[no-any-return]
