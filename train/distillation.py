"""The base of losses, a drafter with its frozen verifier and head, and the attention of many drafts at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from redraft.export.drafters.layer import LayerConfig
from redraft.names import LAST_HIDDEN_STATE
from redraft.train.batches import Batch, gather_places
from redraft.train.draft_columns import DraftColumns
from redraft.train.linear_loss import LinearLoss
from redraft.train.states import States, states_of_tokens
from redraft.train.verifier_model import autocast_of


class Targets(NamedTuple):
    """Targets of M drafts at one depth.

    columns, weights: of the cross-entropy, [M, K]. A token outside the draft vocabulary has column 0 and weight 0.
    shares: the verifier's probabilities of its kept likeliest tokens, whose columns come first; 0 outside, [M, K].
    truth:  the column of the text's token, -1 outside, [M].
    """

    columns: torch.Tensor
    weights: torch.Tensor
    shares: torch.Tensor
    truth: torch.Tensor

    def cross_entropy(self, found: LinearLoss) -> torch.Tensor:
        """Return the CE with the verifier's distribution over these tokens in nats, [M]."""
        return self.shares.sum(-1) * found.log_sum - (self.shares * found.chosen).sum(-1)

    def hits(self, found: LinearLoss) -> torch.Tensor:
        """Return which drafts' likeliest token is the verifier's, bool [M]."""
        return (found.largest == found.chosen[:, 0]) & (self.shares[:, 0] > 0)


