"""Lyanna's loss: α·MSE of hidden states and β·CE of distributions, over every step of every chain (§4.1).

Chains start at many positions of a row at once. The rows of step 0 attend causally. As in decoding, a row of step i
attends to step 0's rows up to its start and to the earlier steps of its own chain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from redraft.export.drafters.lyanna import LyannaConfig, LyannaDrafter
from redraft.train.batches import Batch, gather_places
from redraft.train.draft_columns import DraftColumns
from redraft.train.linear_loss import linear_cross_entropy
from redraft.train.objectives.chain_attention import ChainAttention
from redraft.train.objectives.distillation import Distillation
from redraft.train.states import States
from redraft.train.verifier_model import autocast_of


def chains(
    drafter: LyannaDrafter, features: torch.Tensor, tokens: torch.Tensor, starts: torch.Tensor, embed: nn.Module
) -> Iterator[torch.Tensor]:
    """Yield hidden states h_1, h_2 … of the chains that start at `starts` [B, S]: [B, S, n] each.

    features, tokens: [B, L, n] and [B, L] of whole texts. The last position has no next token: nothing starts there.
    """
    positions = torch.arange(features.shape[1], device=features.device)
    attend = ChainAttention(drafter.config, starts)
    hidden = drafter.first(
        features, embed(tokens.roll(-1, 1)), positions, attend, lambda rows: gather_places(rows, starts)
    )
    yield hidden
    for step in range(1, drafter.config.steps):
        hidden = drafter.following(hidden, starts + step, attend)
        yield hidden


@dataclass(frozen=True)
class LossWeights:
    """Weights of a step's loss: alpha of MSE, beta of CE with the verifier's distribution, gamma of CE with its
    likeliest token alone. A step's loss weighs `step` times the loss of the step before."""

    alpha: float = 1.0
    beta: float = 1.0
    gamma: float = 0.0
    step: float = 0.8


