"""The loss of heads that each predict one of the next tokens: the sum over heads k of λ^k times the CE of head k.

A draft that starts at position s reads the verifier's hidden states up to there. Its head k predicts the token at
s + k + 1; the verifier's own head predicts that at s + 1. A method says what its heads read, by `head_states`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar

import torch
from torch import nn

from redraft.errors import UsageError
from redraft.export.drafters.layer import DrafterConfig
from redraft.train.acceptance import rank_accuracies
from redraft.train.batches import Batch
from redraft.train.draft_columns import DraftColumns
from redraft.train.drafter_config import DrafterTable
from redraft.train.linear_loss import linear_cross_entropy
from redraft.train.objectives.distillation import Distillation
from redraft.train.states import States
from redraft.train.training import Measure, Training
from redraft.train.verifier_model import autocast_of


@dataclass(frozen=True)
class LossWeights:
    """Weights of a head's cross-entropies: `soft` with the verifier's distribution over its kept likeliest tokens,
    `hard` with the text's token, `greedy` with the verifier's likeliest token. step_weight: λ, head k weighs λ^k."""

    soft: float = 1.0
    hard: float = 1.0
    greedy: float = 0.0
    step_weight: float = 0.8


@dataclass(frozen=True)
class HeadsTable(LossWeights, DrafterTable):
    """The loss in a recipe."""

    def __post_init__(self) -> None:
        losses = (self.soft, self.hard, self.greedy)
        if not all(0 <= weight < inf for weight in losses) or not sum(losses) or not 0 < self.step_weight < inf:
            raise UsageError(
                "drafter.soft, hard and greedy must be 0 or more, not all 0, and step_weight must be above 0"
            )


class HeadsObjective(Distillation, ABC):
    """The loss of heads with their frozen verifier. A text needs `lookahead` tokens after a draft's start."""

    def __init__(  # noqa: PLR0913 - the parts of a loss
        self, drafter: nn.Module, config: DrafterConfig, heads: int, verifier: Any, weights: LossWeights,
        vocabulary: DraftColumns | None = None, compile_graph: bool = False,
    ) -> None:  # fmt: skip
        """vocabulary: of the drafts' logits; all tokens by default. Raises ValueError if its size is another."""
        super().__init__(drafter, config, verifier, vocabulary)
        self._weights = weights
        self.lookahead = heads
        self._losses = torch.compile(self.losses, dynamic=False) if compile_graph else self.losses

    @abstractmethod
    def head_states(self, batch: Batch, states: States) -> Iterator[torch.Tensor]:
        """Yield the states of every head at all starts, [B, S, n] each, which the verifier's head reads."""

    def losses(self, batch: Batch, states: States) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean loss of every head over its drafts, [K], and metrics by head [2, K].

        They are the CE with the verifier's distribution in nats, and the share of drafts whose likeliest token is the
        verifier's.
        """
        weights, losses, metrics = self._weights, [], []
        for head, hidden in enumerate(self.head_states(batch, states)):
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
        for hidden in self.head_states(batch, states):
            yield self.head_logits(hidden)

    def loss(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the weighted sum over heads, and metrics `ce` and `hit 1` … `hit K`."""
        batch = batch.to(self.verifier.device)
        with autocast_of(self.verifier):
            losses, (ce, hits) = self._losses(batch, self.states(batch))
        weights = self._weights.step_weight ** torch.arange(1, len(losses) + 1, device=losses.device)
        named = {f"hit {head}": hit for head, hit in enumerate(hits.tolist(), 1)}
        return (weights * losses).sum(), {"ce": ce.mean().item(), **named}


class HeadsTraining(Training):
    """The base of trainings of heads, whose accuracies by rank choose the tree."""

    measures: ClassVar[Mapping[str, Measure]] = {"rank_accuracies": rank_accuracies}
