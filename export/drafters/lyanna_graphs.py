"""Lyanna's two graphs and its table of token information.

    draft            one call: catches up on the rows since the last draft, unrolls the chain, multiplies its states by
    the head in one product, and builds the tree of their logits
    resample         builds a tree of the logits that a verification left unused; its only weights are the table

The embedding is the verifier's own bytes, and so is the head if the draft vocabulary is the whole one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from redraft import names
from redraft.errors import CheckpointError, UsageError
from redraft.export.checkpoint.sources import AnySource
from redraft.export.checkpoint.weight_files import Progress, no_progress
from redraft.export.drafters import ExportedDrafter, Exporter, graph_file
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity, TokenData, fill
from redraft.export.drafters.draft_graph import (
    ChainAttention,
    DraftGraph,
    Sampling,
    check_fit,
    drafter_precision,
    empty_module,
    examples,
    parameter_shapes,
    random_source,
    stem,
    write_draft,
    write_tables,
)
from redraft.export.drafters.draft_vocabulary import DraftVocabulary
from redraft.export.drafters.lyanna import LyannaConfig, LyannaDrafter, configuration_of
from redraft.export.drafters.lyanna_token_info import make_tables
from redraft.export.drafters.lyanna_token_tree import emit_token_tree, token_tree
from redraft.export.graph import passes, tracing
from redraft.export.graph.decoder import finish
from redraft.export.verifier import VerifierExport
from redraft.methods.base import resampled_nodes
from redraft.methods.lyanna import (
    FREQUENT_TOKENS,
    LARGE_VOCABULARY,
    METHOD,
    LyannaBuild,
    LyannaShape,
    draft_inputs,
    draft_outputs,
    resample_inputs,
    resample_outputs,
    tree_size,
)
from redraft.names import Dtype

_TRANSLATIONS = {**tracing.TRANSLATIONS, torch.ops.redraft.token_tree.default: emit_token_tree}


def configure(drafter: DrafterCheckpoint, options: LyannaBuild) -> LyannaConfig:
    """Return the drafter's configuration. Raises like `lyanna_shape` for options that do not fit."""
    settings = drafter.configure(LyannaConfig)
    lyanna_shape(settings, options)
    return settings


def export_lyanna(
    name: str, drafter: DrafterCheckpoint, verifier: VerifierExport, identity: Identity, out: Path,
    options: LyannaBuild, progress: Progress = no_progress,
) -> ExportedDrafter:  # fmt: skip
    """Write the graphs of `drafter`, by the id `name`, into `out`, next to the graph of its verifier.

    Raises CheckpointError if the drafter was trained for another verifier or does not load, and like `configure`.
    """
    settings = configure(drafter, options)
    check_fit(drafter, settings, verifier, identity)
    module = empty_drafter(settings, verifier.shape.dtype)
    source, tokens = drafter.open_weights(parameter_shapes(module), stem(name))
    return _export(name, module, source, tokens, verifier, out, options, progress)


def export_random_lyanna(
    name: str, settings: LyannaConfig, verifier: VerifierExport, out: Path, options: LyannaBuild,
    progress: Progress = no_progress,
) -> ExportedDrafter:  # fmt: skip
    """Write the graphs of a drafter with random weights and equal token counts, for latency work.

    A draft vocabulary is the tokens with the lowest ids.
    """
    module = empty_drafter(settings, verifier.shape.dtype)
    source = random_source(name, module, drafter_precision(options.precision, verifier), out)
    drafted = torch.arange(settings.draft_vocab_size) if settings.draft_vocab_size else None
    tokens = TokenData(torch.ones(settings.vocab_size, dtype=torch.long), drafted)
    return _export(name, module, source, tokens, verifier, out, options, progress)


def export_random_for(
    name: str, configuration: Any, verifier: VerifierExport, out: Path, options: LyannaBuild, progress: Progress
) -> ExportedDrafter:
    """Write the graphs of a random drafter for a verifier of this transformers configuration."""
    steps = {"steps": options.steps} if options.steps else {}
    settings = configuration_of(configuration, verifier.shape.vocabulary, **steps)
    return export_random_lyanna(name, settings, verifier, out, options, progress)


EXPORTER = Exporter(configure, export_lyanna, export_random_for)


def empty_drafter(settings: LyannaConfig, dtype: Dtype) -> LyannaDrafter:
    """Return the module with uninitialized weights; its token information is in fp32."""
    module = empty_module(lambda: LyannaDrafter(settings), dtype)
    if module.token_info is not None:
        module.token_info.to(torch.float32)
    return module


def _export(
    name: str, module: LyannaDrafter, source: AnySource, tokens: TokenData, verifier: VerifierExport, out: Path,
    options: LyannaBuild, progress: Progress,
) -> ExportedDrafter:  # fmt: skip
    precision = drafter_precision(options.precision, verifier)
    shape = replace(lyanna_shape(module.config, options), dtype=verifier.shape.dtype)
    if module.token_info is not None:
        for parameter, tensor in module.token_info.state_dict().items():
            fill(tensor, source, f"{stem(name)}token_info.{parameter}")
    progress("token information", 0, 1)
    vocabulary = DraftVocabulary.of(tokens, shape.draft_vocabulary)
    made = make_tables(module, verifier.source.slabs(verifier.embedding), vocabulary, shape)
    tables = write_tables(name, (*made, *vocabulary.tables()), out)
    progress("trace drafter", 0, 1)
    module.token_info = None
    graph = _Draft(module, module.config, shape, verifier.shape.max_positions)
    weights = write_draft(
        name, graph, source, vocabulary, verifier, shape, out, precision, progress,
        (draft_inputs(shape), draft_outputs(shape)), METHOD.tables(shape), _TRANSLATIONS, names.CHAIN_LOGITS,
    )  # fmt: skip
    if shape.steps > 1:
        _export_resample(name, shape, out)
    return ExportedDrafter(shape, precision, weights, tables)


