"""The draft graph of a multi-token-prediction module. One call catches up on rows and unrolls the chain of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from redraft.export.checkpoint.sources import AnySource
from redraft.export.checkpoint.weight_files import Progress, no_progress
from redraft.export.drafters import ExportedDrafter, Exporter, NativeExporter
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity, TokenData
from redraft.export.drafters.draft_graph import (
    ChainAttention,
    ChainRows,
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
from redraft.export.drafters.layer import LayerConfig, verifier_sizes
from redraft.export.drafters.mtp import MtpDrafter
from redraft.export.drafters.mtp_chain import MtpChain
from redraft.export.drafters.mtp_layouts import require_module
from redraft.export.drafters.mtp_native_graphs import export_native
from redraft.export.verifier import VerifierExport
from redraft.methods.mtp import METHOD, MtpBuild, MtpShape, draft_inputs, draft_outputs


def configure(drafter: DrafterCheckpoint, options: MtpBuild) -> LayerConfig:
    """Return the module's configuration. All options fit it."""
    return drafter.configure(LayerConfig)


def export_mtp(
    name: str, drafter: DrafterCheckpoint, verifier: VerifierExport, identity: Identity, out: Path, options: MtpBuild,
    progress: Progress = no_progress,
) -> ExportedDrafter:  # fmt: skip
    """Write the graph of `drafter`, by the id `name`, into `out`, next to the graph of its verifier.

    Raises CheckpointError if the module belongs to another verifier or does not load.
    """
    settings = configure(drafter, options)
    check_fit(drafter, settings, verifier, identity)
    module = _empty(settings, verifier)
    source, tokens = drafter.open_weights(parameter_shapes(module), stem(name))
    return _export(name, module, source, tokens, verifier, out, options, progress)


def export_random(
    name: str, configuration: Any, verifier: VerifierExport, out: Path, options: MtpBuild,
    progress: Progress = no_progress,
) -> ExportedDrafter:  # fmt: skip
    """Write the graph of a module with random weights for a verifier of this transformers configuration."""
    module = _empty(configuration_of(configuration, verifier.shape.vocabulary), verifier)
    source = random_source(name, module, drafter_precision(options.precision, verifier), out)
    return _export(name, module, source, _all_tokens(verifier), verifier, out, options, progress)


def _all_tokens(verifier: VerifierExport) -> TokenData:
    return TokenData(torch.ones(verifier.shape.vocabulary, dtype=torch.long))


EXPORTER = Exporter(configure, export_mtp, export_random, native=NativeExporter(require_module, export_native))


def configuration_of(verifier: Any, vocabulary: int) -> LayerConfig:
    """Return the configuration of a module with the sizes of a verifier of this transformers configuration."""
    return LayerConfig(**verifier_sizes(verifier, vocabulary))


def _empty(settings: LayerConfig, verifier: VerifierExport) -> MtpDrafter:
    return empty_module(lambda: MtpDrafter(settings), verifier.shape.dtype)


def _export(
    name: str, module: MtpDrafter, source: AnySource, tokens: TokenData, verifier: VerifierExport, out: Path,
    options: MtpBuild, progress: Progress,
) -> ExportedDrafter:  # fmt: skip
    precision, config = drafter_precision(options.precision, verifier), module.config
    shape = MtpShape(
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        steps=options.steps,
        draft_vocabulary=config.limited(options.draft_vocabulary),
        draft_logit_scale=config.draft_logit_scale,
        dtype=verifier.shape.dtype,
    )
    vocabulary = DraftVocabulary.of(tokens, shape.draft_vocabulary)
    progress("trace drafter", 0, 1)
    graph = _Draft(module, config, shape, verifier.shape.max_positions)
    weights = write_draft(
        name, graph, source, vocabulary, verifier, shape, out, precision, progress,
        (draft_inputs(shape), draft_outputs(shape)), METHOD.tables(shape),
    )  # fmt: skip
    return ExportedDrafter(shape, precision, weights, write_tables(name, vocabulary.tables(), out))


class _Draft(MtpChain[MtpDrafter]):
    """The draft of a module with a layer of its own."""

    def rows(self, *rows: torch.Tensor) -> ChainRows[Any]:
        """Attend as the drafter's layer."""
        return ChainAttention(self.drafter.config, *rows)
