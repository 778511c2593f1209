"""Heads of one layer each on the verifier's trunk (Gloeckle et al. 2024, section 2), and their draft graph.

With z_t the output of the verifier's last layer but one at position t, M its head and N its final norm, head i has the
logits

    M N(Layer_i(z_1 … z_t))                                  of the token at t + 1 + i

M and N belong to the verifier. The module has a copy of N's gains, since graphs need them. One call of the graph
catches up on rows, and the last row gives the tree of all heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from redraft.errors import CheckpointError
from redraft.export.checkpoint.model_config import decoder_shape
from redraft.export.drafters.draft_graph import ChainAttention, DraftGraph, GraphRotary, Pending, Sampling
from redraft.export.drafters.layer import Attend, DrafterLayer, Keep, LayerConfig, all_rows, with_sizes
from redraft.export.drafters.static_tree import Accuracies, HeadsExporter, StaticTree, check_heads
from redraft.export.drafters.writing import Target
from redraft.export.graph import modules, tracing
from redraft.methods.multi_head import MultiHeadShape
from redraft.methods.static_tree import Node


@dataclass(frozen=True, kw_only=True)
class MultiHeadConfig(LayerConfig):
    """A drafter's configuration: the shape of each layer, and these fields.

    draft_heads:     number of heads, without the verifier's own.
    hidden_states:   of the verifier, the one that the heads read: `10` is the output of the layer with index 10.
    rank_accuracies: how often the candidate of a rank is the verifier's token, by head and rank; measured after
                     training.
    """

    draft_heads: int = 3
    hidden_states: tuple[str, ...] = ()
    rank_accuracies: Accuracies = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heads("draft_heads", self.draft_heads, self.rank_accuracies)
        if len(self.hidden_states) != 1 or not self.hidden_states[0].isdecimal():
            raise CheckpointError(f"hidden_states must be the number of one layer, not {list(self.hidden_states)}")

    def together(self, heads: int) -> LayerConfig:
        """Return the shape of one attention that is that of so many layers."""
        return replace(self, heads=heads * self.heads, kv_heads=heads * self.kv_heads)


def trunk_state(layers: int) -> str:
    """Return the hidden state that heads read of a verifier. Raises CheckpointError if it has one layer."""
    if layers < 2:
        raise CheckpointError("the verifier has one layer, so no trunk before its last layer")
    return str(layers - 2)


def configuration_of(verifier: Any, vocab_size: int, **own: Any) -> MultiHeadConfig:
    """Return a drafter's configuration for a verifier of this transformers configuration, with the fields in `own`.

    A size of 0 is the verifier's.
    """
    states = (trunk_state(decoder_shape(verifier).layers),)
    return with_sizes(MultiHeadConfig, verifier, vocab_size, hidden_states=states, **own)


class MultiHeadDrafter(nn.Module):
    """The layers of all heads, and a copy of the verifier's final norm, which training leaves as it is."""

    def __init__(self, config: MultiHeadConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.draft_heads))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm.requires_grad_(False)

    def head(
        self, number: int, trunk: torch.Tensor, positions: torch.Tensor, attend: Attend, keep: Keep = all_rows
    ) -> torch.Tensor:
        """Return the states [B, R, n] of one head, from 0, which the verifier's head reads. `forward` has the rest."""
        out: torch.Tensor = self.norm(self.layers[number](trunk, positions, attend, keep))
        return out

    def forward(
        self, trunk: torch.Tensor, positions: torch.Tensor, attend: Attend, keep: Keep = all_rows,
        heads: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Return the states [B, R, N, n] of the first `heads` heads, all by default, for the rows that `keep` selects.

        trunk: states [B, T, n] at `positions`.   attend: of `together`, since all layers attend at once.
        """
        layers: list[Any] = list(self.layers[:heads])
        q, k, v = (torch.cat(parts, dim=-1) for parts in zip(*(layer.read(trunk) for layer in layers), strict=True))
        together, rotary = self.config.together(len(layers)), layers[0].rotary
        q, k = rotary(q, positions, together.heads), rotary(k, positions, together.kv_heads)
        attended, residual = keep(attend(q, k, v)).chunk(len(layers), dim=-1), keep(trunk)
        written = [layer.write(residual, part) for layer, part in zip(layers, attended, strict=True)]
        out: torch.Tensor = self.norm(torch.stack(written, dim=-2))
        return out


class MultiHeadExporter(HeadsExporter[MultiHeadConfig]):
    """The exporter of heads on the trunk."""

    config, module = MultiHeadConfig, MultiHeadDrafter
    heads = "draft_heads"

    def random_config(self, target: Target, verifier: Any) -> MultiHeadConfig:
        """Return the configuration of random heads, which read the hidden state of the method's specification."""
        config = configuration_of(verifier, target.vocabulary, **self.random_heads(target.options))
        return self.assumed(replace(config, hidden_states=self.method.hidden_states), target.options)

    def shape(self, target: Target, config: MultiHeadConfig) -> MultiHeadShape:
        """Return the graph's sizes. It has the heads that the tree reaches."""
        sizes = self.sizes(target, config)
        kv_heads = config.together(max(map(len, sizes["tree"]))).kv_heads
        return MultiHeadShape(**sizes, kv_heads=kv_heads, head_dim=config.head_dim, hidden_states=config.hidden_states)

    def graph(self, target: Target, module: MultiHeadDrafter, shape: MultiHeadShape) -> nn.Module:
        """Return the draft graph's computation."""
        tree = self.tree(module.config, target.options)
        return _Draft(module, module.config, shape, target.verifier.shape.max_positions, tree)


EXPORTER = MultiHeadExporter


class _Draft(DraftGraph[MultiHeadDrafter]):
    """The draft graph's computation. Heads that the tree does not reach are left out."""

    def __init__(
        self, drafter: MultiHeadDrafter, config: MultiHeadConfig, shape: MultiHeadShape, max_positions: int,
        tree: Mapping[Node, float],
    ) -> None:  # fmt: skip
        super().__init__(drafter, config, shape, max_positions)
        self.static = StaticTree(shape, tree)
        self._together = config.together(shape.steps)

    def _prepare(self, drafter: MultiHeadDrafter, positions: int) -> None:
        """Replace rotation and norms by single operators. All layers have the same rotation."""
        rotary = GraphRotary(drafter.layers[0].rotary, positions, tracing.TORCH[self.shape.dtype])
        for layer in drafter.layers:
            layer.rotary = rotary
        modules.replace_rms_norms(drafter)

    def rows(self, *rows: Any) -> ChainAttention:
        """Return rows that all layers attend for at once."""
        return ChainAttention(self._together, *rows)

    def draft(
        self, pending: Pending, rows: ChainAttention, sampling: Sampling, tables: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Make the tree of all heads' candidates after the last row."""
        read = pending.features, pending.positions
        states = self.drafter(*read, rows.catch_up(), rows.last, self.shape.steps)
        logits = self.logits(states.squeeze(1))  # [B, N, H]
        return (*self.static(logits, rows.last_token(pending.tokens), sampling, tables), logits)
