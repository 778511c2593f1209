"""Lyanna's drafter: a chain of predicted hidden states, and token information added to their logits.

Chen et al., "Make Every Draft Count: Hidden State based Speculative Decoding". With f the verifier's hidden state after
its final norm, E its embedding and M its head:

    h_1 = Layer(h_0 ⊕ E(t_1)),  h_{i+1} = Layer(h_i)              §4.1, h_0 = f; rows of real features are the keys
    l_i = M h_i                                                     §4.2, one product for the whole chain
    l'_i = l_i + RMSNorm(E'(t_i)),  E'(t) = W2 W1 E(t)              §4.1 and §5.1

Logits are over the H tokens of the draft vocabulary, which may be all V: M and W2 have their rows only.

The paper does not define ⊕. Here it is a projection of both inputs, each normalized: P [RMSNorm(h_0) ;
RMSNorm(E(t_1))]. The chain normalizes its states before and after each step, so that h_i has the scale of f.
With `chain_projection`, h_i passes a second projection before the layer, which thus gets inputs of the same kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from redraft.errors import CheckpointError
from redraft.export.drafters.layer import Attend, DrafterLayer, Keep, LayerConfig, all_rows, with_sizes


@dataclass(frozen=True)
class LyannaConfig(LayerConfig):
    """Configuration of a drafter: the layer's shape, and these fields.

    rank:         d of W1 [n, d] and W2 [d, H].   steps: hidden states of a chain, N.
    first_token, token_info: False for the ablations of Table 1.
    chain_projection: project a chain's own states before the layer.
    """

    rank: int = 64
    steps: int = 4
    first_token: bool = True
    token_info: bool = True
    chain_projection: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.rank, self.steps) < 1:
            raise CheckpointError(f"a drafter's rank and steps must be positive, not {self.rank} and {self.steps}")


def configuration_of(verifier: Any, vocab_size: int, **own: Any) -> LyannaConfig:
    """Return a drafter's configuration: see `with_sizes`."""
    return with_sizes(LyannaConfig, verifier, vocab_size, **own)


class TokenInfo(nn.Module):
    """RMSNorm(W2 W1 E(t)): the numbers that a token adds to the next token's logits."""

    def __init__(self, config: LyannaConfig) -> None:
        super().__init__()
        self.down = nn.Linear(config.hidden_size, config.rank, bias=False)
        self.up = nn.Linear(config.rank, config.draft_size, bias=False)
        self.norm = nn.RMSNorm(config.draft_size, eps=config.rms_norm_eps)

    def forward(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Return the numbers that tokens of these embeddings [..., n] add to logits, [..., H]."""
        added: torch.Tensor = self.norm(self.up(self.down(embeddings)))
        return added


class LyannaDrafter(nn.Module):
    """The trained parameters. Embedding and head belong to the verifier."""

    def __init__(self, config: LyannaConfig) -> None:
        super().__init__()
        n = config.hidden_size
        self.config = config
        self.hidden_norm = nn.RMSNorm(n, eps=config.rms_norm_eps)
        self.embedding_norm = nn.RMSNorm(n, eps=config.rms_norm_eps) if config.first_token else None
        self.projection = nn.Linear(2 * n if config.first_token else n, n, bias=False)
        self.chain_norm = nn.RMSNorm(n, eps=config.rms_norm_eps)
        self.chain_projection = nn.Linear(n, n, bias=False) if config.chain_projection else None
        self.layer = DrafterLayer(config)
        self.norm = nn.RMSNorm(n, eps=config.rms_norm_eps)
        self.token_info = TokenInfo(config) if config.token_info else None

    def first(
        self, features: torch.Tensor, embeddings: torch.Tensor, positions: torch.Tensor, attend: Attend,
        keep: Keep = all_rows,
    ) -> torch.Tensor:  # fmt: skip
        """Return h_1 of rows that `keep` selects: features [B, T, n] at `positions`, embeddings of the next tokens."""
        fused = self.projection(self.joined(features, embeddings))
        out: torch.Tensor = self.norm(self.layer(fused, positions, attend, keep))
        return out

    def joined(self, features: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """Return the first projection's inputs, [..., 2n], or [..., n] without the first token."""
        parts = [self.hidden_norm(features)]
        if self.embedding_norm is not None:
            parts.append(self.embedding_norm(embeddings))
        return torch.cat(parts, dim=-1)

    def following(self, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Return h_{i+1} from h_i [B, T, n]. `positions` are those of the features that h_i predicts."""
        rows = self.chain_norm(hidden)
        if self.chain_projection is not None:
            rows = self.chain_projection(rows)
        out: torch.Tensor = self.norm(self.layer(rows, positions, attend))
        return out