class TokenInfoProduct:
    """RMSNorm(W2 W1 E(t)) as a product of `states(t)` [..., d] and `head` [H, d], for the parameters of one step.

    head is the gain times W2, and states are W1 E(t) over the root mean square of W2 W1 E(t). The mean square of W2 x
    is x·(W2ᵀ W2)·x / H, so that no row of H numbers is computed. Without token information both are zero.
    """

    def __init__(self, drafter: LyannaDrafter, embed: nn.Module, dtype: torch.dtype) -> None:
        self._info, self._embed, self._dtype = drafter.token_info, embed, dtype
        self._eps = drafter.config.rms_norm_eps
        if self._info is None:
            self.head = torch.zeros(drafter.config.draft_size, 1, dtype=dtype, device=drafter.norm.weight.device)
            return
        up = self._info.up.weight
        with torch.autocast(up.device.type, enabled=False):
            self._gram = up.mT @ up / len(up)
        self.head = (self._info.norm.weight[:, None] * up).to(dtype)

    def states(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the factor of tokens of any shape, [..., d]."""
        if self._info is None:
            return self.head.new_zeros(*tokens.shape, 1)
        with torch.autocast(tokens.device.type, enabled=False):
            low = F.linear(self._embed(tokens).float(), self._info.down.weight)
            mean_square = ((low @ self._gram) * low).sum(-1, keepdim=True)
            return (low * (mean_square + self._eps).rsqrt()).to(self._dtype)


class LyannaObjective(Distillation):
    """The loss of a drafter with its frozen verifier. A text needs `lookahead` tokens after a draft's start."""

    drafter: LyannaDrafter

    def __init__(
        self, verifier: Any, config: LyannaConfig, weights: LossWeights = LossWeights(),
        vocabulary: DraftColumns | None = None, compile_graph: bool = False,
    ) -> None:  # fmt: skip
        """vocabulary: of the drafter's logits; all tokens by default. Raises ValueError if its size is another."""
        super().__init__(LyannaDrafter(config), config, verifier, vocabulary)
        self._weights = weights
        self.lookahead = config.steps
        self._losses = torch.compile(self.losses, dynamic=False) if compile_graph else self.losses

    def losses(self, batch: Batch, states: States) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the weighted loss of every step, [N], and metrics by step: [2, N] of MSE and CE [nats], [N] hit rates.

        CE counts the likeliest 64 tokens of the verifier that are in the draft vocabulary, by their probabilities.
        """
        weights, info = self._weights, self._token_info()
        losses, means, hits = [], [], []
        for step, hidden in enumerate(self._chains(batch, states)):
            places, real = batch.places(step + 1)
            count = real.sum().clamp(min=1)  # short texts may have no token at this depth
            error = (hidden.float() - gather_places(states.last, places).float()).square().mean(-1)[real].sum() / count
            columns, shares = self._targets(states, places, real)
            targets = weights.beta * shares
            targets[:, 0] += weights.gamma * (shares[:, 0] > 0)
            found = linear_cross_entropy(
                self.scaled(hidden[real]), self.head,
                info.states(gather_places(batch.tokens, places)[real]), info.head, columns, targets / count,
            )  # fmt: skip
            losses.append(weights.alpha * error + found.loss)
            ce = shares.sum(-1) * found.log_sum - (shares * found.chosen).sum(-1)
            means.append(torch.stack([error.detach(), ce.sum() / count]))
            hits.append(((found.largest == found.chosen[:, 0]) & (shares[:, 0] > 0)).sum() / count)
        return torch.stack(losses), torch.stack(means, 1), torch.stack(hits)

    def _targets(self, states: States, places: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return columns of the verifier's likeliest tokens after the real places, and their probabilities: [M, K].

        Tokens outside the draft vocabulary have column 0 and probability 0.
        """
        columns = self.vocabulary.columns_of(gather_places(states.top_ids, places)[real])
        log_probs = (
            gather_places(states.top_logits, places)[real] - gather_places(states.log_sum, places)[real][:, None]
        )
        return columns.clamp(min=0), log_probs.exp() * (columns >= 0)

    def drafts(self, batch: Batch, states: States) -> Iterator[torch.Tensor]:
        """Yield l' of every step of every chain, [B, S, H] each."""
        for step, hidden in enumerate(self._chains(batch, states)):
            yield self.step_logits(hidden, gather_places(batch.tokens, batch.places(step + 1)[0]))

    def _chains(self, batch: Batch, states: States) -> Iterator[torch.Tensor]:
        """Yield h_i of every step, [B, S, n] each."""
        embed = self.verifier.get_input_embeddings()
        features = states.last.to(embed.weight.dtype)
        return chains(self.drafter, features, batch.tokens, batch.starts.clamp(min=0), embed)

    def step_logits(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return l'_i: logits of hidden states [B, S, n] plus token information of the tokens [B, S] before them."""
        return self.head_logits(hidden) + self.added(tokens)

    def added(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the numbers that tokens of any shape add to all logits: float32 [..., H]."""
        info = self._token_info()
        return F.linear(info.states(tokens), info.head).float()

    def _token_info(self) -> TokenInfoProduct:
        return TokenInfoProduct(self.drafter, self.verifier.get_input_embeddings(), self.head.dtype)

    def loss(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the weighted mean over steps, and metrics `mse`, `ce` and `hit 1` … `hit N`."""
        batch = batch.to(self.verifier.device)
        with autocast_of(self.verifier):
            losses, means, hits = self._losses(batch, self.states(batch))
        weights = self._weights.step ** torch.arange(len(losses), device=losses.device)
        metrics = {name: values.mean().item() for name, values in zip(("mse", "ce"), means, strict=True)}
        hit_rates = {f"hit {step}": hit for step, hit in enumerate(hits.tolist(), 1)}
        return (weights * losses).sum() / weights.sum(), metrics | hit_rates
