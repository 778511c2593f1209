"""The loss of heads that each predict one of the next tokens: the sum over heads k of λ^k times the CE of head k.

A draft that starts at position s reads the verifier's hidden states up to there. Its head k predicts the token at
s + k + 1; the verifier's own head predicts that at s + 1. A method says what its heads read, by `head_states`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch

from redraft.errors import UsageError
from redraft.train.acceptance import rank_accuracies
from redraft.train.batches import Batch
from redraft.train.distillation import DepthDistillation
from redraft.train.drafter_config import DrafterTable
from redraft.train.linear_loss import linear_cross_entropy
from redraft.train.states import States
from redraft.train.training import Measure, Training


@dataclass(frozen=True)
class HeadsTable(DrafterTable):
    """Weights of a head's cross-entropies: `soft` with the verifier's distribution over its kept likeliest tokens,
    `hard` with the text's token, `greedy` with the verifier's likeliest token. step_weight: λ, head k weighs λ^k."""

    soft: float = 1.0
    hard: float = 1.0
    greedy: float = 0.0
    step_weight: float = 0.8

    def __post_init__(self) -> None:
        losses = (self.soft, self.hard, self.greedy)
        if not all(0 <= weight < inf for weight in losses) or not sum(losses) or not 0 < self.step_weight < inf:
            raise UsageError(
                "drafter.soft, hard and greedy must be 0 or more, not all 0, and step_weight must be above 0"
            )


class HeadsObjective(DepthDistillation):
    """The loss of heads. The depth of a head is its number."""

    table: HeadsTable

    @abstractmethod
    def head_states(self, batch: Batch, states: States) -> Iterator[torch.Tensor]:
        """Yield the states of every head at all starts, [B, S, n] each, which the verifier's head reads."""

    def losses(self, batch: Batch, states: States) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Return the mean loss of every head over its drafts, and metrics `ce` in nats and `hit`."""
        weights, losses, metrics = self.table, [], []
        for head, hidden in enumerate(self.head_states(batch, states)):
            places, real = batch.places(head + 1)
            count = real.sum().clamp(min=1)  # short texts may have no token at this depth
            targets = self.targets(batch, states, places, real, weights.soft, weights.hard, weights.greedy)
            found = linear_cross_entropy(
                self.scaled(hidden[real]), self.head, None, None, targets.columns, targets.weights / count
            )
            losses.append(found.loss)
            metrics.append(torch.stack([targets.cross_entropy(found).sum() / count, targets.hits(found).sum() / count]))
        return torch.stack(losses), dict(zip(("ce", "hit"), torch.stack(metrics, 1), strict=True))

    def total(self, losses: torch.Tensor, metrics: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the weighted sum over heads."""
        weights = self.table.step_weight ** torch.arange(1, len(losses) + 1, device=losses.device)
        return (weights * losses).sum()

    def drafts(self, batch: Batch, states: States) -> Iterator[torch.Tensor]:
        """Yield the logits of every head, [B, S, H] each."""
        for hidden in self.head_states(batch, states):
            yield self.head_logits(hidden)


class HeadsTraining(Training):
    """The base of trainings of heads, whose accuracies by rank choose the tree."""

    measures: ClassVar[Mapping[str, Measure]] = {**Training.measures, "rank_accuracies": rank_accuracies}
