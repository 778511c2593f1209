"""The torch module of drafters that draft a block of tokens in one pass.

With c_r = N(F s_r) the context at position r, where s_r are the verifier's hidden states there, x_t the anchor, the
latest token, e its embedding and m the mask, a layer has the block's rows b_0 … b_R-1 at the positions t … t + R - 1:

    queries of N(b);   keys and values of [c_0 … c_t-1 ; N(b)]      one set of products for both, rotated by positions

A row sees all context, and all rows of its block; with `causal` only rows up to itself. Chen et al. 2026 (DFlash,
arXiv 2602.06036) and Hu et al. 2026 (JetSpec, arXiv 2606.18394, section 2.2) start with b = [e ; m ; …], one mask for
each drafted token, which predicts the token at its own position. With `anchor_predicts` each row predicts the token
after its position, so that the anchor takes the place of a mask (DeepSeek's DSpark). The logits of a row's token after
the token x are then

    M N(h) + W_2 W_1[x]                    M the verifier's head, W_1 and W_2 of `token_rank`; without them, M N(h)

and with `confidence` σ(w [N(h) ; W_1[x]] + b) estimates the chance that a token which is drafted there is accepted.

m is a vector of the drafter's own. A published drafter's is the verifier's embedding of its mask token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from redraft.errors import CheckpointError
from redraft.export.drafters.layer import Attend, DrafterLayer, LayerConfig
from redraft.methods.block import MOST_STEPS
from redraft.names import LAST_HIDDEN_STATE

MOST_LAYERS = 16


@dataclass(frozen=True, kw_only=True)
class BlockConfig(LayerConfig):
    """Configuration of a drafter: the shape of its layers, and these fields.

    layers:          of the drafter.   steps: tokens that a block drafts, as it was trained.
    causal, anchor_predicts, confidence: see the module's documentation.
    token_rank:      numbers of a row of W_1; 0 for none.
    head_norms:      True for RMSNorm of each head's queries and keys, as Qwen3 has.
    hidden_states:   the verifier's hidden states of a row of context.
    """

    layers: int = 1
    steps: int = 7
    causal: bool = False
    anchor_predicts: bool = False
    token_rank: int = 0
    confidence: bool = False
    head_norms: bool = False
    hidden_states: tuple[str, ...] = (LAST_HIDDEN_STATE,)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, most in (("layers", MOST_LAYERS), ("steps", MOST_STEPS)):
            if not 1 <= getattr(self, name) <= most:
                raise CheckpointError(f"{name} must be a number from 1 to {most}, not {getattr(self, name)}")
        if self.token_rank < 0:
            raise CheckpointError(f"token_rank must be 0 or more, not {self.token_rank}")
        if not self.hidden_states or len(set(self.hidden_states)) < len(self.hidden_states):
            raise CheckpointError(f"hidden_states must be different names, at least one, not {self.hidden_states}")

    def rows(self, steps: int) -> int:
        """Return R, the rows of a block that drafts so many tokens."""
        return steps if self.anchor_predicts else steps + 1


class BlockLayer(DrafterLayer):
    """A layer of the block's rows, whose keys and values are those of the context too."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        size, eps = config.head_dim, config.rms_norm_eps
        self.q_norm = nn.RMSNorm(size, eps=eps) if config.head_norms else None
        self.k_norm = nn.RMSNorm(size, eps=eps) if config.head_norms else None

    def project(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the queries, keys and values of rows after the norm, not rotated yet."""
        q, k, v = super().project(normed)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = (
                norm(x.unflatten(-1, (-1, self.config.head_dim))).flatten(-2)
                for norm, x in ((self.q_norm, q), (self.k_norm, k))
            )
        return q, k, v

    def over(self, context: torch.Tensor, block: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Return the rows [B, R, n] of a block after the layer, over context [B, L, n].

        positions: [B, L + R], of both.   attend: returns what the block's rows attend to, [B, R, Hq * D].
        """
        normed = block if self.input_norm is None else self.input_norm(block)
        q, k, v = self.project(torch.cat([context, normed], dim=1))
        q = self.rotary(q, positions, self.config.heads)
        k = self.rotary(k, positions, self.config.kv_heads)
        return self.write(block, attend(q, k, v))


class BlockDrafter(nn.Module):
    """The trained parameters. Embedding and head belong to the verifier."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        n, rank = config.hidden_size, config.token_rank
        self.config = config
        self.features = nn.Linear(n * len(config.hidden_states), n, bias=False)
        self.feature_norm = nn.RMSNorm(n, eps=config.rms_norm_eps)
        self.mask = nn.Parameter(torch.zeros(n))
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(n, eps=config.rms_norm_eps)
        self.tokens = nn.Embedding(config.vocab_size, rank) if rank else None
        self.token_head = nn.Linear(rank, config.draft_size, bias=False) if rank else None
        self.confidence = nn.Linear(n + rank, 1) if config.confidence else None

    def forward(
        self, features: torch.Tensor, anchors: torch.Tensor, positions: torch.Tensor, rows: int,
        attend: Callable[[int], Attend],
    ) -> torch.Tensor:  # fmt: skip
        """Return the states [B, S, N, n] of S blocks, which the verifier's head reads, in the order of their tokens.

        features: hidden states [B, L, n of all] of the context.   anchors: embeddings [B, S, n].
        positions: [B, L + S * R], of the context and of the blocks' rows.   rows: R.   attend: of each layer.
        """
        context = self.feature_norm(self.features(features))
        masks = self.mask.expand(*anchors.shape[:2], rows - 1, -1)
        block = torch.cat([anchors[:, :, None], masks.to(anchors.dtype)], dim=2)  # [B, S, R, n]
        x = block.flatten(1, 2)
        for number, layer in enumerate(self.layers):
            x = layer.over(context, x, positions, attend(number))  # type: ignore[operator]
        states: torch.Tensor = self.norm(x).unflatten(1, (anchors.shape[1], rows))
        return states if self.config.anchor_predicts else states[:, :, 1:]

    def confidences(self, states: torch.Tensor, tokens: torch.Tensor | None) -> torch.Tensor:
        """Return the confidence head's numbers before σ, [...], of states [..., n] and rows of W_1 [..., r]."""
        assert self.confidence is not None
        found: torch.Tensor = self.confidence(states if tokens is None else torch.cat([states, tokens], dim=-1))
        return found.squeeze(-1)
