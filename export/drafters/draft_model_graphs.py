"""The graph of an independent draft model: the verifier's own export, with the best candidates after each row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from redraft import names
from redraft.config import Precision
from redraft.errors import CheckpointError, UsageError
from redraft.export import passes, support, tracing
from redraft.export.architecture import Architecture
from redraft.export.attention import LayerRecorder
from redraft.export.checkpoint import AnyCheckpoint
from redraft.export.drafters import ExportedDrafter, Exporter, graph_file
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity, TokenData
from redraft.export.drafters.draft_graph import (
    Sampling,
    drafter_precision,
    empty_module,
    examples,
    likeliest,
    parameter_shapes,
    rename,
    stem,
    write_tables,
)
from redraft.export.drafters.draft_model import DraftModel, DraftModelConfig
from redraft.export.drafters.draft_vocabulary import DraftVocabulary
from redraft.export.loading import LoadedTensors, check_finite, load_tensors
from redraft.export.reference import first_layers
from redraft.export.shapes import decoder_shape
from redraft.export.sources import AnySource, DrafterSource, RandomSource, Source
from redraft.export.verifier import TracedDecoder, VerifierExport, finish, trace_decoder
from redraft.export.weight_files import STORED, Progress, no_progress
from redraft.export.weights import place
from redraft.methods.chains import DRAWN_LOG_PROB
from redraft.methods.draft_model import (
    METHOD,
    DraftModelBuild,
    DraftModelShape,
    draft_inputs,
    draft_outputs,
    tree_nodes,
)
from redraft.names import DRAFT, WeightRef
from redraft.signatures import VerifierShape

RANDOM_LAYERS = 4
"""Layers of a draft model with random weights."""
USUAL_NODES = 32
"""Nodes of a tree without its root, unless the options name another number."""


def export_checkpoint(
    name: str, checkpoint: AnyCheckpoint, verifier: VerifierExport, out: Path, options: DraftModelBuild,
    progress: Progress = no_progress,
) -> ExportedDrafter:  # fmt: skip
    """Write the graph of a plain checkpoint, by the id `name`, into `out`, next to the graph of its verifier.

    The caller has compared the tokenizers. Raises CheckpointError for another vocabulary size or too short a context,
    and like `export_verifier`.
    """
    if options.draft_vocabulary is not None:
        raise UsageError(
            f"drafter {name}: draft_vocabulary needs counts of tokens, and a plain checkpoint has none",
            "leave it out, or give a drafter that `redraft train publish` wrote",
        )
    architecture = Architecture.of(support.load_config(checkpoint))
    text, tokens = architecture.text, verifier.shape.vocabulary
    if (found := decoder_shape(text).vocabulary) != tokens:
        raise CheckpointError(
            f"drafter {name}: {checkpoint.path} has a vocabulary of {found} tokens, the verifier has {tokens}",
            "give a draft model with the verifier's tokenizer and vocabulary",
        )
    loaded = load_tensors(checkpoint, architecture)
    text.tie_word_embeddings = loaded.tied
    check_finite(checkpoint)
    own = _Own(architecture, checkpoint, loaded)
    return _export(name, own, DraftVocabulary.of(_all_tokens(tokens), tokens), verifier, out, options, progress)


def export_trained(
    name: str, drafter: DrafterCheckpoint, verifier: VerifierExport, identity: Identity, out: Path,
    options: DraftModelBuild, progress: Progress = no_progress,
) -> ExportedDrafter:  # fmt: skip
    """Write the graph of a draft model that was trained for this verifier, with its embedding and rows of its head.

    Raises CheckpointError if it belongs to another verifier or does not load.
    """
    settings = drafter.configure(DraftModelConfig)
    drafter.check_verifier(settings, verifier.shape.hidden, verifier.shape.vocabulary, identity)
    module = empty_module(lambda: DraftModel(settings), verifier.shape.dtype)
    source, data = drafter.open_weights(parameter_shapes(module), stem(name))
    own = _Own(Architecture.of(settings.transformers), source=source, draft_logit_scale=settings.draft_logit_scale)
    vocabulary = DraftVocabulary.of(data, settings.limited(options.draft_vocabulary))
    return _export(name, own, vocabulary, verifier, out, options, progress)


def export_random(
    name: str, configuration: Any, verifier: VerifierExport, out: Path, options: DraftModelBuild,
    progress: Progress = no_progress,
) -> ExportedDrafter:  # fmt: skip
    """Write the graph of RANDOM_LAYERS layers with random weights for a verifier of this configuration."""
    layers = min(RANDOM_LAYERS, decoder_shape(configuration.get_text_config(decoder=True)).layers)
    own = _Own(Architecture.of(first_layers(configuration, layers)))
    tokens = verifier.shape.vocabulary
    vocabulary = DraftVocabulary.of(_all_tokens(tokens), min(options.draft_vocabulary or tokens, tokens))
    return _export(name, own, vocabulary, verifier, out, options, progress)


EXPORTER = Exporter(export_trained, export_random, export_checkpoint)


@dataclass(frozen=True)
class _Own:
    """The parts of a draft model that are its own.

    checkpoint, loaded: a plain checkpoint's.   source: the weights of a trained one. Without them, weights are random.
    shares: True if embedding and head are the verifier's, which all but plain checkpoints use.
    """

    architecture: Architecture
    checkpoint: AnyCheckpoint | None = None
    loaded: LoadedTensors | None = None
    source: AnySource | None = None
    draft_logit_scale: float = 1.0

    @property
    def shares(self) -> bool:
        return self.loaded is None


def _all_tokens(tokens: int) -> TokenData:
    return TokenData(torch.ones(tokens, dtype=torch.long))


def _export(
    name: str, own: _Own, vocabulary: DraftVocabulary, verifier: VerifierExport, out: Path, options: DraftModelBuild,
    progress: Progress,
) -> ExportedDrafter:  # fmt: skip
    precision = drafter_precision(options.precision, verifier)
    progress("trace drafter", 0, 1)
    shape, traced = _traced(name, own, len(vocabulary.tokens), verifier, options)
    weights = _write(name, own, traced, vocabulary, verifier, out, precision, progress)
    return ExportedDrafter(shape, precision, weights, write_tables(name, vocabulary.tables(), out))


def _traced(
    name: str, own: _Own, tokens: int, verifier: VerifierExport, options: DraftModelBuild
) -> tuple[DraftModelShape, TracedDecoder]:
    """Trace the draft model for texts as long as the verifier's, with `tokens` rows of the head."""
    text, context = own.architecture.text, verifier.shape.max_positions
    try:
        limits = support.verifier_shape(text, context, verifier.shape.dtype)
    except UsageError:
        raise CheckpointError(
            f"drafter {name}: its texts have at most {support.verifier_shape(text, None).max_positions} tokens, the "
            f"verifier's have {context}",
            "build with a smaller --max-model-len, or give another draft model",
        ) from None
    support.check_rope(text, context)
    # Rows beyond the context: a call's padding, and drafted tokens that the verifier never sees.
    rows = replace(limits, max_positions=names.kv_rows(context + METHOD.spare_rows) + 1)
    made: list[DraftModelShape] = []

    def trace(network: nn.Module, recorded: LayerRecorder, found: VerifierShape) -> ir.Model:
        shape = _shape(own, found, tokens, verifier, options)
        made.append(shape)
        return _trace(_Graph(tracing.VerifierModule(network, (), recorded), shape), shape)

    def change(network: nn.Module) -> None:
        if own.shares:
            _set_head(network, tokens)

    traced = trace_decoder(own.architecture, rows, own.checkpoint, own.loaded, trace, change=change)
    return made[0], traced


