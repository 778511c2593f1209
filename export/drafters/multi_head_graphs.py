"""The draft graph of heads on the trunk: one call catches up on rows, and the last one gives the tree of all heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from redraft import names
from redraft.export.checkpoint.sources import AnySource
from redraft.export.checkpoint.weight_files import Progress, no_progress
from redraft.export.drafters import ExportedDrafter, Exporter
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity, TokenData
from redraft.export.drafters.draft_graph import (
    ChainAttention,
    DraftGraph,
    GraphRotary,
    Sampling,
    check_fit,
    drafter_precision,
    empty_module,
    parameter_shapes,
    random_source,
    stem,
    write_draft,
    write_tables,
)
from redraft.export.drafters.draft_vocabulary import DraftVocabulary
from redraft.export.drafters.multi_head import MultiHeadConfig, MultiHeadDrafter, configuration_of
from redraft.export.drafters.static_tree import StaticTree, assumed_accuracies, tree_of
from redraft.export.graph import modules, tracing
from redraft.export.verifier import VerifierExport
from redraft.methods.multi_head import METHOD, MultiHeadShape, draft_inputs, draft_outputs
from redraft.methods.static_tree import Node, StaticTreeBuild


def configure(drafter: DrafterCheckpoint, options: StaticTreeBuild) -> MultiHeadConfig:
    """Return the drafter's configuration. Raises like `tree_of` if its heads do not cover the options."""
    settings = drafter.configure(MultiHeadConfig)
    tree_of(settings.draft_heads, settings.rank_accuracies, options, settings.limited(options.draft_vocabulary))
    return settings


def export_heads(
    name: str, drafter: DrafterCheckpoint, verifier: VerifierExport, identity: Identity, out: Path,
    options: StaticTreeBuild, progress: Progress = no_progress,
) -> ExportedDrafter:  # fmt: skip
    """Write the graph of `drafter`, by the id `name`, into `out`, next to the graph of its verifier.

    Raises CheckpointError if the drafter was trained for another verifier or does not load, if the verifier's graph
    does not output the trunk's state, and like `configure`.
    """
    settings = configure(drafter, options)
    check_fit(drafter, settings, verifier, identity)
    module = empty_module(lambda: MultiHeadDrafter(settings), verifier.shape.dtype)
    source, tokens = drafter.open_weights(parameter_shapes(module), stem(name))
    return _export(name, module, source, tokens, verifier, out, options, progress)


def export_random(
    name: str, configuration: Any, verifier: VerifierExport, out: Path, options: StaticTreeBuild,
    progress: Progress = no_progress,
) -> ExportedDrafter:  # fmt: skip
    """Write the graph of random heads for a verifier of this transformers configuration."""
    heads = {"draft_heads": options.steps} if options.steps else {}
    settings = configuration_of(configuration, verifier.shape.vocabulary, **heads)
    accuracies = assumed_accuracies(settings.draft_heads, settings.vocab_size, options.width)
    settings = replace(settings, hidden_states=METHOD.hidden_states, rank_accuracies=accuracies)
    module = empty_module(lambda: MultiHeadDrafter(settings), verifier.shape.dtype)
    source = random_source(name, module, drafter_precision(options.precision, verifier), out)
    tokens = TokenData(torch.ones(verifier.shape.vocabulary, dtype=torch.long))
    return _export(name, module, source, tokens, verifier, out, options, progress)


EXPORTER = Exporter(configure, export_heads, export_random)


def _export(
    name: str, module: MultiHeadDrafter, source: AnySource, tokens: TokenData, verifier: VerifierExport, out: Path,
    options: StaticTreeBuild, progress: Progress,
) -> ExportedDrafter:  # fmt: skip
    precision, config = drafter_precision(options.precision, verifier), module.config
    drafted = config.limited(options.draft_vocabulary)
    tree = tree_of(config.draft_heads, config.rank_accuracies, options, drafted)
    together = config.together(max(map(len, tree)))
    shape = MultiHeadShape(
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        tree=tuple(tree),
        draft_vocabulary=drafted,
        draft_logit_scale=config.draft_logit_scale,
        dtype=verifier.shape.dtype,
        kv_heads=together.kv_heads,
        head_dim=config.head_dim,
        hidden_states=config.hidden_states,
    )
    vocabulary = DraftVocabulary.of(tokens, drafted)
    progress("trace drafter", 0, 1)
    graph = _Draft(module, config, shape, verifier.shape.max_positions, tree)
    weights = write_draft(
        name, graph, source, vocabulary, verifier, shape, out, precision, progress,
        (draft_inputs(shape), draft_outputs(shape)), METHOD.tables(shape), logits=names.CHAIN_LOGITS,
    )  # fmt: skip
    return ExportedDrafter(shape, precision, weights, write_tables(name, vocabulary.tables(), out))


class _Draft(DraftGraph[MultiHeadDrafter]):
    """The draft graph's computation, with inputs and outputs in the order of `draft_inputs` and `draft_outputs`.

    Heads that the tree does not reach are left out.
    """

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

    def forward(
        self, features: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, pending: torch.Tensor,
        cache_len: torch.Tensor, kv_len: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sampling: Sampling,
        tables: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        attention = ChainAttention(self._together, positions, pending, cache_len, kv_len, key, value)
        states = self.drafter(features, positions, attention.catch_up(), attention.last, self.shape.steps)
        logits = self.logits(states.squeeze(1))  # [B, N, H]
        tree = self.static(logits, attention.last_token(tokens), sampling, tables)
        return (*tree, logits, *attention.caches)