class Distillation(nn.Module, ABC):
    """The loss of a drafter that learns from a frozen verifier, and predicts with the verifier's head.

    Its parameters and its state are the drafter's; names of the state begin with `drafter.`.
    module: class of the drafter's module.
    lookahead: tokens that a text needs after a draft's start.   hidden_states: the verifier's that the loss reads.
    """

    module: ClassVar[type[nn.Module]]

    def __init__(
        self, verifier: Any, config: Any, table: Any, vocabulary: DraftColumns | None = None,
        compile_graph: bool = False,
    ) -> None:  # fmt: skip
        """The drafter's weights are those of torch's generator.

        table: the recipe's, with the settings of the loss.   compile_graph: use torch.compile.
        vocabulary: of the drafts' logits; all tokens by default. Raises ValueError if its size is another.
        """
        super().__init__()
        self.drafter = self.module(config)
        self.table = table
        self.lookahead, self.hidden_states = self.lookahead_of(config, table), self.hidden_states_of(config)
        self._compiled = compile_graph
        self._logit_scale = config.logit_scale
        self._frozen = [verifier.requires_grad_(False).eval()]  # in a list, so that it is not a submodule
        self.vocabulary = vocabulary or DraftColumns.whole(config.vocab_size)
        if len(self.vocabulary) != config.draft_size:
            raise ValueError(f"the draft vocabulary has {len(self.vocabulary)} tokens, expected {config.draft_size}")
        self._head = [self.vocabulary.rows_of(verifier.get_output_embeddings().weight)]

    @staticmethod
    @abstractmethod
    def lookahead_of(config: Any, table: Any) -> int:
        """Return the tokens that a text needs after a draft's start."""

    @staticmethod
    def hidden_states_of(config: Any) -> tuple[str, ...]:
        """Return the verifier's hidden states that the loss reads: the last one, and those that the drafter reads."""
        return tuple(dict.fromkeys((LAST_HIDDEN_STATE, *getattr(config, "hidden_states", ()))))

    @abstractmethod
    def loss(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """Return a scalar loss, and metrics to report. The loss has no gradient if no token of the batch counts."""

    @abstractmethod
    def drafts(self, batch: Batch, states: States) -> Iterator[torch.Tensor]:
        """Yield drafts' logits by depth, [B, S, H] each.

        Depth d predicts the token after position `starts + d` (`batch.places(d)`), from the tokens before it.
        """

    @property
    def verifier(self) -> Any:
        """The frozen model."""
        return self._frozen[0]

    @property
    def head(self) -> torch.Tensor:
        """The rows of the verifier's head for the draft vocabulary, [H, n]."""
        return self._head[0]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The drafter's own parameters."""
        return self.drafter.named_parameters(*args, **kwargs)

    def count(self, counts: torch.Tensor) -> None:
        """Take how often each token of the vocabulary is in the texts, int64 [V]."""

    def prepare(self, step: int, steps: int) -> bool:
        """Return False: the parameters never change."""
        return False

    @torch.no_grad()
    def states(self, batch: Batch) -> States:
        """Return the verifier's states of a batch: those that were kept, else computed."""
        return batch.states or states_of_tokens(self.verifier, batch.tokens, self.hidden_states)

    def targets(  # noqa: PLR0913 - the parts of a loss
        self, batch: Batch, states: States, places: torch.Tensor, counts: torch.Tensor, soft: float, hard: float,
        greedy: float,
    ) -> Targets:  # fmt: skip
        """Return targets of the drafts that count [B, S], which predict the tokens after `places` [B, S].

        soft, hard, greedy: weights of the verifier's distribution, the text's token and the verifier's likeliest token.
        """
        columns = self.vocabulary.columns_of(gather_places(states.top_ids, places)[counts])
        log_probs = (
            gather_places(states.top_logits, places)[counts] - gather_places(states.log_sum, places)[counts][:, None]
        )
        shares = log_probs.exp() * (columns >= 0)
        weights = soft * shares
        weights[:, 0] += greedy * (columns[:, 0] >= 0)
        truth = self.truth(batch, places, counts)
        if hard:
            columns = torch.cat([columns, truth[:, None]], dim=1)
            weights = torch.cat([weights, hard * (truth >= 0)[:, None]], dim=1)
            shares = F.pad(shares, (0, 1))
        return Targets(columns.clamp(min=0), weights, shares, truth)

    def truth(self, batch: Batch, places: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the columns of the text's tokens after `places` [B, S] that count, [M]; -1 if none is known."""
        following = F.pad(self.vocabulary.columns_of(batch.tokens[:, 1:]), (0, 1), value=-1)
        return gather_places(following, places)[counts]

    def scaled(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states [..., n] in the head's type, times the model's scale of logits."""
        scaled: torch.Tensor = hidden.to(self._head[0].dtype) * self._logit_scale
        return scaled

    def head_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [..., H] in fp32 of hidden states [..., n]."""
        logits: torch.Tensor = F.linear(hidden.to(self.head.dtype), self.head).float() * self._logit_scale
        return logits


class DepthDistillation(Distillation):
    """A loss that is a weighted mean or sum of the losses of drafts' depths.

    means, shares: names of the metrics to report, as the mean over depths, and for each depth.
    """

    means: tuple[str, ...] = ("ce",)
    shares: tuple[str, ...] = ("hit",)

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """The arguments are those of `Distillation`."""
        super().__init__(*arguments, **named)
        self._losses = torch.compile(self.losses, dynamic=False) if self._compiled else self.losses

    @abstractmethod
    def losses(self, batch: Batch, states: States) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Return the loss of every depth, [N], and metrics by name and depth, [N] each."""

    @abstractmethod
    def total(self, losses: torch.Tensor, metrics: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of `losses`."""

    def loss(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the loss, and its metrics: means over depths, and shares of drafts by depth, as `hit 1`."""
        batch = batch.to(self.verifier.device)
        with autocast_of(self.verifier):
            losses, metrics = self._losses(batch, self.states(batch))
        named = {name: metrics[name].mean().item() for name in self.means}
        for name in self.shares:
            named |= {f"{name} {depth}": share for depth, share in enumerate(metrics[name].tolist(), 1)}
        return self.total(losses, metrics), named


class ChainAttention:
    """Attention of parallel drafts: call it once a step, in order. `redraft.export.drafters.layer` has the shapes.

    Each draft reads the text's rows up to its start, and its own later rows. Step 0 computes all L rows of a text.
    Later steps have only the S rows of chains that start at `starts` [B, S].
    """

    def __init__(self, config: LayerConfig, starts: torch.Tensor) -> None:
        self._config, self._starts = config, starts
        self._keys: list[torch.Tensor] = []  # a step's rows, [B, Hq, L or S, D], key heads repeated
        self._values: list[torch.Tensor] = []

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend for one step's rows."""
        config = self._config
        q = q.unflatten(-1, (config.heads, config.head_dim)).transpose(1, 2)
        k, v = (
            x.unflatten(-1, (config.kv_heads, config.head_dim))
            .transpose(1, 2)
            .repeat_interleave(config.heads // config.kv_heads, dim=1)
            for x in (k, v)
        )
        self._keys.append(k)
        self._values.append(v)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True) if len(self._keys) == 1 else self._later(q)
        return out.transpose(1, 2).flatten(-2)

    def _later(self, q: torch.Tensor) -> torch.Tensor:
        scale = self._config.head_dim**-0.5
        rows = self._keys[0].shape[2]
        hidden = torch.arange(rows, device=q.device) > self._starts[:, None, :, None]  # [B, 1, S, L]
        first = (q @ self._keys[0].mT * scale).masked_fill(hidden, float("-inf"))  # [B, Hq, S, L]
        own = [(q * k).sum(-1, keepdim=True) * scale for k in self._keys[1:]]  # [B, Hq, S, 1] each
        weights = torch.cat([first, *own], dim=-1).softmax(-1)
        out = weights[..., :rows].to(q.dtype) @ self._values[0]
        for step, value in enumerate(self._values[1:]):
            out = out + weights[..., rows + step, None].to(q.dtype) * value
        return out
