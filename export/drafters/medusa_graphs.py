"""Medusa's draft graph: one product for all heads, one with the verifier's head, and the static tree of candidates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import nn

from redraft import names
from redraft.export.checkpoint.sources import AnySource
from redraft.export.checkpoint.weight_files import Progress, no_progress
from redraft.export.drafters import ExportedDrafter, Exporter
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity, TokenData
from redraft.export.drafters.draft_graph import (
    Sampling,
    check_fit,
    drafter_precision,
    empty_module,
    examples,
    parameter_shapes,
    random_source,
    stem,
    write_tables,
    write_traced,
)
from redraft.export.drafters.draft_vocabulary import DraftVocabulary
from redraft.export.drafters.medusa import MedusaConfig, MedusaHeads, configuration_of
from redraft.export.drafters.static_tree import StaticTree, assumed_accuracies, tree_of
from redraft.export.graph import tracing
from redraft.export.verifier import VerifierExport
from redraft.methods.medusa import METHOD, draft_inputs, draft_outputs
from redraft.methods.static_tree import Node, StaticTreeBuild, StaticTreeShape


def configure(drafter: DrafterCheckpoint, options: StaticTreeBuild) -> MedusaConfig:
    """Return the drafter's configuration. Raises like `tree_of` if its heads do not cover the options."""
    settings = drafter.configure(MedusaConfig)
    tree_of(settings.heads, settings.rank_accuracies, options, settings.limited(options.draft_vocabulary))
    return settings


def export_medusa(
    name: str, drafter: DrafterCheckpoint, verifier: VerifierExport, identity: Identity, out: Path,
    options: StaticTreeBuild, progress: Progress = no_progress,
) -> ExportedDrafter:  # fmt: skip
    """Write the graph of `drafter`, by the id `name`, into `out`, next to the graph of its verifier.

    Raises CheckpointError if the drafter was trained for another verifier or does not load, and like `configure`.
    """
    settings = configure(drafter, options)
    check_fit(drafter, settings, verifier, identity)
    module = empty_module(lambda: MedusaHeads(settings), verifier.shape.dtype)
    source, tokens = drafter.open_weights(parameter_shapes(module), stem(name))
    return _export(name, module, source, tokens, verifier, out, options, progress)


def export_random(
    name: str, configuration: Any, verifier: VerifierExport, out: Path, options: StaticTreeBuild,
    progress: Progress = no_progress,
) -> ExportedDrafter:  # fmt: skip
    """Write the graph of random heads for a verifier of this transformers configuration."""
    heads = {"heads": options.steps} if options.steps else {}
    settings = configuration_of(configuration, verifier.shape.vocabulary, **heads)
    settings = replace(settings, rank_accuracies=assumed_accuracies(settings.heads, settings.vocab_size, options.width))
    module = empty_module(lambda: MedusaHeads(settings), verifier.shape.dtype)
    source = random_source(name, module, drafter_precision(options.precision, verifier), out)
    tokens = TokenData(torch.ones(verifier.shape.vocabulary, dtype=torch.long))
    return _export(name, module, source, tokens, verifier, out, options, progress)


EXPORTER = Exporter(configure, export_medusa, export_random)


def _export(
    name: str, module: MedusaHeads, source: AnySource, tokens: TokenData, verifier: VerifierExport, out: Path,
    options: StaticTreeBuild, progress: Progress,
) -> ExportedDrafter:  # fmt: skip
    precision, config = drafter_precision(options.precision, verifier), module.config
    drafted = config.limited(options.draft_vocabulary)
    tree = tree_of(config.heads, config.rank_accuracies, options, drafted)
    shape = StaticTreeShape(
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        tree=tuple(tree),
        draft_vocabulary=drafted,
        draft_logit_scale=config.draft_logit_scale,
        dtype=verifier.shape.dtype,
    )
    vocabulary = DraftVocabulary.of(tokens, drafted)
    progress("trace drafter", 0, 1)
    model = _trace(_Draft(module, shape, tree), shape)
    weights = write_traced(name, model, source, vocabulary, verifier, out, precision, progress, names.CHAIN_LOGITS)
    return ExportedDrafter(shape, precision, weights, write_tables(name, vocabulary.tables(), out))


class _Draft(nn.Module):
    """The draft graph's computation, with inputs and outputs in the order of `draft_inputs` and `draft_outputs`."""

    def __init__(self, heads: MedusaHeads, shape: StaticTreeShape, tree: Mapping[Node, float]) -> None:
        super().__init__()
        self.drafter, self.shape, self.static = heads, shape, StaticTree(shape, tree)
        dtype = tracing.TORCH[shape.dtype]
        self.head = nn.Parameter(torch.empty(shape.draft_vocabulary, shape.hidden, dtype=dtype), requires_grad=False)
        self._scale = heads.config.logit_scale

    def forward(
        self, pending_features: torch.Tensor, num_pending: torch.Tensor, tokens: torch.Tensor, sampling: Sampling,
        tables: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        hidden = tracing.gather_rows(pending_features, (num_pending - 1)[:, None])  # [B, 1, n]
        states = self.drafter(hidden)[:, 0, : self.shape.steps]  # [B, N, n]
        logits = F.linear(states if self._scale == 1.0 else states * self._scale, self.head).float()
        return (*self.static(logits, tokens[:, None], sampling, tables), logits)


def _trace(graph: _Draft, shape: StaticTreeShape) -> ir.Model:
    b = torch.export.Dim("B", min=1)
    tables = METHOD.tables(shape)
    args = (
        torch.zeros(2, names.MAX_PENDING_FEATURES, shape.hidden, dtype=tracing.TORCH[shape.dtype]),
        torch.ones(2, dtype=torch.long), torch.zeros(2, dtype=torch.long), Sampling.example(shape.steps),
        examples(tables),
    )  # fmt: skip
    fixed: list[dict[int, Any]] = [{} for _ in tables]
    dynamic = ({0: b}, {0: b}, {0: b}, Sampling.dims(b), fixed)
    return tracing.trace_graph(graph, args, dynamic, draft_inputs(shape), draft_outputs(shape))
