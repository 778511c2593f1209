"""Medusa's heads as a torch module (Cai et al. 2024, section 2.1.1), with the verifier's own head for all of them.

With h the verifier's last hidden state at a position and M its head, head k has the logits M (h + SiLU(W_k h + b_k)).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from redraft.export.checkpoint import model_config
from redraft.export.checkpoint.model_config import decoder_shape
from redraft.export.drafters.layer import DrafterConfig
from redraft.export.drafters.static_tree import Accuracies, check_heads


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(DrafterConfig):
    """A drafter's configuration.

    heads: number of heads.
    rank_accuracies: how often the candidate of a rank is the verifier's token, by head and rank; measured after
           training.
    """

    heads: int = 4
    rank_accuracies: Accuracies = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heads("heads", self.heads, self.rank_accuracies)


def configuration_of(verifier: Any, vocab_size: int, **own: Any) -> MedusaConfig:
    """Return a drafter's configuration for a verifier of this transformers configuration, with the fields in `own`."""
    return MedusaConfig(
        hidden_size=decoder_shape(verifier).hidden, vocab_size=vocab_size,
        logit_scale=model_config.logit_scale(verifier), **own,
    )  # fmt: skip


class MedusaHeads(nn.Module):
    """W and b of all heads, in one product. They begin at zero, so each head begins as the verifier's own."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        self.heads = nn.Linear(config.hidden_size, config.heads * config.hidden_size)
        nn.init.zeros_(self.heads.weight)
        nn.init.zeros_(self.heads.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the states of all heads [..., K, n], which the verifier's head reads, of hidden states [..., n]."""
        added = F.silu(self.heads(hidden)).unflatten(-1, (self.config.heads, -1))
        out: torch.Tensor = hidden.unsqueeze(-2) + added
        return out
