"""The depth-1 multi-token-prediction module of DeepSeek-V3 (section 2.2, equations 21 to 23).

    h'_t = M [RMSNorm(h_t) ; RMSNorm(E(x_{t+1}))]        M: 2n -> n
    h1_t = DecoderLayer(h')_t                            causal over t
    p(x_{t+2}) = softmax(E RMSNorm(h1_t))                embedding and head shared with the verifier

`h_t` is the verifier's hidden state after its final norm. Exported verifiers give it as `last`.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from redraft.errors import CheckpointError

MTP_FILE = "mtp.safetensors"
MTP_KEY = "redraft_mtp"
"""In a checkpoint's config.json: names the module's file."""


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


def load_mtp(folder: Path) -> MtpModule:
    """Return the module of a checkpoint, in fp32. Raises CheckpointError if it has none."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(folder))
    named = getattr(config, MTP_KEY, None)
    if not named or not (folder / named["file"]).exists():
        raise CheckpointError(f"{folder} has no multi-token-prediction module", f"publish it with a {MTP_FILE}")
    module = MtpModule(config)
    module.load_state_dict({name: t.float() for name, t in load_file(str(folder / named["file"])).items()})
    return module.eval()
