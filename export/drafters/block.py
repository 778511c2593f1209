"""The draft graph of drafters that draft a block in one pass: one call catches up on rows and drafts a tree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from redraft.errors import CheckpointError
from redraft.export.checkpoint.sources import AnySource, DrafterSource, RowsSource
from redraft.export.drafters.block_drafter import BlockConfig, BlockDrafter
from redraft.export.drafters.checkpoint import DrafterCheckpoint
from redraft.export.drafters.draft_graph import DraftGraph, DraftRows, GraphRotary, Pending, Sampling
from redraft.export.drafters.draft_vocabulary import DraftVocabulary
from redraft.export.drafters.exporter import DraftExporter
from redraft.export.drafters.layer import Attend, with_sizes
from redraft.export.drafters.level_tree import LevelTree, drawn_ranks, likeliest
from redraft.export.drafters.writing import Target, stem
from redraft.export.graph import modules, tracing
from redraft.export.graph.tree_attention import tree_attention
from redraft.methods.block import BlockBuild, BlockShape


class BlockExporter(DraftExporter[BlockConfig]):
    """The exporter of the family. A row's `form` makes its drafters."""

    config, module = BlockConfig, BlockDrafter

    def configure(self, drafter: DrafterCheckpoint, options: BlockBuild) -> BlockConfig:
        """Return the drafter's configuration. Raises CheckpointError for a drafter of another form, or more steps."""
        config = super().configure(drafter, options)
        expected, found = (_kind(one) for one in (replace(config, **self.row.form), config))
        if found != expected:
            raise CheckpointError(
                f"{drafter.path} is no drafter of {self.method.id}: it has {found}, expected {expected}",
                f"leave out method=, its own is {drafter.method}",
            )
        if (steps := options.steps or config.steps) > config.steps:
            raise CheckpointError(
                f"the drafter was trained for blocks of {config.steps} tokens, not {steps}",
                f"build it with at most steps={config.steps}",
            )
        return config

    def random_config(self, target: Target, verifier: Any) -> BlockConfig:
        """Return the configuration of a random drafter of the row's form."""
        own = {"steps": target.options.steps} if target.options.steps else {}
        states = self.method.hidden_states
        return with_sizes(BlockConfig, verifier, target.vocabulary, hidden_states=states, **self.row.form, **own)

    def shape(self, target: Target, config: BlockConfig) -> BlockShape:
        """Return the graph's sizes. Raises UsageError for a node with more children than tokens."""
        steps, width = target.options.steps or config.steps, target.options.width
        return BlockShape(
            **self.sizes(target, config),
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            steps=steps,
            layers=config.layers,
            causal=config.causal,
            width=width,
            nodes=target.options.tree_nodes(steps, width),
            hidden_states=config.hidden_states,
        )

    def graph(self, target: Target, module: BlockDrafter, shape: BlockShape) -> nn.Module:
        """Return the draft graph's computation."""
        if module.token_head is not None:
            weight = module.token_head.weight.new_empty(shape.draft_vocabulary, module.config.token_rank)
            module.token_head.weight = nn.Parameter(weight, requires_grad=False)
        if not target.options.confidence:
            module.confidence = None
        return _Draft(module, module.config, shape, target.verifier.shape.max_positions)

    def columns(self, target: Target, source: AnySource, vocabulary: DraftVocabulary) -> AnySource:
        """Return the source with those rows of W_2 that the graph has."""
        name = f"{stem(target.name)}token_head.weight"
        if len(vocabulary.columns) == source.parameters.get(name, vocabulary.columns.shape)[0]:
            return source
        return DrafterSource(RowsSource(source, name, name, vocabulary.columns), source)


EXPORTER = BlockExporter
_LEAST = 1e-9
"""Least confidence, for a finite logarithm."""


def _kind(config: BlockConfig) -> str:
    """Return what tells drafters of one method from those of another."""
    attention = "one way" if config.causal else "both ways"
    return f"blocks that attend {attention} and predict from {'all rows' if config.anchor_predicts else 'masks'}"


