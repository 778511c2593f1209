"""Lyanna's loss: α·MSE of hidden states and β·CE of distributions, over every step of every chain (§4.1).

Chains start at many positions of a row at once. The rows of step 0 attend causally. As in decoding, a row of step i
attends to step 0's rows up to its start and to the earlier steps of its own chain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from redraft.errors import UsageError
from redraft.export.drafters.draft_vocabulary import most_frequent
from redraft.export.drafters.layer import renamed
from redraft.export.drafters.lyanna import LyannaConfig, LyannaDrafter, configuration_of
from redraft.names import LAST_HIDDEN_STATE
from redraft.records import PositiveInt
from redraft.train.batches import Batch, gather_places
from redraft.train.distillation import ChainAttention, DepthDistillation
from redraft.train.draft_columns import DraftColumns
from redraft.train.drafter_config import LayerTable
from redraft.train.fitted_projections import Inputs, fit_projections
from redraft.train.linear_loss import linear_cross_entropy
from redraft.train.mtp import load_mtp
from redraft.train.objectives.last_layer import OTHER_INIT, begin_with_layers, last_layer
from redraft.train.states import States
from redraft.train.training import Start, Training
from redraft.train.verifier_model import VerifierModel, drafter_embedding


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
class LyannaTable(LayerTable):
    """Loss and shape.

    alpha, beta, gamma: weights of a step's MSE, of its CE with the verifier's distribution, and of its CE with the
    verifier's likeliest token alone.   step_weight: a step's loss weighs this times the loss of the step before.
    chain: number of steps; LyannaConfig has the other fields, hot_tokens among them (Table 2).
    """

    alpha: float = 1.0
    beta: float = 1.0
    gamma: float = 0.0
    step_weight: float = 1.0
    rank: PositiveInt = 64
    chain: PositiveInt = 4
    first_token: bool = True
    token_info: bool = True
    chain_projection: bool = False
    hot_tokens: int = 0

    def __post_init__(self) -> None:
        losses = (self.alpha, self.beta, self.gamma)
        if min(losses) < 0 or max(losses) == 0 or self.step_weight <= 0:
            raise UsageError(
                "drafter.alpha, beta and gamma must be positive or zero, not all zero, and step_weight positive"
            )


class TokenInfoProduct:
    """RMSNorm(W2 W1 E(t)) as a product of `states(t)` [..., d] and `head` [H, d], for the parameters of one step.

    head is the gain times W2, and states are W1 E(t) over the root mean square of W2 W1 E(t). The mean square of W2 x
    is x·(W2ᵀ W2)·x / H, so that no row of H numbers is computed. Without token information both are zero. `hot` [H] is
    true for columns that have token information; all have if it is None. Then W2 has rows for these alone, and H counts
    them; other columns and the states of other tokens are zero.
    """

    def __init__(
        self, drafter: LyannaDrafter, embed: nn.Module, dtype: torch.dtype, vocabulary: DraftColumns,
        hot: torch.Tensor | None,
    ) -> None:  # fmt: skip
        self._vocabulary, self._hot = vocabulary, hot
        self._info, self._embed, self._dtype = drafter.token_info, embed, dtype
        self._eps = drafter.config.rms_norm_eps
        if self._info is None:
            self.head = torch.zeros(drafter.config.draft_size, 1, dtype=dtype, device=drafter.norm.weight.device)
            return
        up = self._info.up.weight
        with torch.autocast(up.device.type, enabled=False):
            self._gram = up.mT @ up / len(up)
        self.head = (self._info.norm.weight[:, None] * up).to(dtype)
        if hot is not None:
            self.head = self.head.new_zeros(len(hot), self.head.shape[1]).index_put((hot.nonzero()[:, 0],), self.head)

    def states(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the factor of tokens of any shape, [..., d]."""
        if self._info is None:
            return self.head.new_zeros(*tokens.shape, 1)
        with torch.autocast(tokens.device.type, enabled=False):
            low = F.linear(self._embed(tokens).float(), self._info.down.weight)
            mean_square = ((low @ self._gram) * low).sum(-1, keepdim=True)
            found = (low * (mean_square + self._eps).rsqrt()).to(self._dtype)
        if self._hot is None:
            return found
        columns = self._vocabulary.columns_of(tokens)
        return found * ((columns >= 0) & self._hot[columns.clamp(min=0)])[..., None]


