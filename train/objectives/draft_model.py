"""Distillation of a draft model on its verifier's text, at every position at once.

The loss is Σ_k p_k (log p_k − log q_k) over the verifier's kept likeliest tokens, and the cross-entropy with the
likeliest one alone. The model reads tokens only, so a text's positions are independent of where a draft starts: step d
of a draft predicts what the model predicts at that position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from redraft.export.drafters.draft_model import DraftModel, DraftModelConfig
from redraft.train.batches import Batch, gather_places
from redraft.train.draft_columns import DraftColumns
from redraft.train.linear_loss import linear_cross_entropy
from redraft.train.objectives.distillation import Distillation
from redraft.train.states import States
from redraft.train.verifier_model import autocast_of

DEPTHS = 6
"""Depths at which acceptance is measured. A text needs as many tokens after a draft's start."""

_LEAST = 1e-9
"""Least probability of the kept tokens together, for a finite logarithm."""


@dataclass(frozen=True)
class LossWeights:
    """Weights of a position's losses: `kl` of the verifier's distribution, `greedy` of its likeliest token alone,
    `features` of the squared distance to its hidden state. Positions of a prompt count `prompt` times."""

    kl: float = 1.0
    greedy: float = 0.0
    features: float = 0.0
    prompt: float = 1.0


class DraftModelObjective(Distillation):
    """The loss of a draft model with its frozen verifier."""

    drafter: DraftModel
    lookahead = DEPTHS

    def __init__(
        self, verifier: Any, config: DraftModelConfig, weights: LossWeights = LossWeights(),
        vocabulary: DraftColumns | None = None, compile_graph: bool = False,
    ) -> None:  # fmt: skip
        """vocabulary: of the draft model's logits; all tokens by default. Raises ValueError if its size is another."""
        super().__init__(DraftModel(config), config, verifier, vocabulary)
        self._weights = weights
        self._hidden = torch.compile(self._states_of, dynamic=True) if compile_graph else self._states_of

    def drafts(self, batch: Batch, states: States) -> Iterator[torch.Tensor]:
        """Yield the logits of every depth, [B, S, H] each."""
        hidden = self._hidden(batch.tokens)
        for depth in range(1, DEPTHS + 1):
            yield self.head_logits(gather_places(hidden, batch.places(depth)[0]))

    def loss(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the weighted mean over positions, and metrics `kl` [nats], `mse` and `hit`.

        kl:  divergence from the verifier's distribution over its kept tokens in the draft vocabulary.
        hit: share of positions whose likeliest token is the verifier's.
        """
        batch = batch.to(self.verifier.device)
        with autocast_of(self.verifier):
            states = self.states(batch)
            counted = self._counted(batch)
            rows = counted > 0
            hidden, share = self._hidden(batch.tokens)[rows], counted[rows] / counted.sum()
            columns, probabilities, log_probs = self._targets(states, rows)
            targets = self._weights.kl * probabilities
            targets[:, 0] += self._weights.greedy * (probabilities[:, 0] > 0)
            found = linear_cross_entropy(
                self.scaled(hidden), self.head, None, None, columns, targets * share[:, None]
            )  # fmt: skip
            error = ((hidden.float() - states.last[rows].float()).square().mean(-1) * share).sum()
            kept = probabilities.sum(-1, keepdim=True).clamp(min=_LEAST)
            log_q = found.chosen - found.log_sum[:, None]
            kl = (probabilities / kept * (log_probs - kept.log() - log_q)).sum(-1)
            hit = (found.largest == found.chosen[:, 0]) & (probabilities[:, 0] > 0)
        metrics = {"kl": kl @ share, "mse": error.detach(), "hit": hit.float() @ share}
        return found.loss + self._weights.features * error, {name: value.item() for name, value in metrics.items()}

    def _states_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return hidden states of texts [B, L]: [B, L, n]."""
        hidden: torch.Tensor = self.drafter(self.verifier.get_input_embeddings()(tokens).float())
        return hidden

    def _counted(self, batch: Batch) -> torch.Tensor:
        """Return the weight of every position, float [B, L]: 0 after the text's end."""
        places = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        weights = torch.where(places < batch.starts[:, :1], self._weights.prompt, 1.0)
        return weights * (places < batch.ends[:, None])

    def _targets(self, states: States, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return columns of the verifier's likeliest tokens, their probabilities and logarithms of these: [M, K].

        rows: bool [B, L], the M positions. Tokens outside the draft vocabulary have column 0 and probability 0.
        """
        columns = self.vocabulary.columns_of(states.top_ids[rows])
        log_probs = states.top_logits[rows] - states.log_sum[rows][:, None]
        return columns.clamp(min=0), log_probs.exp() * (columns >= 0), log_probs