class BlockAttention(DraftRows):
    """Attention of a draft: in each layer one call over the rows to catch up on and the rows of one block.

    The operator writes the keys and values of both. The next draft overwrites those of the block.
    """

    def __init__(self, config: BlockConfig, *rows: Any) -> None:
        """`rows` are the arguments of `DraftRows`."""
        super().__init__(*rows)
        self._config = config

    def block(self, rows: int) -> torch.Tensor:
        """Set the rows of the block. Returns positions [B, M + R]."""
        context = self._positions.shape[1]
        places = torch.arange(context + rows)
        visible = (places < self._last + 1) | (places >= context)  # without padding, [B, M + R]
        mask = visible[:, None].expand(-1, context + rows, -1)
        self._mask = mask & (places <= places[:, None]) if self._config.causal else mask
        self._rows = rows
        self._places = torch.cat([self._positions, self._place + 1 + torch.arange(rows)], dim=1)
        return self._places

    def layer(self, number: int) -> Attend:
        """Attend for the block's rows in this layer."""
        config, kv_len = self._config, self._kv_len + self._rows

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            own = slice(2 * number, 2 * number + 2)
            out: torch.Tensor
            out, *self.caches[own] = tree_attention(
                q, k, v, *self.caches[own], self._mask, self._places, self._cache_len, kv_len, None,
                config.head_dim**-0.5, 0.0, 0, 0, config.heads, config.kv_heads,
            )  # fmt: skip
            return out[:, -self._rows :]

        return attend


class _Draft(DraftGraph[BlockDrafter]):
    """The draft graph's computation."""

    def _prepare(self, drafter: BlockDrafter, positions: int) -> None:
        """Replace rotation and norms by single operators. All layers have the same rotation."""
        rotary = GraphRotary(drafter.layers[0].rotary, positions, tracing.TORCH[self.shape.dtype])
        for layer in drafter.layers:
            layer.rotary = rotary
        modules.replace_rms_norms(drafter)

    def rows(self, *rows: Any) -> BlockAttention:
        """Return the rows of context and block."""
        return BlockAttention(self.drafter.config, *rows)

    def draft(
        self, pending: Pending, rows: BlockAttention, sampling: Sampling, tables: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Compute the block, and grow the tree of its rows' candidates."""
        shape, drafter, root = self.shape, self.drafter, rows.last_token(pending.tokens)
        count = drafter.config.rows(shape.steps)
        states = drafter(pending.features, self.embed(root), rows.block(count), count, rows.layer).squeeze(1)
        logits = self.logits(states)  # [B, N, H], in one product
        tree = LevelTree(shape.width, sampling.drawn, drawn_ranks(shape.width))
        if drafter.tokens is None and drafter.confidence is None:
            self._grow_alike(tree, likeliest(sampling.scaled(logits, tables), shape.width))
        else:
            logits = self._grow(tree, states, logits, root, sampling, tables)
        return (*tree.whole(root, shape.nodes, tables), logits)

    def _grow_alike(self, tree: LevelTree, candidates: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Grow a tree all of whose nodes at one level have the same candidates, [B, N, W]."""
        width = self.shape.width
        for step in range(self.shape.steps):
            parents = 1 if step == 0 else width
            tree.add(*(values[:, step : step + 1].expand(-1, parents, -1) for values in candidates))
            if step + 1 < self.shape.steps:
                tree.best()

    def _grow(
        self, tree: LevelTree, states: torch.Tensor, logits: torch.Tensor, root: torch.Tensor, sampling: Sampling,
        tables: list[torch.Tensor],
    ) -> torch.Tensor:  # fmt: skip
        """Grow a tree whose candidates depend on the token before. Returns the logits of each level's best node.

        states: [B, N, n].   logits: [B, N, H], without that token.
        """
        before, chain = root, []
        for step in range(self.shape.steps):
            if step:
                columns = tree.best()[1]
                before = tracing.take(tables[-1], columns) if tables else columns
            of_level, confidence = self._after(before, states[:, step : step + 1], logits[:, step : step + 1])
            chain.append(of_level[:, :1])
            keys = sampling.keys[:, step : step + 1].expand(-1, before.shape[1], -1)
            log_probs, columns = likeliest(sampling._replace(keys=keys).scaled(of_level, tables), self.shape.width)
            if confidence is not None:
                log_probs = log_probs - log_probs[..., :1] + confidence[..., None]
            tree.add(log_probs, columns)
        return torch.cat(chain, dim=1)

    def _after(
        self, before: torch.Tensor, state: torch.Tensor, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the logits [B, W, H] after tokens `before` [B, W], and log confidences [B, W] if there are any.

        state: [B, 1, n], of the level.   logits: [B, 1, H], without the token.
        """
        drafter, width = self.drafter, before.shape[1]
        states, tokens = state.expand(-1, width, -1), None
        logits = logits.expand(-1, width, -1)
        if drafter.tokens is not None and drafter.token_head is not None:
            tokens = drafter.tokens(before)
            logits = logits + drafter.token_head(tokens).float()
        if drafter.confidence is None:
            return logits, None
        return logits, torch.log(torch.sigmoid(drafter.confidences(states, tokens).float()).clamp(min=_LEAST))
