"""Medusa's heads (Cai et al. 2024, section 2.1.1), with the verifier's own head for all of them, and their draft graph.

With h the verifier's last hidden state at a position and M its head, head k has the logits M (h + SiLU(W_k h + b_k)).
The graph has one product for all heads, one with the verifier's head, and the static tree of candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from redraft.export.checkpoint import model_config
from redraft.export.checkpoint.model_config import decoder_shape
from redraft.export.drafters.draft_graph import Sampling
from redraft.export.drafters.draft_head import DraftHead
from redraft.export.drafters.layer import DrafterConfig
from redraft.export.drafters.static_tree import Accuracies, HeadsExporter, StaticTree, check_heads
from redraft.export.drafters.writing import Target
from redraft.export.graph import tracing
from redraft.methods.static_tree import Node, StaticTreeShape


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(DrafterConfig):
    """A drafter's configuration.

    heads: number of heads.
    rank_accuracies: how often the candidate of a rank is the verifier's token, by head and rank; measured after
           training.
    """

    heads: int = 4
    rank_accuracies: Accuracies = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heads("heads", self.heads, self.rank_accuracies)


def configuration_of(verifier: Any, vocab_size: int, **own: Any) -> MedusaConfig:
    """Return a drafter's configuration for a verifier of this transformers configuration, with the fields in `own`."""
    return MedusaConfig(
        hidden_size=decoder_shape(verifier).hidden, vocab_size=vocab_size,
        logit_scale=model_config.logit_scale(verifier), **own,
    )  # fmt: skip


class MedusaHeads(nn.Module):
    """W and b of all heads, in one product. They begin at zero, so each head begins as the verifier's own."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        self.heads = nn.Linear(config.hidden_size, config.heads * config.hidden_size)
        nn.init.zeros_(self.heads.weight)
        nn.init.zeros_(self.heads.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the states of all heads [..., K, n], which the verifier's head reads, of hidden states [..., n]."""
        added = F.silu(self.heads(hidden)).unflatten(-1, (self.config.heads, -1))
        out: torch.Tensor = hidden.unsqueeze(-2) + added
        return out


class MedusaExporter(HeadsExporter[MedusaConfig]):
    """The exporter of Medusa's heads."""

    config, module = MedusaConfig, MedusaHeads
    heads = "heads"

    def random_config(self, target: Target, verifier: Any) -> MedusaConfig:
        """Return the configuration of random heads."""
        config = configuration_of(verifier, target.vocabulary, **self.random_heads(target.options))
        return self.assumed(config, target.options)

    def shape(self, target: Target, config: MedusaConfig) -> StaticTreeShape:
        """Return the graph's sizes."""
        return StaticTreeShape(**self.sizes(target, config))

    def graph(self, target: Target, module: MedusaHeads, shape: StaticTreeShape) -> nn.Module:
        """Return the draft graph's computation."""
        return _Draft(module, shape, self.tree(module.config, target.options))


EXPORTER = MedusaExporter


class _Draft(nn.Module):
    """The draft graph's computation, with inputs and outputs in the order of `draft_inputs` and `draft_outputs`."""

    def __init__(self, heads: MedusaHeads, shape: StaticTreeShape, tree: Mapping[Node, float]) -> None:
        super().__init__()
        self.drafter, self.shape, self.static = heads, shape, StaticTree(shape, tree)
        self.head = DraftHead(shape.draft_vocabulary, shape.hidden, shape.head_rank, tracing.TORCH[shape.dtype])
        self._scale = heads.config.logit_scale

    def forward(
        self, pending_features: torch.Tensor, num_pending: torch.Tensor, tokens: torch.Tensor, sampling: Sampling,
        tables: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        hidden = tracing.gather_rows(pending_features, (num_pending - 1)[:, None])  # [B, 1, n]
        states = self.drafter(hidden)[:, 0, : self.shape.steps]  # [B, N, n]
        logits = self.head(states if self._scale == 1.0 else states * self._scale).float()
        return (*self.static(logits, tokens[:, None], sampling, tables), logits)