def lyanna_shape(config: LyannaConfig, options: LyannaBuild) -> LyannaShape:
    """Return the sizes of the graphs.

    Raises CheckpointError for more steps than the drafter was trained for, and UsageError for a node with more children
    than tokens.
    """
    steps = options.steps or config.steps
    if steps > config.steps:
        raise CheckpointError(
            f"the drafter was trained for {config.steps} steps, not {steps}",
            f"build it with at most steps={config.steps}",
        )
    nodes = min(options.nodes + 1, tree_size(steps, options.width))
    resampled = options.resample_nodes or resampled_nodes(nodes - 1)
    large = not config.draft_vocab_size and config.vocab_size > LARGE_VOCABULARY
    drafted = config.limited(options.draft_vocabulary or (FREQUENT_TOKENS if large else None))
    if options.width > drafted:
        raise UsageError(
            f"a node cannot have {options.width} children of {drafted} tokens", "lower width, or raise draft_vocabulary"
        )
    return LyannaShape(
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        steps=steps,
        width=options.width,
        nodes=nodes,
        resample_nodes=min(resampled + 1, nodes, tree_size(steps - 1, options.width)),
        token_info=options.token_info,
        draft_vocabulary=drafted,
        rank=config.rank,
        draft_logit_scale=config.draft_logit_scale,
    )


def _tree(
    shape: LyannaShape, logits: torch.Tensor, sampling: Sampling, used: torch.Tensor | None, roots: torch.Tensor,
    tables: list[torch.Tensor], nodes: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return tokens, parents and log probabilities of trees rooted at the tokens `roots` [B].

    used: how many of the last steps to leave out; None for none.   tables: those of `methods.lyanna.tables`.
    """
    pruned, left_out = shape.draft_vocabulary < shape.vocabulary, roots if used is None else used
    info, rows = (tables[:-2], tracing.take(tables[-2], roots)) if pruned else (tables, roots)
    noisy = sampling.noisy(logits, tables[-1:] if pruned else ())
    columns, parents, log_probs = token_tree(
        noisy, sampling.scale, sampling.drawn, left_out, rows, info, shape.width, nodes, used is None
    )
    if not pruned:
        return columns, parents, log_probs
    return torch.cat([roots[:, None], tracing.take(tables[-1], columns[:, 1:])], dim=1), parents, log_probs


class _Draft(DraftGraph[LyannaDrafter]):
    """The draft graph's computation, with inputs and outputs in the order of `draft_inputs` and `draft_outputs`."""

    def forward(
        self, features: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, pending: torch.Tensor,
        cache_len: torch.Tensor, kv_len: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sampling: Sampling,
        tables: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        attention = ChainAttention(self.drafter.config, positions, pending, cache_len, kv_len, key, value)
        chain = [
            self.drafter.first(features, self.embed(tokens), positions, attention.catch_up(), attention.last)
        ]  # [B, 1, n] each
        for _ in range(1, self.shape.steps):
            chain.append(self.drafter.following(chain[-1], *attention.next_step()))
        logits = self.logits(torch.cat(chain, dim=1))  # [B, N, H], in one product
        roots = attention.last_token(tokens)[:, 0]
        tree = _tree(self.shape, logits, sampling, None, roots, tables, self.shape.nodes)
        return (*tree, logits, *attention.caches)


class _Resample(nn.Module):
    """The resample graph's computation, with inputs in the order of `resample_inputs`."""

    def __init__(self, shape: LyannaShape) -> None:
        super().__init__()
        self.shape = shape

    def forward(
        self, chain_logits: torch.Tensor, first_step: torch.Tensor, tokens: torch.Tensor, sampling: Sampling,
        tables: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        steps, nodes = self.shape.steps, self.shape.resample_nodes
        wanted = first_step[:, None] + torch.arange(steps - 1)
        wanted = torch.minimum(wanted, torch.tensor(steps - 1))  # TensorRT's Clip takes floats only
        left = tracing.gather_rows(chain_logits, wanted)  # [B, N - 1, H]
        tree = _tree(self.shape, left, sampling, first_step - 1, tokens, tables, nodes)
        sizes = [min(tree_size(remaining, self.shape.width), nodes) for remaining in range(steps)]
        return (*tree, torch.index_select(torch.tensor(sizes), 0, steps - first_step))


def _export_resample(name: str, shape: LyannaShape, out: Path) -> None:
    b = torch.export.Dim("B", min=1)
    args = (
        torch.zeros(2, shape.steps, shape.draft_vocabulary), torch.ones(2, dtype=torch.long),
        torch.zeros(2, dtype=torch.long), Sampling.example(shape.steps - 1), examples(METHOD.tables(shape)),
    )  # fmt: skip
    fixed: list[dict[int, Any]] = [{} for _ in METHOD.tables(shape)]
    model = tracing.trace_graph(
        _Resample(shape), args, ({0: b}, {0: b}, {0: b}, Sampling.dims(b), fixed), resample_inputs(shape),
        resample_outputs(shape), _TRANSLATIONS,
    )  # fmt: skip
    passes.simplify(model)
    finish(model)
    ir.save(model, out / graph_file(name, names.RESAMPLE))
