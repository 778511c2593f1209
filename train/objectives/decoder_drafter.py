"""Losses of a draft model at every position of a text at once: distillation of its verifier, and plain cross-entropy.

Distillation is Σ_k p_k (log p_k − log q_k) over the verifier's kept likeliest tokens, and the cross-entropy with the
likeliest one alone. Without steering, the model reads tokens only, so a text's positions are independent of where a
draft starts: step d of a draft predicts what the model predicts at that position.

With steering (SD², appendix A.4), the row at position q reads the verifier's hidden states at q - δ, 1 ≤ δ ≤ k. The
paper has π_D(x_t | x_{1:t-1}, g_{t-δ}): the row at q predicts the token at t = q + 1, and g_{t-δ} is from the node at
q - δ, whose logits gave the token at t - δ. The i-th token of a draft has δ = i. Rows of a prompt have δ = 1, as in the
runtime (`redraft.runtime.drafters`). The row at position 0 has no bias, and no row reads hidden states before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from redraft.errors import UsageError
from redraft.export.drafters.decoder_drafter import DraftModel, DraftModelConfig
from redraft.export.drafters.steering import Mechanism
from redraft.methods.decoder import MOST_STEPS
from redraft.train.batches import Batch, gather_places
from redraft.train.distillation import Distillation
from redraft.train.drafter_config import DrafterTable, Init
from redraft.train.linear_loss import linear_cross_entropy
from redraft.train.states import States
from redraft.train.verifier_model import autocast_of

DEPTHS = 6
"""Depths at which acceptance is measured. A text needs as many tokens after a draft's start."""

_LEAST = 1e-9
"""Least probability of the kept tokens together, for a finite logarithm."""


@dataclass(frozen=True)
class StudentTable(DrafterTable):
    """Loss and shape.

    kl: weight of the verifier's distribution.   hard: of the text's own next token.   greedy: of the verifier's
    likeliest token alone.   features: of the squared distance to its hidden state.
    prompt: positions of a prompt count so many times.
    layers: the verifier's layers to begin with, ascending; none means the first and the last three.
    init:   `layers` copies these layers and the final norm.
    """

    kl: float = 1.0
    hard: float = 0.0
    greedy: float = 0.0
    features: float = 0.0
    prompt: float = 1.0
    layers: tuple[int, ...] = ()
    init: Init = "layers"

    def __post_init__(self) -> None:
        losses = (self.kl, self.hard, self.greedy, self.features)
        if min(*losses, self.prompt) < 0 or max(losses) == 0:
            raise UsageError(
                "drafter.kl, hard, greedy, features and prompt must be positive or zero, and one of the first four "
                "positive"
            )

    @property
    def read_verifier(self) -> bool:
        """True if the loss needs the verifier's states."""
        return max(self.kl, self.greedy, self.features) > 0


