"""Medusa's loss (Cai et al. 2024, equation 1): the sum over heads k of λ^k times the cross-entropy of head k.

A draft that starts at position s reads the verifier's hidden state there. Its head k predicts the token at s + k + 1;
the verifier's own head predicts that at s + 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from redraft.export.drafters.medusa import MedusaConfig, MedusaHeads
from redraft.train.batches import Batch, gather_places
from redraft.train.draft_columns import DraftColumns
from redraft.train.linear_loss import linear_cross_entropy
from redraft.train.objectives.distillation import Distillation
from redraft.train.states import States
from redraft.train.verifier_model import autocast_of


@dataclass(frozen=True)
class LossWeights:
    """Weights of a head's cross-entropies: `soft` with the verifier's distribution over its kept likeliest tokens,
    `hard` with the text's token, `greedy` with the verifier's likeliest token. step: λ, head k weighs λ^k."""

    soft: float = 1.0
    hard: float = 1.0
    greedy: float = 0.0
    step: float = 0.8


class MedusaObjective(Distillation):
    """The loss of heads with their frozen verifier. A text needs `lookahead` tokens after a draft's start."""

    drafter: MedusaHeads

    def __init__(
        self, verifier: Any, config: MedusaConfig, weights: LossWeights = LossWeights(),
        vocabulary: DraftColumns | None = None, compile_graph: bool = False,
    ) -> None:  # fmt: skip
        """vocabulary: of the drafts' logits; all tokens by default. Raises ValueError if its size is another."""
        super().__init__(MedusaHeads(config), config, verifier, vocabulary)
        self._weights = weights
        self.lookahead = config.heads
        self._losses = torch.compile(self.losses, dynamic=False) if compile_graph else self.losses

    def losses(self, batch: Batch, states: States) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean loss of every head over its drafts, [K], and metrics by head [2, K].

        They are the CE with the verifier's distribution in nats, and the share of drafts whose likeliest token is the
        verifier's.
        """
        weights, losses, metrics = self._weights, [], []
        for head, hidden in enumerate(self._states_of(batch, states)):
            places, real = batch.places(head + 1)
            count = real.sum().clamp(min=1)  # short texts may have no token at this depth
            targets = self.targets(batch, states, places, real, weights.soft, weights.hard, weights.greedy)
            found = linear_cross_entropy(
                self.scaled(hidden[real]), self.head, None, None, targets.columns, targets.weights / count
            )
            losses.append(found.loss)
            metrics.append(torch.stack([targets.cross_entropy(found).sum() / count, targets.hits(found).sum() / count]))
        return torch.stack(losses), torch.stack(metrics, 1)

    def drafts(self, batch: Batch, states: States) -> Iterator[torch.Tensor]:
        """Yield the logits of every head, [B, S, H] each."""
        for hidden in self._states_of(batch, states):
            yield self.head_logits(hidden)

    def _states_of(self, batch: Batch, states: States) -> Iterator[torch.Tensor]:
        """Yield the states of every head at all starts, [B, S, n] each."""
        read = gather_places(states.last, batch.starts.clamp(min=0)).to(self.drafter.heads.weight.dtype)
        yield from self.drafter(read).unbind(-2)

    def loss(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the weighted sum over heads, and metrics `ce` and `hit 1` … `hit K`."""
        batch = batch.to(self.verifier.device)
        with autocast_of(self.verifier):
            losses, (ce, hits) = self._losses(batch, self.states(batch))
        weights = self._weights.step ** torch.arange(1, len(losses) + 1, device=losses.device)
        named = {f"hit {head}": hit for head, hit in enumerate(hits.tolist(), 1)}
        return (weights * losses).sum(), {"ce": ce.mean().item(), **named}
