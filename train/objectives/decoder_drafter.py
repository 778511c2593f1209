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
from redraft.methods.decoder import MOST_STEPS
from redraft.train.batches import Batch, gather_places
from redraft.train.draft_columns import DraftColumns
from redraft.train.linear_loss import linear_cross_entropy
from redraft.train.objectives.distillation import Distillation
from redraft.train.states import States
from redraft.train.training import hidden_states_of
from redraft.train.verifier_model import autocast_of

DEPTHS = 6
"""Depths at which acceptance is measured. A text needs as many tokens after a draft's start."""

_LEAST = 1e-9
"""Least probability of the kept tokens together, for a finite logarithm."""


@dataclass(frozen=True)
class LossWeights:
    """Weights of a position's losses.

    kl: of the verifier's distribution.   hard: of the text's own next token.   greedy: of the verifier's likeliest
    token alone.   features: of the squared distance to its hidden state.   Positions of a prompt count `prompt` times.
    """

    kl: float = 1.0
    hard: float = 0.0
    greedy: float = 0.0
    features: float = 0.0
    prompt: float = 1.0

    @property
    def read_verifier(self) -> bool:
        """True if the loss needs the verifier's states."""
        return max(self.kl, self.greedy, self.features) > 0


@dataclass(frozen=True)
class Offsets:
    """Offsets δ of a text's rows in training.

    draft_length: k, the largest.
    offsets: `text` draws one δ for a text, `row` one for every row. In `block`, δ grows by one from row to row and
             begins again at 1 after k, from a phase that is drawn for a text (the paper's ablation, blocked offsets).
    frozen:  True to train steering alone (the paper's ablation).
    """

    draft_length: int = 8
    offsets: Literal["text", "row", "block"] = "text"
    frozen: bool = False

    def __post_init__(self) -> None:
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
    """The loss of a draft model with its frozen verifier."""

    drafter: DraftModel
    lookahead = DEPTHS

    def __init__(
        self, verifier: Any, config: DraftModelConfig, weights: LossWeights = LossWeights(),
        vocabulary: DraftColumns | None = None, compile_graph: bool = False,
    ) -> None:  # fmt: skip
        """vocabulary: of the draft model's logits; all tokens by default. Raises ValueError if its size is another.

        weights: for a model with steering, with `Offsets`.
        """
        super().__init__(DraftModel(config), config, verifier, vocabulary)
        self.hidden_states = hidden_states_of(config)
        self._weights, self._offsets = weights, weights if isinstance(weights, Offsets) else Offsets()
        if self._offsets.frozen:
            self.drafter.body.requires_grad_(False)
        self._hidden = torch.compile(self._states_of, dynamic=True) if compile_graph else self._states_of

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
        batch = batch.to(self.verifier.device)
        weights = self._weights
        with autocast_of(self.verifier):
            states = self.states(batch) if weights.read_verifier or self.drafter.steering is not None else None
            counted = self._counted(batch)
            rows = counted > 0
            hidden = self._hidden(batch.tokens, self._features(batch, states, self._drawn_offsets(batch)))[rows]
            share = counted[rows] / counted.sum()
            truth = self._following(batch)[rows][:, None]
            columns, targets = truth.clamp(min=0), weights.hard * (truth >= 0)
            if states is not None:
                likeliest, probabilities, log_probs = self._likeliest(states, rows)
                soft = weights.kl * probabilities
                soft[:, 0] += weights.greedy * (probabilities[:, 0] > 0)
                columns, targets = torch.cat([likeliest, columns], 1), torch.cat([soft, targets], 1)
            found = linear_cross_entropy(self.scaled(hidden), self.head, None, None, columns, targets * share[:, None])
            loss, log_q = found.loss, found.chosen - found.log_sum[:, None]
            metrics = {"ce": -(log_q[:, -1] * (truth[:, 0] >= 0)) @ share}
            if states is not None:
                error = ((hidden.float() - states.last[rows].float()).square().mean(-1) * share).sum()
                kept = probabilities.sum(-1, keepdim=True).clamp(min=_LEAST)
                kl = (probabilities / kept * (log_probs - kept.log() - log_q[:, :-1])).sum(-1)
                hit = (found.largest == found.chosen[:, 0]) & (probabilities[:, 0] > 0)
                loss = loss + weights.features * error
                metrics |= {"kl": kl @ share, "mse": error.detach(), "hit": hit.float() @ share}
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

    def _drawn_offsets(self, batch: Batch) -> torch.Tensor | None:
        """Return an offset of every row; None for a model without steering."""
        return None if self.drafter.steering is None else self._offsets.draw(batch.tokens)

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
        weights = torch.where(places < batch.starts[:, :1], self._weights.prompt, 1.0)
        return weights * (places < batch.ends[:, None])

    def _following(self, batch: Batch) -> torch.Tensor:
        """Return the column of the token after every position, int64 [B, L]; -1 if it has none, or is not known."""
        columns = self.vocabulary.columns_of(batch.tokens[:, 1:])
        return torch.nn.functional.pad(columns, (0, 1), value=-1)

    def _likeliest(self, states: States, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return columns of the verifier's likeliest tokens, their probabilities and logarithms of these: [M, K].

        rows: bool [B, L], the M positions. Tokens outside the draft vocabulary have column 0 and probability 0.
        """
        columns = self.vocabulary.columns_of(states.top_ids[rows])
        log_probs = states.top_logits[rows] - states.log_sum[rows][:, None]
        return columns.clamp(min=0), log_probs.exp() * (columns >= 0), log_probs


def steering_places(batch: Batch, offsets: torch.Tensor) -> torch.Tensor:
    """Return the position whose hidden states steer every row, int64 [B, L]: q - δ, at least 0.

    offsets: δ, int64 [B, L]. Rows of the prompt, up to the first draft's start, have δ = 1.
    """
    rows = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
    return (rows - offsets.where(rows > batch.starts[:, :1], 1)).clamp(min=0)