class LyannaObjective(DepthDistillation):
    """The loss of Lyanna's drafters."""

    module = LyannaDrafter
    drafter: LyannaDrafter
    table: LyannaTable
    means = ("mse", "ce")
    hot: torch.Tensor | None = None

    def count(self, counts: torch.Tensor) -> None:
        """Choose the tokens that have token information by counts [V] of all tokens."""
        size = self.drafter.config.hot_tokens
        if size and self.drafter.token_info is not None:
            own = counts[self.vocabulary.tokens]
            hot = torch.zeros(len(own), dtype=torch.bool)
            hot[torch.from_numpy(most_frequent(own, size))] = True
            self.hot = hot.to(self.head.device)

    @staticmethod
    def lookahead_of(config: LyannaConfig, table: LyannaTable) -> int:
        """Return the steps of a chain."""
        return config.steps

    def losses(self, batch: Batch, states: States) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Return the loss of every step, and metrics: `mse`, `ce` [nats] and `hit`.

        CE counts the likeliest 64 tokens of the verifier that are in the draft vocabulary, by their probabilities.
        """
        weights, info = self.table, self._token_info()
        losses, metrics = [], []
        for step, hidden in enumerate(self._chains(batch, states)):
            places, real = batch.places(step + 1)
            count = real.sum().clamp(min=1)  # short texts may have no token at this depth
            error = (hidden.float() - gather_places(states.last, places).float()).square().mean(-1)[real].sum() / count
            targets = self.targets(batch, states, places, real, weights.beta, 0.0, weights.gamma)
            found = linear_cross_entropy(
                self.scaled(hidden[real]), self.head, info.states(gather_places(batch.tokens, places)[real]),
                info.head, targets.columns, targets.weights / count,
            )  # fmt: skip
            losses.append(weights.alpha * error + found.loss)
            ce, hits = targets.cross_entropy(found).sum() / count, targets.hits(found).sum() / count
            metrics.append(torch.stack([error.detach(), ce, hits]))
        return torch.stack(losses), dict(zip(("mse", "ce", "hit"), torch.stack(metrics, 1), strict=True))

    def total(self, losses: torch.Tensor, metrics: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the weighted mean over steps."""
        weights = self.table.step_weight ** torch.arange(len(losses), device=losses.device)
        return (weights * losses).sum() / weights.sum()

    def drafts(self, batch: Batch, states: States) -> Iterator[torch.Tensor]:
        """Yield l' of every step of every chain, [B, S, H] each."""
        info = self._token_info()
        for step, hidden in enumerate(self._chains(batch, states)):
            added = F.linear(info.states(gather_places(batch.tokens, batch.places(step + 1)[0])), info.head)
            yield self.head_logits(hidden) + added.float()

    def _chains(self, batch: Batch, states: States) -> Iterator[torch.Tensor]:
        """Yield h_i of every step, [B, S, n] each."""
        embed = drafter_embedding(self.verifier)
        features = states.last.to(embed.weight.dtype)
        return chains(self.drafter, features, batch.tokens, batch.starts.clamp(min=0), embed)

    def _token_info(self) -> TokenInfoProduct:
        embed = drafter_embedding(self.verifier)
        return TokenInfoProduct(self.drafter, embed, self.head.dtype, self.vocabulary, self.hot)


def start_from_layer(drafter: LyannaDrafter, verifier: VerifierModel, batches: Iterable[Batch]) -> None:
    """Begin with the verifier's last decoder layer and final norm, and projections that give this layer its inputs.

    The projections are fitted to the texts of `batches`. Raises UsageError as `begin_with_layers`.
    """
    batches = iter(batches)
    read = begin_with_layers(drafter, {"layer": last_layer(verifier)}, verifier, batches)
    embed = drafter_embedding(verifier.model)
    fits: list[tuple[nn.Linear, Inputs]] = [
        (drafter.projection, lambda hidden, tokens: drafter.joined(hidden[LAST_HIDDEN_STATE], embed(tokens).float()))
    ]
    if drafter.chain_projection is not None:
        fits.append((drafter.chain_projection, lambda hidden, _: drafter.chain_norm(hidden[LAST_HIDDEN_STATE])))
    fit_projections(fits, verifier.model, chain(read, batches), str(verifier.layers - 2))


def start_from_mtp(drafter: LyannaDrafter, verifier: VerifierModel, _: Iterable[Batch]) -> None:
    """Begin with the verifier's MTP module, which has the same form except the norm on a chain's own states.

    Raises CheckpointError if the verifier has none, UsageError if the drafter has another shape.
    """
    state = drafter.state_dict()
    width = drafter.config.hidden_size
    for name, tensor in load_mtp(verifier.checkpoint.path).state_dict().items():
        own = renamed(name)
        if not drafter.config.first_token:
            if own.startswith("embedding_norm"):
                continue
            tensor = tensor[:, :width] if own == "projection.weight" else tensor
        if own not in state or state[own].shape != tensor.shape:
            raise UsageError(
                f"drafter.init = 'mtp': {name} of the verifier's module does not fit a drafter of this shape",
                OTHER_INIT,
            )
        state[own] = tensor.to(torch.float32)
    state["chain_norm.weight"] = state["hidden_norm.weight"].clone()
    if drafter.chain_projection is not None:
        state["chain_projection.weight"] = torch.eye(width)
    drafter.load_state_dict(state)


class LyannaTraining(Training):
    """The training of Lyanna's drafters."""

    table = LyannaTable
    config, loss = LyannaConfig, LyannaObjective
    starts: ClassVar[Mapping[str, Start]] = {"mtp": start_from_mtp, "layer": start_from_layer}
    storage = "bf16"

    def configuration(self, table: LyannaTable, verifier: VerifierModel) -> LyannaConfig:
        """Return the drafter's configuration. Sizes of 0 in the table become the verifier's."""
        own = {
            name: getattr(table, name)
            for name in ("rank", "first_token", "token_info", "chain_projection", "hot_tokens")
        }
        return configuration_of(verifier.config, verifier.vocab_size, steps=table.chain, **table.sizes(verifier), **own)


TRAINING = LyannaTraining
