"""The draft graph of a multi-token-prediction module. One call catches up on rows and unrolls the chain of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from redraft.export import tracing
from redraft.export.drafters import ExportedDrafter, Exporter
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity, TokenData
from redraft.export.drafters.draft_graph import (
    ChainAttention,
    DraftGraph,
    Sampling,
    check_fit,
    drafter_precision,
    empty_module,
    likeliest,
    parameter_shapes,
    random_source,
    stem,
    write_draft,
    write_tables,
)
from redraft.export.drafters.draft_vocabulary import DraftVocabulary
from redraft.export.drafters.layer import LayerConfig, verifier_sizes
from redraft.export.drafters.mtp import MtpDrafter
from redraft.export.sources import AnySource
from redraft.export.verifier import VerifierExport
from redraft.export.weight_files import Progress, no_progress
from redraft.methods.chains import DRAWN_LOG_PROB
from redraft.methods.mtp import METHOD, MtpBuild, MtpShape, draft_inputs, draft_outputs


def export_mtp(
    name: str, drafter: DrafterCheckpoint, verifier: VerifierExport, identity: Identity, out: Path, options: MtpBuild,
    progress: Progress = no_progress,
) -> ExportedDrafter:  # fmt: skip
    """Write the graph of `drafter`, by the id `name`, into `out`, next to the graph of its verifier.

    Raises CheckpointError if the module belongs to another verifier or does not load.
    """
    settings = drafter.configure(LayerConfig)
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
    tokens = TokenData(torch.ones(verifier.shape.vocabulary, dtype=torch.long))
    return _export(name, module, source, tokens, verifier, out, options, progress)


EXPORTER = Exporter(export_mtp, export_random)


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


class _Draft(DraftGraph[MtpDrafter]):
    """The draft graph's computation, with inputs and outputs in the order of `draft_inputs` and `draft_outputs`."""

    def forward(
        self, features: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, pending: torch.Tensor,
        cache_len: torch.Tensor, kv_len: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sampling: Sampling,
        tables: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        attention = ChainAttention(self.drafter.config, positions, pending, cache_len, kv_len, key, value)
        hidden = self.drafter(features, self.embed(tokens), positions, attention.catch_up(), attention.last)
        nodes, factor = [attention.last_token(tokens)], sampling.scale[:, None, None]
        log_probs, chain = [torch.zeros_like(nodes[0], dtype=torch.float32)], []
        by_rank, of_rank = sampling.drawn[:, None] > 0, torch.full((1, 1), DRAWN_LOG_PROB)
        for step in range(self.shape.steps):
            chain.append(self.logits(hidden))  # [B, 1, H]
            logits = sampling.noisy(chain[-1], tables, step) * factor
            log_prob, best = (found.squeeze(-1) for found in likeliest(logits, 1))  # [B, 1]
            nodes.append(tracing.take(tables[0], best) if tables else best)
            log_probs.append(log_probs[-1] + torch.where(by_rank, of_rank, log_prob))
            if step + 1 < self.shape.steps:
                hidden = self.drafter(hidden, self.embed(nodes[-1]), *attention.next_step())
        parents = torch.arange(-1, self.shape.steps)[None].expand(tokens.shape[0], -1)
        tree = torch.cat(nodes, 1), parents.contiguous(), torch.cat(log_probs, 1)
        return (*tree, torch.cat(chain, 1), *attention.caches)
