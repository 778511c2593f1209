"""The multi-token-prediction module of a verifier as a drafter (DeepSeek-V3, section 2.2, equations 21 to 23).

With f the verifier's hidden state after its final norm, E its embedding and M its head:

    h_1 = Layer(P [RMSNorm(f_t) ; RMSNorm(E(x_{t+1}))])              rows of real features are the keys
    y_i = argmax M h_i,   h_{i+1} = Layer(P [RMSNorm(h_i) ; RMSNorm(E(y_i))])
"""

from __future__ import annotations

import torch
from torch import nn

from redraft.export.drafters.layer import Attend, DrafterLayer, Keep, LayerConfig, all_rows


class MtpDrafter(nn.Module):
    """The module's own parameters. Embedding and head belong to the verifier."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        n = config.hidden_size
        self.config = config
        self.hidden_norm = nn.RMSNorm(n, eps=config.rms_norm_eps)
        self.embedding_norm = nn.RMSNorm(n, eps=config.rms_norm_eps)
        self.projection = nn.Linear(2 * n, n, bias=False)
        self.layer = DrafterLayer(config)
        self.norm = nn.RMSNorm(n, eps=config.rms_norm_eps)

    def forward(
        self, hidden: torch.Tensor, embeddings: torch.Tensor, positions: torch.Tensor, attend: Attend,
        keep: Keep = all_rows,
    ) -> torch.Tensor:  # fmt: skip
        """Return the next hidden states from states [B, T, n] at `positions` and embeddings of the next tokens."""
        fused = self.projection(torch.cat([self.hidden_norm(hidden), self.embedding_norm(embeddings)], dim=-1))
        out: torch.Tensor = self.norm(self.layer(fused, positions, attend, keep))
        return out

    def readout(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the head reads of hidden states: themselves."""
        return hidden
