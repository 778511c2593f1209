"""The draft graph of drafters that predict features: one call catches up on rows and grows a tree, level by level."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from redraft.errors import CheckpointError, UsageError
from redraft.export.drafters.checkpoint import DrafterCheckpoint
from redraft.export.drafters.draft_graph import DraftGraph, LevelAttention, Pending, Sampling
from redraft.export.drafters.draft_head import check_verifiers
from redraft.export.drafters.exporter import DraftExporter
from redraft.export.drafters.feature_drafter import FeatureConfig, FeatureDrafter
from redraft.export.drafters.layer import with_sizes
from redraft.export.drafters.level_tree import LevelTree, drawn_ranks
from redraft.export.drafters.writing import Target
from redraft.export.graph import tracing
from redraft.methods.feature_tree import FeatureTreeBuild, FeatureTreeShape


class FeatureTreeExporter(DraftExporter[FeatureConfig]):
    """The exporter of the family. A row's `form` makes its drafters, and its trees are `static` or not."""

    config, module = FeatureConfig, FeatureDrafter

    def configure(self, drafter: DrafterCheckpoint, options: FeatureTreeBuild) -> FeatureConfig:
        """Return the drafter's configuration. Raises CheckpointError for a drafter of another form."""
        method = self.method.id
        if "fusion" not in drafter.config:
            raise CheckpointError(
                f"{drafter.path} is a drafter of {drafter.method}, which {method} cannot use",
                f"leave out method={method}",
            )
        config = super().configure(drafter, options)
        expected = _kind(replace(config, **self.row.form))
        if drafter.method != method and (found := _kind(config)) != expected:
            raise CheckpointError(
                f"{drafter.path} is no drafter of {method}: it has {found}, expected {expected}",
                f"leave out method=, its own is {drafter.method}",
            )
        return config

    def random_config(self, target: Target, verifier: Any) -> FeatureConfig:
        """Return the configuration of a random drafter of the row's form."""
        states = self.method.hidden_states
        return with_sizes(FeatureConfig, verifier, target.vocabulary, hidden_states=states, **self.row.form)

    def shape(self, target: Target, config: FeatureConfig) -> FeatureTreeShape:
        """Return the graph's sizes. Raises UsageError for options that do not fit a head of its own."""
        options, drafted = target.options, config.limited(target.options.draft_vocabulary)
        if config.own_head and drafted != config.draft_size:
            raise UsageError(
                f"drafter {target.name} has a head of its own for {config.draft_size} tokens",
                "leave out draft_vocabulary",
            )
        if config.own_head:
            check_verifiers(target.name, options.head_rank, "a head that was trained with the drafter")
        width = min(options.width, drafted)
        return FeatureTreeShape(
            **self.sizes(target, config),
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            steps=options.steps,
            width=width,
            nodes=options.tree_nodes(width),
            static=self.row.static,
            hidden_states=config.hidden_states,
        )

    def graph(self, target: Target, module: FeatureDrafter, shape: FeatureTreeShape) -> nn.Module:
        """Return the draft graph's computation."""
        return _Draft(module, module.config, shape, target.verifier.shape.max_positions)


EXPORTER = FeatureTreeExporter


def _kind(config: FeatureConfig) -> str:
    """Return what tells drafters of one method from those of another."""
    return f"a fusion {config.fusion!r} and {'two outputs' if config.outputs == 'doubled' else 'one output'}"


class _Draft(DraftGraph[FeatureDrafter]):
    """The draft graph's computation."""

    def rows(self, *rows: Any) -> LevelAttention:
        """Return rows whose levels branch."""
        return LevelAttention(self.drafter.config, *rows)

    def draft(
        self, pending: Pending, rows: LevelAttention, sampling: Sampling, tables: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Grow the tree level by level."""
        shape, drafter = self.shape, self.drafter
        read = drafter.inputs(pending.features), self.embed(pending.tokens), pending.positions
        predicted = drafter(*read, rows.catch_up(), rows.last)
        tree = LevelTree(shape.width, sampling.drawn, drawn_ranks(shape.width), shape.static)
        chain = [self.logits(predicted.token)]
        tree.grow(sampling.scaled(chain[0], tables))
        for step in range(1, shape.steps):
            parents, columns = tree.best()
            best = tracing.take(tables[-1], columns) if tables else columns
            level = rows.next_step() if shape.width == 1 else rows.next_level(shape.width, parents)
            predicted = drafter(tracing.gather_rows(predicted.feature, parents), self.embed(best), *level)
            logits = self.logits(predicted.token)  # [B, W, H]
            chain.append(logits[:, :1])
            keys = sampling.keys[:, step : step + 1].expand(-1, shape.width, -1)
            tree.grow(sampling._replace(keys=keys).scaled(logits, tables))
        return (*tree.whole(rows.last_token(pending.tokens), shape.nodes, tables), torch.cat(chain, 1))
