"""The static tree of heads' candidates in draft graphs, and its choice when a drafter is built."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from redraft import names
from redraft.errors import CheckpointError, UsageError
from redraft.export.drafters.checkpoint import DrafterCheckpoint
from redraft.export.drafters.draft_graph import Sampling
from redraft.export.drafters.exporter import C, DraftExporter
from redraft.export.drafters.level_tree import below, ordered_tree
from redraft.export.drafters.writing import Target
from redraft.export.graph import tracing
from redraft.methods.static_tree import MOST_HEADS, Node, StaticTreeBuild, StaticTreeShape, best_tree

Accuracies = tuple[tuple[float, ...], ...]
"""The share of candidates that are the verifier's token, by head and rank."""
_RANDOM_RANKS = 10
_LEAST = 1e-9
"""Least product of accuracies, for a finite logarithm."""


def check_heads(field: str, heads: int, accuracies: Accuracies) -> None:
    """Raise CheckpointError for a number of heads, in this field, or for accuracies that cannot be."""
    if not 1 <= heads <= MOST_HEADS:
        raise CheckpointError(f"{field} must be a number from 1 to {MOST_HEADS}, not {heads}")
    if any(not 0 <= share <= 1 for shares in accuracies for share in shares):
        raise CheckpointError("rank_accuracies must be shares from 0 to 1")


def assumed_accuracies(heads: int, tokens: int, width: int | None) -> Accuracies:
    """Return accuracies of random heads for so many tokens: each rank is right half as often as the one before.

    width: candidates that a tree needs; None for the usual number.
    """
    ranks = min(max(_RANDOM_RANKS, width or 0), tokens)
    return (tuple(0.5 ** (rank + 1) for rank in range(ranks)),) * heads


def tree_of(heads: int, measured: Accuracies, options: StaticTreeBuild, drafted: int) -> dict[Node, float]:
    """Return the best tree within the options, for heads with these accuracies that can draft so many tokens.

    Raises CheckpointError for more levels than heads, more candidates than have accuracies, or no accuracies at all,
    and UsageError for a node with more children than tokens.
    """
    ranks = min(map(len, measured), default=0)
    if len(measured) != heads or not ranks:
        raise CheckpointError(
            f"the drafter has accuracies of {len(measured)} heads, expected those of {heads}",
            "write it again with `redraft train publish`",
        )
    steps, width = options.steps or heads, options.width or min(ranks, drafted)
    if steps > heads:
        raise CheckpointError(
            f"the drafter has {heads} heads, which draft no tree of {steps} levels",
            f"build it with at most steps={heads}",
        )
    if width > ranks:
        raise CheckpointError(
            f"the drafter has accuracies of {ranks} candidates of a head, not of {width}",
            f"build it with at most width={ranks}",
        )
    if width > drafted:
        raise UsageError(
            f"a node cannot have {width} children of {drafted} tokens", "lower width, or raise draft_vocabulary"
        )
    return best_tree([shares[:width] for shares in measured[:steps]], options.nodes)


class HeadsExporter(DraftExporter[C]):
    """The base of exporters of heads.   heads: field of the configuration with their number.

    The configuration also has `rank_accuracies`.
    """

    heads: ClassVar[str]
    logits = names.CHAIN_LOGITS

    def configure(self, drafter: DrafterCheckpoint, options: StaticTreeBuild) -> C:
        """Return the drafter's configuration. Raises like `tree_of` if its heads do not cover the options."""
        config = super().configure(drafter, options)
        self.tree(config, options)
        return config

    def tree(self, config: Any, options: StaticTreeBuild) -> dict[Node, float]:
        """Return the tree of a drafter. Raises like `tree_of`."""
        drafted = config.limited(options.draft_vocabulary)
        return tree_of(getattr(config, self.heads), config.rank_accuracies, options, drafted)

    def random_heads(self, options: StaticTreeBuild) -> dict[str, int]:
        """Return the number of heads of a random drafter, if it is not the configuration's usual one."""
        return {self.heads: options.steps} if options.steps else {}

    def assumed(self, config: Any, options: StaticTreeBuild) -> C:
        """Return the configuration of a random drafter with the accuracies that its tree is made of."""
        accuracies = assumed_accuracies(getattr(config, self.heads), config.vocab_size, options.width)
        found: C = replace(config, rank_accuracies=accuracies)
        return found

    def sizes(self, target: Target, config: Any) -> dict[str, Any]:
        """Return the fields of a `StaticTreeShape`."""
        return {**super().sizes(target, config), "tree": tuple(self.tree(config, target.options))}


