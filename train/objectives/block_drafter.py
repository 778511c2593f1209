"""The losses of drafters that draft a block of tokens in one pass: many blocks over one text at once.

A block that starts at position s reads the verifier's hidden states up to s, and begins with the text's token at s + 1,
its anchor. Its row for depth d predicts the token at s + d + 1. Blocks do not see each other.

- DFlash (Chen et al. 2026): CE with the text's token. Depth d weighs exp(-(d - 1) / γ), since later tokens count only
  if those before are right.
- DSpark (DeepSeek 2026, DeepSpec): 0.1 CE + 0.9 Σ |p - q| with the same weights. The row of depth d knows the text's
  token before. The confidence head learns Σ min(p, q), the chance that a token drawn from q is accepted, by binary
  cross-entropy.
- JetSpec (Hu et al. 2026, equations 8 and 9): CE with the verifier's distribution, all depths alike.

p is the verifier's distribution over its 64 likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf

import torch
import torch.nn.functional as F

from redraft.errors import UsageError
from redraft.export.drafters.block_drafter import BlockConfig, BlockDrafter
from redraft.export.drafters.layer import Attend
from redraft.train.batches import Batch, gather_places
from redraft.train.distillation import DepthDistillation, Targets
from redraft.train.drafter_config import Init, LayerTable
from redraft.train.linear_loss import LinearLoss, Overlap, linear_cross_entropy
from redraft.train.states import States
from redraft.train.verifier_model import drafter_embedding


@dataclass(frozen=True)
class BlockTable(LayerTable):
    """Loss and shape.

    layers:   of the drafter.   steps: tokens that a block drafts.   token_rank: of W_1; 0 is the method's own.
    hidden_states: the verifier's of a row of context; none takes three, the highest of which enters its last layer.
    blocks:   of each text, at starts that are drawn anew in each step; 0 takes all starts.
    decay:    γ of the depths' weights; 0 for equal ones.
    soft, hard, greedy: weights of the CE with the verifier's distribution, with the text's token, and with the
              verifier's likeliest token.   overlap: of Σ |p - q|.   confidence: of the confidence head's loss.
    init:     `layers` begins with the verifier's last layers, and a first attention by distance alone.
    """

    layers: int = 1
    steps: int = 7
    token_rank: int = 0
    hidden_states: tuple[str, ...] = ()
    blocks: int = 64
    decay: float = 0.0
    soft: float = 0.0
    hard: float = 0.0
    greedy: float = 0.0
    overlap: float = 0.0
    confidence: float = 0.0
    init: Init = "layers"

    def __post_init__(self) -> None:
        losses = (self.soft, self.hard, self.greedy, self.overlap)
        if not all(0 <= weight < inf for weight in (*losses, self.confidence, self.decay)) or not sum(losses):
            raise UsageError(
                "drafter.soft, hard, greedy, overlap, confidence and decay must be 0 or more, and one of the first "
                "four positive"
            )
        if min(self.blocks, self.token_rank) < 0:
            raise UsageError(f"drafter.blocks and token_rank must be 0 or more, not {self.blocks}, {self.token_rank}")

    def weights(self, depths: int) -> torch.Tensor:
        """Return the weights of so many depths, which sum up to 1."""
        falling = torch.exp(-torch.arange(depths) / self.decay) if self.decay else torch.ones(depths)
        return falling / falling.sum()


class BlockObjective(DepthDistillation):
    """The loss of block drafters. The depth of a row is the number of its token in the block."""

    module = BlockDrafter
    drafter: BlockDrafter
    table: BlockTable

    @staticmethod
    def lookahead_of(config: BlockConfig, table: BlockTable) -> int:
        """Return the tokens of a block."""
        return config.steps

    @staticmethod
    def hidden_states_of(config: BlockConfig) -> tuple[str, ...]:
        """Return those of the context: the loss reads no other, so none need be kept."""
        return config.hidden_states

    def losses(self, batch: Batch, states: States) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Return the mean loss of every depth over its drafts, and metrics `ce` in nats and `hit`."""
        batch, losses, metrics = self._some(batch), [], []
        for depth, hidden in enumerate(self._rows(batch, states).unbind(2), 1):
            places, real = batch.places(depth)
            count = real.sum().clamp(min=1)  # short texts may have no token at this depth
            before = self._before(batch, depth)[real]
            targets, found = self._tokens(batch, states, hidden[real], before, places, real)
            loss = found.loss + self._confidence(hidden[real], before, targets, found)
            losses.append(loss / count)
            metrics.append(torch.stack([targets.cross_entropy(found).sum() / count, targets.hits(found).sum() / count]))
        return torch.stack(losses), dict(zip(("ce", "hit"), torch.stack(metrics, 1).detach(), strict=True))

    def total(self, losses: torch.Tensor, metrics: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the weighted mean over depths."""
        return (self.table.weights(len(losses)).to(losses.device) * losses).sum()

    def drafts(self, batch: Batch, states: States) -> Iterator[torch.Tensor]:
        """Yield the logits of every depth, [B, S, H] each."""
        for depth, hidden in enumerate(self._rows(batch, states).unbind(2), 1):
            logits = self.head_logits(hidden)
            if self.drafter.tokens is not None and self.drafter.token_head is not None:
                logits = logits + self.drafter.token_head(self.drafter.tokens(self._before(batch, depth))).float()
            yield logits

    def _some(self, batch: Batch) -> Batch:
        """Return the batch with as many starts as the table has blocks, by torch's generator; real ones come first."""
        wanted, starts = self.table.blocks, batch.starts
        if not wanted or starts.shape[1] <= wanted:
            return batch
        drawn = torch.rand(starts.shape, device=starts.device) + (starts >= 0)
        return replace(batch, starts=starts.gather(1, drawn.topk(wanted).indices.sort().values))

    def _rows(self, batch: Batch, states: States) -> torch.Tensor:
        """Return the states of every row of every block, [B, S, N, n], which the head reads."""
        config, starts = self.drafter.config, batch.starts.clamp(min=0)
        embed = drafter_embedding(self.verifier)
        hidden = [states.hidden[name].to(embed.weight.dtype) for name in config.hidden_states]
        anchors = embed(self._token_at(batch, starts + 1))
        rows, length = config.rows(config.steps), hidden[0].shape[1]
        own = (starts + 1)[:, :, None] + torch.arange(rows, device=starts.device)  # [B, S, R]
        context = torch.arange(length, device=starts.device).expand(len(starts), -1)
        positions = torch.cat([context, own.flatten(1)], dim=1)
        attend = block_attention(config, starts, length)
        found: torch.Tensor = self.drafter(torch.cat(hidden, dim=-1), anchors, positions, rows, attend)
        return found

    def _before(self, batch: Batch, depth: int) -> torch.Tensor:
        """Return the text's token before that of a depth, of every draft, [B, S]."""
        return self._token_at(batch, batch.starts.clamp(min=0) + depth)

    @staticmethod
    def _token_at(batch: Batch, places: torch.Tensor) -> torch.Tensor:
        return gather_places(batch.tokens, places.clamp(max=batch.tokens.shape[1] - 1))

    def _tokens(
        self, batch: Batch, states: States, hidden: torch.Tensor, before: torch.Tensor, places: torch.Tensor,
        real: torch.Tensor,
    ) -> tuple[Targets, LinearLoss]:  # fmt: skip
        """Return the targets of the M drafts `real` [B, S] of a depth, and their loss.

        hidden: [M, n].   before: tokens [M].
        """
        table, drafter = self.table, self.drafter
        targets = self.targets(batch, states, places, real, table.soft, table.hard, table.greedy)
        weights = torch.full_like(targets.shares[:, 0], table.overlap)
        overlap = Overlap(targets.shares, weights) if table.overlap else None
        read, own_states, own_head = self.scaled(hidden), None, None
        if drafter.tokens is not None and drafter.token_head is not None:
            own_states, own_head = (x.to(read.dtype) for x in (drafter.tokens(before), drafter.token_head.weight))
        targeted = targets.columns, targets.weights
        return targets, linear_cross_entropy(read, self.head, own_states, own_head, *targeted, overlap=overlap)

    def _confidence(
        self, hidden: torch.Tensor, before: torch.Tensor, targets: Targets, found: LinearLoss
    ) -> torch.Tensor | float:
        """Return the weighted sum of the confidence head's losses; 0 without one."""
        drafter = self.drafter
        if drafter.confidence is None:
            return 0.0
        accepted = torch.minimum((found.chosen - found.log_sum[:, None]).exp(), targets.shares).sum(-1)
        sure = drafter.confidences(hidden, None if drafter.tokens is None else drafter.tokens(before)).float()
        loss: torch.Tensor = F.binary_cross_entropy_with_logits(sure, accepted, reduction="sum")
        return self.table.confidence * loss


def block_attention(config: BlockConfig, starts: torch.Tensor, length: int) -> Callable[[int], Attend]:
    """Return the attention of blocks at starts [B, S] over a text's rows, in any layer: `BlockLayer.over` takes it."""
    later = torch.arange(length, device=starts.device) > starts[:, None, :, None, None]  # [B, 1, S, 1, L]
    scale = config.head_dim**-0.5

    def heads(x: torch.Tensor, count: int) -> torch.Tensor:
        split: torch.Tensor = x.unflatten(-1, (count, config.head_dim)).transpose(1, 2)
        return split.repeat_interleave(config.heads // count, dim=1)  # [B, Hq, rows, D]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        blocks = starts.shape[1], (q.shape[1] - length) // starts.shape[1]  # S, R
        q = heads(q[:, length:], config.heads)
        (context_k, own_k), (context_v, own_v) = (
            heads(x, config.kv_heads).split([length, q.shape[2]], dim=2) for x in (k, v)
        )
        q, own_k, own_v = (x.unflatten(2, blocks) for x in (q, own_k, own_v))  # [B, Hq, S, R, D]
        first = (q.flatten(2, 3) @ context_k.mT).unflatten(2, blocks).masked_fill(later, -inf)
        own = q @ own_k.mT  # [B, Hq, S, R, R]
        if config.causal:
            own = own.masked_fill(torch.ones_like(own[0, 0, 0], dtype=torch.bool).triu(1), -inf)
        shares = (torch.cat([first, own], dim=-1).float() * scale).softmax(-1).to(v.dtype)
        of_context, of_own = shares.split([length, blocks[1]], dim=-1)
        out: torch.Tensor = of_context.flatten(2, 3) @ context_v + (of_own @ own_v).flatten(2, 3)
        return out.transpose(1, 2).flatten(-2)

    return lambda layer: attend
