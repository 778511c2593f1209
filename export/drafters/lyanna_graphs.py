"""Lyanna's two graphs and its table of token information.

    draft            one call: catches up on the rows since the last draft, unrolls the chain, multiplies its states by
    the head in one product, and builds the tree of their logits
    resample         builds a tree of the logits that a verification left unused; its only weights are the table

The head and the embedding are the verifier's own bytes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from redraft import names
from redraft.errors import CheckpointError
from redraft.export import passes, tracing
from redraft.export.drafters import ExportedDrafter, Exporter, graph_file
from redraft.export.drafters import lyanna_token_info as token_info
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity, fill
from redraft.export.drafters.draft_graph import (
    ChainAttention,
    DraftGraph,
    check_fit,
    drafter_precision,
    empty_module,
    parameter_shapes,
    random_source,
    stem,
    write_draft,
)
from redraft.export.drafters.lyanna import LyannaConfig, LyannaDrafter, configuration_of
from redraft.export.drafters.lyanna_token_tree import emit_token_tree, token_tree
from redraft.export.sources import AnySource
from redraft.export.verifier import VerifierExport, finish
from redraft.export.weight_files import Progress, no_progress
from redraft.methods.lyanna import (
    LyannaBuild,
    LyannaShape,
    draft_inputs,
    draft_outputs,
    resample_inputs,
    resample_nodes,
    resample_outputs,
    token_info_tables,
    tree_size,
)
from redraft.names import Dtype

_TRANSLATIONS = {**tracing.TRANSLATIONS, torch.ops.redraft.token_tree.default: emit_token_tree}


def export_lyanna(
    name: str, drafter: DrafterCheckpoint, verifier: VerifierExport, identity: Identity, out: Path,
    options: LyannaBuild, progress: Progress = no_progress,
) -> ExportedDrafter:  # fmt: skip
    """Write the graphs of `drafter`, by the id `name`, into `out`, next to the graph of its verifier.

    Raises CheckpointError if the drafter was trained for another verifier or does not load.
    """
    settings = drafter.configure(LyannaConfig)
    check_fit(drafter, settings, verifier, identity)
    module = empty_drafter(settings, verifier.shape.dtype)
    source, counts = drafter.open_weights(parameter_shapes(module), stem(name))
    return _export(name, module, source, counts, verifier, out, options, progress)


def export_random_lyanna(
    name: str, settings: LyannaConfig, verifier: VerifierExport, out: Path, options: LyannaBuild,
    progress: Progress = no_progress,
) -> ExportedDrafter:  # fmt: skip
    """Write the graphs of a drafter with random weights and equal token counts, for latency work."""
    module = empty_drafter(settings, verifier.shape.dtype)
    source = random_source(name, module, drafter_precision(options.precision, verifier), out)
    return _export(name, module, source, torch.ones(settings.vocab_size), verifier, out, options, progress)


def export_random_for(
    name: str, configuration: Any, verifier: VerifierExport, out: Path, options: LyannaBuild, progress: Progress
) -> ExportedDrafter:
    """Write the graphs of a random drafter for a verifier of this transformers configuration."""
    steps = {"steps": options.steps} if options.steps else {}
    settings = configuration_of(configuration, verifier.shape.vocabulary, **steps)
    return export_random_lyanna(name, settings, verifier, out, options, progress)


EXPORTER = Exporter(export_lyanna, export_random_for)


def empty_drafter(settings: LyannaConfig, dtype: Dtype) -> LyannaDrafter:
    """Return the module with uninitialized weights; its token information is in fp32."""
    module = empty_module(lambda: LyannaDrafter(settings), dtype)
    if module.token_info is not None:
        module.token_info.to(torch.float32)
    return module


def _export(
    name: str, module: LyannaDrafter, source: AnySource, counts: torch.Tensor, verifier: VerifierExport, out: Path,
    options: LyannaBuild, progress: Progress,
) -> ExportedDrafter:  # fmt: skip
    precision = drafter_precision(options.precision, verifier)
    shape = replace(lyanna_shape(module.config, options), dtype=verifier.shape.dtype)
    if module.token_info is not None:
        for parameter, tensor in module.token_info.state_dict().items():
            fill(tensor, source, f"{stem(name)}token_info.{parameter}")
    progress("token information", 0, 1)
    embedding = verifier.source.slabs(verifier.embedding)
    made = token_info.make_tables(module, embedding, counts, shape)
    tables = token_info.write(made, out, token_info.token_info_file(name))
    progress("trace drafter", 0, 1)
    module.token_info = None
    graph = _Draft(module, module.config, shape, verifier.shape.max_positions)
    weights = write_draft(
        name, graph, source, verifier, shape, out, precision, progress, (draft_inputs(shape), draft_outputs(shape)),
        token_info.examples(shape), _TRANSLATIONS, names.CHAIN_LOGITS,
    )  # fmt: skip
    if shape.steps > 1:
        _export_resample(name, shape, out)
    return ExportedDrafter(shape, precision, weights, tables)


def lyanna_shape(config: LyannaConfig, options: LyannaBuild) -> LyannaShape:
    """Return the sizes of the graphs. Raises CheckpointError for more steps than the drafter was trained for."""
    steps = options.steps or config.steps
    if steps > config.steps:
        raise CheckpointError(
            f"the drafter was trained for {config.steps} steps, not {steps}",
            f"build it with at most steps={config.steps}",
        )
    hot = config.vocab_size if config.vocab_size <= options.prune_above else min(options.hot_tokens, config.vocab_size)
    return LyannaShape(
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        steps=steps,
        width=options.width,
        nodes=min(options.nodes + 1, tree_size(steps, options.width)),
        token_info=options.token_info,
        hot=hot,
        rank=config.rank,
    )


class _Draft(DraftGraph[LyannaDrafter]):
    """The draft graph's computation, with inputs and outputs in the order of `draft_inputs` and `draft_outputs`."""

    def forward(
        self, features: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, pending: torch.Tensor,
        cache_len: torch.Tensor, kv_len: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        tables: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        attention = ChainAttention(self.drafter.config, positions, pending, cache_len, kv_len, key, value)
        chain = [
            self.drafter.first(features, self.embed(tokens), positions, attention.catch_up(), attention.last)
        ]  # [B, 1, n] each
        for _ in range(1, self.shape.steps):
            chain.append(self.drafter.following(chain[-1], *attention.next_step()))
        logits = self.logits(torch.cat(chain, dim=1))  # [B, N, V], in one product
        roots = attention.last_token(tokens)[:, 0]
        tree = token_tree(logits, roots, roots, tables, self.shape.width, self.shape.nodes, True)
        return (*tree, logits, *attention.caches)


class _Resample(nn.Module):
    """The resample graph's computation, with inputs in the order of `resample_inputs`."""

    def __init__(self, shape: LyannaShape) -> None:
        super().__init__()
        self.shape = shape

    def forward(
        self, chain_logits: torch.Tensor, first_step: torch.Tensor, tokens: torch.Tensor, tables: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        steps, nodes = self.shape.steps, resample_nodes(self.shape)
        wanted = first_step[:, None] + torch.arange(steps - 1)
        wanted = torch.minimum(wanted, torch.tensor(steps - 1))  # TensorRT's Clip takes floats only
        left = tracing.gather_rows(chain_logits, wanted)  # [B, N - 1, V]
        tree = token_tree(left, first_step - 1, tokens, tables, self.shape.width, nodes, False)
        sizes = [min(tree_size(remaining, self.shape.width), nodes) for remaining in range(steps)]
        return (*tree, torch.index_select(torch.tensor(sizes), 0, steps - first_step))


def _export_resample(name: str, shape: LyannaShape, out: Path) -> None:
    b = torch.export.Dim("B", min=1)
    args = (
        torch.zeros(2, shape.steps, shape.vocabulary), torch.ones(2, dtype=torch.long),
        torch.zeros(2, dtype=torch.long), token_info.examples(shape),
    )  # fmt: skip
    fixed: list[dict[int, Any]] = [{} for _ in token_info_tables(shape)]
    model = tracing.trace_graph(
        _Resample(shape), args, ({0: b}, {0: b}, {0: b}, fixed), resample_inputs(shape),
        resample_outputs(shape), _TRANSLATIONS,
    )  # fmt: skip
    passes.simplify(model)
    finish(model)
    ir.save(model, out / graph_file(name, names.RESAMPLE))