class StaticTree(nn.Module):
    """Makes the tree from the heads' logits.

    Inside, the K - 1 nodes are in order of their levels.

    parents:    places of their parents among them from 1 on, [1, K - 1]; 0 is the root.
    candidates: their places among the candidates of all heads, [K - 1].
    scores:     their log probabilities if candidates are drawn, [1, K - 1].
    """

    parents: torch.Tensor
    candidates: torch.Tensor
    scores: torch.Tensor

    def __init__(self, shape: StaticTreeShape, tree: Mapping[Node, float]) -> None:
        """tree: the nodes and their products of accuracies, largest first."""
        super().__init__()
        self.shape = shape
        nodes, scores = sorted(tree, key=len), _falling(tree)
        parents = [0 if len(path) == 1 else 1 + nodes.index(path[:-1]) for path in nodes]
        self.register_buffer("parents", torch.tensor([parents]))
        self.register_buffer("candidates", torch.tensor([(len(path) - 1) * shape.width + path[-1] for path in nodes]))
        self.register_buffer("scores", torch.tensor([[scores[path] for path in nodes]]))
        self._above = list[list[int]]()  # by level, the places of parents in the level before
        before: list[Node] = [()]
        for depth in range(1, shape.steps + 1):
            level = [path for path in nodes if len(path) == depth]
            self._above.append([before.index(path[:-1]) for path in level])
            before = level

    def forward(
        self, logits: torch.Tensor, root: torch.Tensor, sampling: Sampling, tables: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return tokens, parents and joint log probabilities [B, K] from logits [B, N, H] and roots [B, 1]."""
        shape, drawn = self.shape, sampling.drawn[:, None] > 0
        z = sampling.scaled(logits, tables)
        best, columns = z.topk(shape.width, -1)  # [B, N, R]
        log_probs = (best - torch.logsumexp(z, -1, keepdim=True)).flatten(1).index_select(1, self.candidates)
        columns = columns.flatten(1).index_select(1, self.candidates)  # [B, K - 1]
        joint = torch.where(drawn, self.scores, self._joint(log_probs))
        return ordered_tree(
            root, tracing.take(tables[-1], columns) if tables else columns,
            self.parents.expand(columns.shape[0], -1), joint, joint.topk(shape.nodes - 1, -1).indices,
        )  # fmt: skip

    def _joint(self, log_probs: torch.Tensor) -> torch.Tensor:
        """Return joint log probabilities of nodes from their own, [B, K - 1] each."""
        above, levels, begin = torch.zeros_like(log_probs[:, :1]), [], 0
        for places in self._above:
            end = begin + len(places)
            above = below(above.index_select(1, torch.tensor(places)), log_probs[:, begin:end])
            levels.append(above)
            begin = end
        return torch.cat(levels, dim=1)


def _falling(tree: Mapping[Node, float]) -> dict[Node, float]:
    """Return log probabilities of the nodes if candidates are drawn: of their accuracies, each below the one before.

    They order the tree as it is, whatever is drawn.
    """
    found, before = {}, torch.zeros(())
    for path, product in tree.items():
        before = below(before, torch.tensor(math.log(max(product, _LEAST))) - before)
        found[path] = before.item()
    return found