@dataclass(frozen=True)
class SteeringTable(StudentTable):
    """The table of a student with steering: also the offsets δ of a text's rows in training.

    draft_length: k, the largest offset.
    offsets: `text` draws one δ for a text, `row` one for every row. In `block`, δ grows by one from row to row and
             begins again at 1 after k, from a phase that is drawn for a text (the paper's ablation, blocked offsets).
    frozen:  True to train steering alone (the paper's ablation).
    hidden_states: the verifier's that steer it, the highest layer first; none means the paper's, 3, L/2 and L - 2.
    steering: where g enters a layer; the paper's ablations are `after` and `conditional`.
    steering_norm: False to leave out the LayerNorm of g.
    """

    draft_length: int = 8
    offsets: Literal["text", "row", "block"] = "text"
    frozen: bool = False
    hidden_states: tuple[str, ...] = ()
    steering: Mechanism = "up"
    steering_norm: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.draft_length <= MOST_STEPS:
            raise UsageError(f"drafter.draft_length must be a number from 1 to {MOST_STEPS}, not {self.draft_length}")

    def draw(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return an offset of every row of texts [B, L], int64 [B, L], by torch's generator."""
        (texts, rows), k, device = tokens.shape, self.draft_length, tokens.device
        drawn = torch.randint(k, (texts, rows if self.offsets == "row" else 1), device=device)
        if self.offsets == "block":
            drawn = (drawn + torch.arange(rows, device=device)) % k
        return (1 + drawn).expand(-1, rows)


class DraftModelObjective(Distillation):
    """The loss of a draft model."""

    module = DraftModel
    drafter: DraftModel
    table: StudentTable

    def __init__(self, verifier: Any, config: DraftModelConfig, table: StudentTable, *arguments: Any) -> None:
        """The arguments are those of `Distillation`.   table: a `SteeringTable` for a model with steering."""
        super().__init__(verifier, config, table, *arguments)
        if isinstance(table, SteeringTable) and table.frozen:
            self.drafter.body.requires_grad_(False)
        self._hidden = torch.compile(self._states_of, dynamic=True) if self._compiled else self._states_of

    @staticmethod
    def lookahead_of(config: DraftModelConfig, table: StudentTable) -> int:
        """Return the depths at which acceptance is measured."""
        return DEPTHS

    def drafts(self, batch: Batch, states: States) -> Iterator[torch.Tensor]:
        """Yield the logits of every depth, [B, S, H] each. With steering, all rows of depth d have δ = d."""
        hidden = None
        for depth in range(1, DEPTHS + 1):
            if hidden is None or self.drafter.steering is not None:
                offsets = torch.full_like(batch.tokens, depth)
                hidden = self._hidden(batch.tokens, self._features(batch, states, offsets))
            yield self.head_logits(gather_places(hidden, batch.places(depth)[0]))

    def loss(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the weighted mean over positions, and metrics `ce` and `kl` [nats], `mse` and `hit`.

        ce:  cross-entropy with the text's next token, the only metric if the loss does not need the verifier.
        kl:  divergence from the verifier's distribution over its kept tokens in the draft vocabulary.
        hit: share of positions whose likeliest token is the verifier's.
        """
        batch, table = batch.to(self.verifier.device), self.table
        with autocast_of(self.verifier):
            states = self.states(batch) if table.read_verifier or self.drafter.steering is not None else None
            counted = self._counted(batch)
            rows = counted > 0
            hidden = self._hidden(batch.tokens, self._features(batch, states, self._drawn_offsets(batch.tokens)))[rows]
            share = counted[rows] / counted.sum()
            places = torch.arange(batch.tokens.shape[1], device=rows.device).expand_as(rows)
            truth = self.truth(batch, places, rows)[:, None]
            columns, weights = truth.clamp(min=0), table.hard * (truth >= 0)
            if states is not None:
                likeliest = self.targets(batch, states, places, rows, table.kl, 0.0, table.greedy)
                columns = torch.cat([likeliest.columns, columns], 1)
                weights = torch.cat([likeliest.weights, weights], 1)
            found = linear_cross_entropy(self.scaled(hidden), self.head, None, None, columns, weights * share[:, None])
            loss, log_q = found.loss, found.chosen - found.log_sum[:, None]
            metrics = {"ce": -(log_q[:, -1] * (truth[:, 0] >= 0)) @ share}
            if states is not None:
                error = ((hidden.float() - states.last[rows].float()).square().mean(-1) * share).sum()
                loss = loss + table.features * error
                p = likeliest.shares / likeliest.shares.sum(-1, keepdim=True).clamp(min=_LEAST)
                kl = (torch.xlogy(p, p) - p * log_q[:, :-1]).sum(-1)
                hits = likeliest.hits(found).float()
                metrics |= {"kl": kl @ share, "mse": error.detach(), "hit": hits @ share}
        return loss, {name: value.item() for name, value in metrics.items()}

    def _states_of(self, tokens: torch.Tensor, features: torch.Tensor | None) -> torch.Tensor:
        """Return hidden states of texts [B, L]: [B, L, n].   features: of `_features`."""
        embedded = self.verifier.get_input_embeddings()(tokens).float()
        steering = self.drafter.steering
        if steering is None or features is None:
            hidden: torch.Tensor = self.drafter(embedded)
        else:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            hidden = self.drafter(embedded, steering(features, positions))
        return hidden

    def _drawn_offsets(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Return an offset of every row; None for a model without steering."""
        return self.table.draw(tokens) if isinstance(self.table, SteeringTable) else None

    def _features(self, batch: Batch, states: States | None, offsets: torch.Tensor | None) -> torch.Tensor | None:
        """Return the hidden states that steer every row, [B, L, states * n]; None for a model without steering.

        offsets: δ, int64 [B, L]. Rows of a prompt have offset 1.
        """
        if self.drafter.steering is None or states is None or offsets is None:
            return None
        return gather_places(
            torch.cat([states.hidden[name].float() for name in self.drafter.config.hidden_states], dim=-1),
            steering_places(batch, offsets),
        )

    def _counted(self, batch: Batch) -> torch.Tensor:
        """Return the weight of every position, float [B, L]: 0 after the text's end."""
        places = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        weights = torch.where(places < batch.starts[:, :1], self.table.prompt, 1.0)
        return weights * (places < batch.ends[:, None])


def steering_places(batch: Batch, offsets: torch.Tensor) -> torch.Tensor:
    """Return the position whose hidden states steer every row, int64 [B, L]: q - δ, at least 0.

    offsets: δ, int64 [B, L]. Rows of the prompt, up to the first draft's start, have δ = 1.
    """
    rows = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
    return (rows - offsets.where(rows > batch.starts[:, :1], 1)).clamp(min=0)