def _set_head(network: Any, tokens: int) -> None:
    """Give the network a head of `tokens` rows of its own."""
    weight = network.get_output_embeddings().weight
    with torch.device("meta"):
        head = nn.Linear(weight.shape[1], tokens, bias=False, dtype=weight.dtype)
    network.set_output_embeddings(head.to_empty(device="cpu").requires_grad_(False))


def _shape(
    own: _Own, found: VerifierShape, tokens: int, verifier: VerifierExport, options: DraftModelBuild
) -> DraftModelShape:
    most = tree_nodes(options.steps, options.width)
    usual = options.steps if options.width == 1 else USUAL_NODES
    return DraftModelShape(
        layers=found.layers,
        hidden=found.hidden,
        vocabulary=verifier.shape.vocabulary,
        kv_heads=found.kv_heads,
        head_dim=found.head_dim,
        steps=options.steps,
        width=options.width,
        nodes=min(1 + (options.nodes or usual), most),
        draft_vocabulary=tokens,
        draft_logit_scale=own.draft_logit_scale,
        dtype=found.dtype,
    )


class _Graph(nn.Module):
    """The graph's computation, with inputs and outputs in the order of `draft_inputs` and `draft_outputs`."""

    def __init__(self, decoder: tracing.VerifierModule, shape: DraftModelShape) -> None:
        super().__init__()
        self.model = decoder.model
        self.__dict__["decoder"] = decoder
        self._width = shape.width

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, tree_mask: torch.Tensor, cache_len: torch.Tensor,
        kv_len: torch.Tensor, output_rows: torch.Tensor, caches: list[torch.Tensor], sampling: Sampling,
        tables: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        decoder: tracing.VerifierModule = self.__dict__["decoder"]
        logits, *updates = decoder(token_ids, positions, tree_mask, cache_len, kv_len, output_rows, caches)
        z = sampling.noisy(logits, tables) * sampling.scale[:, None, None]  # [B, R, H]
        log_probs, columns = likeliest(z, self._width)
        tokens = tracing.take(tables[-1], columns) if tables else columns
        by_rank = torch.arange(1, self._width + 1) * DRAWN_LOG_PROB
        log_probs = torch.where(sampling.drawn[:, None, None] > 0, by_rank, log_probs)
        return (tokens, log_probs, logits, *updates)


