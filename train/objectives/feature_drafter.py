"""The losses of drafters that predict features: several passes over a text, each on the drafter's own features.

A draft that starts at position s reads the real features up to s. Its pass i predicts the feature at s + i and the
token after it, from the feature that pass i - 1 predicted (the real one in pass 1) and the text's own token at s + i.
All positions of a text start a draft, so the features of pass i are those that a draft of i tokens has in decoding.

- EAGLE (Li et al. 2024, section 4.2): one pass with noise on the features, smooth ℓ1 of features and CE of tokens.
- HASS (Zhang et al. 2024, section 3): several passes, and a CE of the verifier's K likeliest tokens alone.
- EAGLE-3 (Li et al. 2025, section 3.1): several passes ("training-time test") without a loss of features, and a head of
  its own.
- GRIFFIN (Hu et al. 2025, section 4.1): training with one pass, then with two, then with three. A pass counts a token
  only if the text's token was among the k likeliest of the passes before (equations 2 and 3; `masks`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

import torch
import torch.nn.functional as F

from redraft.errors import UsageError
from redraft.export.drafters.feature_drafter import FeatureConfig, FeatureDrafter, Fusion, Guide, Outputs, Predicted
from redraft.train.batches import Batch, gather_places
from redraft.train.distillation import ChainAttention, DepthDistillation, Targets
from redraft.train.drafter_config import LayerTable
from redraft.train.linear_loss import Alignment, LinearLoss, linear_cross_entropy
from redraft.train.states import TOP_LOGITS, States
from redraft.train.verifier_model import drafter_embedding

MEASURED = 5
"""Least depth at which acceptance is measured."""
FeatureLoss = Literal["smooth_l1", "l1", "none"]
Masks = Literal["printed", "earlier"]
_DISTANCES = {"smooth_l1": F.smooth_l1_loss, "l1": F.l1_loss}


@dataclass(frozen=True)
class FeatureTable(LayerTable):
    """Loss and shape. Fields of the shape are FeatureConfig's; an empty fusion or outputs is the method's own.

    passes:   N.   step_weight: a pass weighs this times the pass before.   detach: True if no gradient goes from a pass
              to the one before.
    growing:  True to begin with one pass and add one after each N-th part of the steps; `top_weight` counts from the
              second one on (GRIFFIN).
    feature_loss, features: the distance of features, its mean over a feature's numbers, and its weight.
    soft, hard, greedy: weights of the CE with the verifier's distribution, with the text's token, and with the
              verifier's likeliest token.
    top, top_weight: number and weight of the verifier's likeliest tokens that count once more (HASS).
    aligned:  k of GRIFFIN's masks; 0 counts all tokens.
    masks:    which tokens a pass drops. `printed` (equations 2 and 3): those that it, or a pass before it in the same
              draft, has not among its k likeliest. `earlier`: those that passes before it missed, as its authors'
              program has it: pass 1 drops none, and pass n + 1 of a draft drops what pass n dropped, and its token
              if pass n of the draft that starts one position later missed the same token.
    noise:    features get a uniform number from -noise to noise each.
    head:     `own` if the drafter has a head of its own, `verifier` if it has the frozen rows of the verifier's; empty
              for what the method has.
    init:     `features` begins with the products of the verifier's last layer, outputs that add nothing to their
              inputs, a projection fitted to the next feature, and the verifier's head in place of its own.
    """

    passes: int = 1
    step_weight: float = 1.0
    detach: bool = False
    growing: bool = False
    feature_loss: FeatureLoss = "smooth_l1"
    features: float = 1.0
    soft: float = 0.1
    hard: float = 0.0
    greedy: float = 0.0
    top: int = 0
    top_weight: float = 0.0
    aligned: int = 0
    masks: Masks = "printed"
    noise: float = 0.0
    fusion_size: int = 0
    fusion: Literal["", Fusion] = ""
    outputs: Literal["", Outputs] = ""
    guides: tuple[Guide, ...] = ("fused", "token")
    head: Literal["", "own", "verifier"] = ""

    def __post_init__(self) -> None:
        if not 1 <= self.passes <= 16:
            raise UsageError(f"drafter.passes must be a number from 1 to 16, not {self.passes}")
        weights = (self.features, self.soft, self.hard, self.greedy, self.top_weight, self.noise)
        if not all(0 <= weight < inf for weight in weights) or not 0 < self.step_weight < inf:
            raise UsageError(
                "drafter.features, soft, hard, greedy, top_weight and noise must be 0 or more, step_weight above 0"
            )
        if min(self.top, self.aligned, self.fusion_size) < 0 or self.top > TOP_LOGITS:
            raise UsageError(f"drafter.top, aligned and fusion_size must be 0 or more, top at most {TOP_LOGITS}")
        if not self.soft + self.hard + self.greedy + self.top * self.top_weight > 0:
            raise UsageError("drafter: no loss of tokens", "set soft, hard, greedy, or top and top_weight")

    def passes_at(self, step: int, steps: int) -> int:
        """Return the passes of a step of so many."""
        return 1 + min(step, steps - 1) * self.passes // steps if self.growing else self.passes


class FeatureObjective(DepthDistillation):
    """The loss of drafters that predict features. A depth is a pass."""

    module = FeatureDrafter
    drafter: FeatureDrafter
    table: FeatureTable
    means = ("features", "ce")

    def __init__(self, verifier: Any, config: FeatureConfig, table: FeatureTable, *arguments: Any) -> None:
        """The arguments are those of `Distillation`. Raises UsageError for a loss that the drafter cannot have."""
        super().__init__(verifier, config, table, *arguments)
        if table.feature_loss != "none" and config.outputs == "normed":
            raise UsageError(
                "a drafter that feeds back its feature without the norm cannot learn the verifier's normed feature",
                "set drafter.feature_loss = 'none'",
            )
        self.shares = ("hit", "aligned") if table.aligned else ("hit",)
        self._passes_now = table.passes
        own = self.drafter.head
        if own is not None and table.init == "features":
            own.weight.data.copy_(self._head[0])

    @staticmethod
    def lookahead_of(config: FeatureConfig, table: FeatureTable) -> int:
        """Return the number of passes, and as many as acceptance is measured at."""
        return max(table.passes, MEASURED)

    @property
    def head(self) -> torch.Tensor:
        """The rows of the head for the draft vocabulary, [H, n]: the drafter's own, or the verifier's."""
        own = self.drafter.head
        return super().head if own is None else own.weight.to(super().head.dtype)

    def prepare(self, step: int, steps: int) -> bool:
        """Set the number of passes. Returns False: the parameters never change."""
        self._passes_now = self.table.passes_at(step, steps)
        return False

    def drafts(self, batch: Batch, states: States) -> Iterator[torch.Tensor]:
        """Yield the logits of every pass of every draft, [B, S, H] each."""
        for predicted in self._passes(batch, states, self.lookahead, noise=0.0):
            yield self.head_logits(predicted.token)

    def losses(self, batch: Batch, states: States) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Return the loss of every pass, and metrics.

        They are the distance of `features`, `ce` in nats, `hit`, the share `aligned` that counts, of the drafts whose
        tokens counted before, and the `number` of tokens that the loss is the mean of.
        """
        settings = self.table
        losses, metrics = [], []
        printed = settings.masks == "printed"
        counts = batch.starts >= 0  # of which all tokens counted so far, [B, S]
        for step, predicted in enumerate(self._passes(batch, states, self._passes_now, settings.noise)):
            places, real = batch.places(step + 1)
            rows = counts & real if printed else real  # the masks of other drafts need all of them
            before = counts[rows]
            found, targets = self._tokens(batch, states, predicted.token, places, rows, before)
            aligned = found.aligned
            counted = aligned if printed else before
            number = counted.sum()
            total = number.clamp(min=1)
            distance = self._distance(predicted.feature[rows], gather_places(states.last, places)[rows])[counted]
            losses.append((found.loss + settings.features * distance.sum()) / total)
            seen = before.sum().clamp(min=1)
            ce, hits = targets.cross_entropy(found), targets.hits(found)
            shares_seen = [(values * before).sum() / seen for values in (ce, hits, aligned)]
            metrics.append(torch.stack([distance.sum() / total, *shares_seen, number]).detach())
            if settings.aligned:
                hit = torch.zeros_like(rows).masked_scatter(rows, aligned)
                counts = counts & (hit if printed else F.pad(hit[:, 1:], (0, 1)))
        named = ("features", "ce", "hit", "aligned", "number")
        return torch.stack(losses), dict(zip(named, torch.stack(metrics, 1), strict=True))

    def total(self, losses: torch.Tensor, metrics: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the weighted mean over passes that count a token, without a gradient if none does."""
        weights = self.table.step_weight ** torch.arange(len(losses), device=losses.device) * (metrics["number"] > 0)
        return (weights * losses).sum() / weights.sum() if weights.any() else losses.detach().sum()

    def _passes(self, batch: Batch, states: States, passes: int, noise: float) -> Iterator[Predicted]:
        """Yield the outputs of every pass of every draft, [B, S, n] each."""
        embed, starts = drafter_embedding(self.verifier), batch.starts.clamp(min=0)
        kept = (states.hidden[name].to(embed.weight.dtype) for name in self.drafter.config.hidden_states)
        features = torch.cat(list(kept), dim=-1)
        if noise:
            features = features + (torch.rand_like(features) * 2 - 1) * noise
        attend = ChainAttention(self.drafter.config, starts)
        positions = torch.arange(features.shape[1], device=features.device)
        predicted = self.drafter(
            self.drafter.inputs(features), embed(batch.tokens.roll(-1, 1)), positions, attend,
            lambda rows: gather_places(rows, starts),
        )  # fmt: skip
        yield predicted
        last = batch.tokens.shape[1] - 1
        for step in range(1, passes):
            feature = predicted.feature.detach() if self.table.detach else predicted.feature
            tokens = gather_places(batch.tokens, (starts + step + 1).clamp(max=last))
            predicted = self.drafter(feature, embed(tokens), starts + step, attend)
            yield predicted

    def _tokens(
        self, batch: Batch, states: States, hidden: torch.Tensor, places: torch.Tensor, rows: torch.Tensor,
        counts: torch.Tensor,
    ) -> tuple[LinearLoss, Targets]:  # fmt: skip
        """Return the loss of the M tokens `rows` [B, S] of a pass, and their targets.   counts: of these, bool [M]."""
        settings = self.table
        targets = self.targets(batch, states, places, rows, settings.soft, settings.hard, settings.greedy)
        if self._passes_now > 1 or not settings.growing:
            targets.weights[:, : settings.top] += settings.top_weight * targets.shares[:, : settings.top]
        targets.weights.mul_(counts[:, None])
        alone = settings.masks == "printed"
        alignment = Alignment(targets.truth, settings.aligned, alone) if settings.aligned else None
        read, head = self.scaled(hidden[rows]), self.head
        of_targets = targets.columns, targets.weights, alignment
        if self.drafter.head is None:
            return linear_cross_entropy(read, head, None, None, *of_targets), targets
        return linear_cross_entropy(read[:, :0].detach(), head[:, :0].detach(), read, head, *of_targets), targets

    def _distance(self, found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Return the distance of each of M features, the mean over its numbers, [M]."""
        if self.table.feature_loss == "none":
            return found.new_zeros(len(found))
        return _DISTANCES[self.table.feature_loss](found.float(), wanted.float(), reduction="none").mean(-1)
