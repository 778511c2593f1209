"""The draft graph of a multi-token-prediction module: one call catches up on rows and unrolls the chain of tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from redraft import names
from redraft.export import modules, support, tracing
from redraft.export.drafters import ExportedDrafter, Exporter
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity
from redraft.export.drafters.draft_graph import (
    ChainAttention,
    GraphRotary,
    check_fit,
    drafter_precision,
    empty_module,
    parameter_shapes,
    stem,
    write_draft,
)
from redraft.export.drafters.mtp import MtpConfig, MtpDrafter
from redraft.export.shapes import decoder_shape
from redraft.export.sources import AnySource, RandomSource
from redraft.export.verifier import VerifierExport
from redraft.export.weight_files import STORED, Progress, no_progress
from redraft.methods.mtp import MtpBuild, MtpShape, draft_inputs, draft_outputs


def export_mtp(
    name: str, drafter: DrafterCheckpoint, verifier: VerifierExport, identity: Identity, out: Path, options: MtpBuild,
    progress: Progress = no_progress,
) -> ExportedDrafter:  # fmt: skip
    """Write the graph of `drafter`, by the id `name`, into `out`, next to the graph of its verifier.

    Raises CheckpointError if the module belongs to another verifier or does not load.
    """
    settings = drafter.configure(MtpConfig)
    check_fit(drafter, settings, verifier, identity)
    module = _empty(settings, verifier)
    source, _ = drafter.open_weights(parameter_shapes(module), stem(name))
    return _export(name, module, source, verifier, out, options, progress)


def export_random(
    name: str, configuration: Any, verifier: VerifierExport, out: Path, options: MtpBuild,
    progress: Progress = no_progress,
) -> ExportedDrafter:  # fmt: skip
    """Write the graph of a module with random weights for a verifier of this transformers configuration."""
    module = _empty(configuration_of(configuration, verifier.shape.vocabulary), verifier)
    shapes = {f"{stem(name)}{parameter}": shape for parameter, shape in parameter_shapes(module).items()}
    precision = drafter_precision(options.precision, verifier)
    source = RandomSource.write(shapes, out, STORED[precision], f"{stem(name)}random")
    return _export(name, module, source, verifier, out, options, progress)


EXPORTER = Exporter(export_mtp, export_random)


def configuration_of(verifier: Any, vocabulary: int) -> MtpConfig:
    """Return the configuration of a module with the sizes of a verifier of this transformers configuration."""
    shape = decoder_shape(verifier)
    return MtpConfig(
        hidden_size=shape.hidden,
        vocab_size=vocabulary,
        intermediate_size=int(getattr(verifier, "intermediate_size", None) or 4 * shape.hidden),
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rope_theta=support.rope_theta(verifier),
        rms_norm_eps=support.norm_eps(verifier),
        logit_scale=support.logit_scale(verifier),
    )


def _empty(settings: MtpConfig, verifier: VerifierExport) -> MtpDrafter:
    module = empty_module(lambda: MtpDrafter(settings), verifier.shape.dtype)
    assert isinstance(module, MtpDrafter)
    return module


def _export(
    name: str, module: MtpDrafter, source: AnySource, verifier: VerifierExport, out: Path, options: MtpBuild,
    progress: Progress,
) -> ExportedDrafter:  # fmt: skip
    precision, config = drafter_precision(options.precision, verifier), module.config
    shape = MtpShape(config.hidden_size, config.vocab_size, config.kv_heads, config.head_dim, options.steps)
    shape = replace(shape, dtype=verifier.shape.dtype)
    progress("trace drafter", 0, 1)
    graph = _Draft(module, shape, verifier.shape.max_positions + names.CATCH_UP_ROWS + shape.steps)
    weights = write_draft(
        name, graph, source, verifier, shape, out, precision, progress, (draft_inputs(shape), draft_outputs(shape))
    )
    return ExportedDrafter(shape, precision, weights, ())


class _Draft(nn.Module):
    """The draft graph's computation; inputs and outputs as `draft_inputs` and `draft_outputs` order them.

    Takes `drafter` over and changes it.
    """

    def __init__(self, drafter: MtpDrafter, shape: MtpShape, positions: int) -> None:
        super().__init__()
        self.drafter = drafter
        rotary = GraphRotary(self.drafter.layer.rotary, positions, tracing.TORCH[shape.dtype])
        self.drafter.layer.rotary = rotary  # type: ignore[assignment]
        modules.replace_rms_norms(self.drafter)
        size, dtype = (shape.vocabulary, shape.hidden), tracing.TORCH[shape.dtype]
        self.embedding, self.head = (
            nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False) for _ in range(2)
        )
        self.shape = shape

    def forward(
        self, features: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, pending: torch.Tensor,
        cache_len: torch.Tensor, kv_len: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        config = self.drafter.config
        attention = ChainAttention(config, key, value)
        rows = tokens.shape[1]
        causal = torch.ones(rows, rows, dtype=torch.bool).tril()[None].expand(tokens.shape[0], -1, -1)
        last = (pending - 1)[:, None]
        hidden = self.drafter(
            features, F.embedding(tokens, self.embedding), positions,
            attention.at(positions, causal, cache_len, kv_len), lambda given: tracing.gather_rows(given, last),
        )  # fmt: skip
        place, past = positions.gather(1, last), cache_len + pending
        alone = torch.ones_like(last, dtype=torch.bool)[:, :, None]
        scale = config.logit_scale * config.draft_logit_scale
        nodes, log_probs = [tokens.gather(1, last)], [torch.zeros_like(last, dtype=torch.float32)]
        for step in range(self.shape.steps):
            logits = F.linear(hidden if scale == 1.0 else hidden * scale, self.head).float()  # [B, 1, V]
            best = logits.argmax(-1)  # [B, 1]
            top = logits.amax(-1) - torch.logsumexp(logits, -1)
            nodes.append(best)
            log_probs.append(log_probs[-1] + top)
            if step + 1 < self.shape.steps:
                place, kv_len = place + 1, kv_len + 1
                hidden = self.drafter(
                    hidden, F.embedding(best, self.embedding), place, attention.at(place, alone, past, kv_len)
                )
                past = past + 1
        parents = torch.arange(-1, self.shape.steps)[None].expand(tokens.shape[0], -1)
        return torch.cat(nodes, 1), parents.contiguous(), torch.cat(log_probs, 1), *attention.caches