def _trace(graph: _Graph, shape: DraftModelShape) -> ir.Model:
    b, t, r, c = (torch.export.Dim(symbol, min=low) for symbol, low in (("B", 1), ("T", 1), ("R", 1), ("C", 2)))
    tables = METHOD.tables(shape)
    args, dynamic = tracing.decoder_arguments(shape.decoder, b, t, r, c)
    keys = torch.ones(*args[5].shape, 2, dtype=torch.long)
    sampling = Sampling.example(1)._replace(keys=keys)
    sizes = Sampling.dims(b)._replace(keys={0: b, 1: r})
    fixed: list[dict[int, Any]] = [{} for _ in tables]
    return tracing.trace_graph(
        graph, (*args, sampling, examples(tables)), (*dynamic, sizes, fixed), draft_inputs(shape), draft_outputs(shape)
    )


def _write(
    name: str, own: _Own, traced: TracedDecoder, vocabulary: DraftVocabulary, verifier: VerifierExport, out: Path,
    precision: Precision, progress: Progress,
) -> tuple[WeightRef, ...]:  # fmt: skip
    """Write the traced graph and its weights. Returns their places."""
    model, mine = traced.model, stem(name)
    passes.simplify(model)
    new_names = {parameter: f"{mine}{parameter}" for parameter in traced.parameters}
    source: AnySource
    if own.shares:
        head = vocabulary.head(verifier.source, verifier.head, f"{mine}head")
        new_names |= {traced.head: head.name if head else verifier.head, traced.embedding: verifier.embedding}
        shapes = {new_names[key]: size for key, size in traced.parameters.items()}
        for shared in (traced.head, traced.embedding):
            shapes.pop(new_names[shared], None)
        source = own.source or RandomSource.write(shapes, out, STORED[precision], f"{mine}random")
        source = DrafterSource(DrafterSource(source, head) if head else source, verifier.source)
    else:
        assert own.checkpoint is not None
        shapes = {new_names[key]: size for key, size in traced.parameters.items()}
        tensors = {new_names[key]: tensor for key, tensor in traced.tensors.items()}
        source = Source(own.checkpoint, shapes, tensors, mine)
    rename(model, new_names)
    refs = place(model, source, out, precision, progress, file=name, shared=verifier.weights if own.shares else ())
    finish(model)
    ir.save(model, out / graph_file(name, DRAFT))
    return refs
