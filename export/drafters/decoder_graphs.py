"""The draft graph of a drafter that is a decoder: the verifier's own export, with the best candidates after each row.

draft    one run computes rows of tokens, with their biases if the decoder has steering
steer    computes these biases from the verifier's hidden states, once a draft
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from redraft import names
from redraft.config import Precision
from redraft.errors import CheckpointError
from redraft.export.checkpoint import model_config
from redraft.export.checkpoint.architecture import Architecture
from redraft.export.checkpoint.base import AnyCheckpoint
from redraft.export.checkpoint.loading import LoadedTensors, check_finite, load_tensors
from redraft.export.checkpoint.model_config import decoder_shape
from redraft.export.checkpoint.sources import AnySource, DrafterSource, RandomSource, Source
from redraft.export.checkpoint.weight_files import STORED, Progress, no_progress
from redraft.export.drafters import ExportedDrafter, Exporter, graph_file
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity, TokenData
from redraft.export.drafters.decoder_drafter import DraftModel, DraftModelConfig, sizes_of
from redraft.export.drafters.draft_graph import (
    Sampling,
    check_fit,
    drafter_precision,
    empty_module,
    examples,
    likeliest,
    parameter_shapes,
    rename,
    stem,
    write_tables,
)
from redraft.export.drafters.draft_vocabulary import DraftVocabulary, check_counted
from redraft.export.drafters.steering import Steering, steer
from redraft.export.drafters.steering_graph import parameters_of, write_steering
from redraft.export.graph import passes, tracing
from redraft.export.graph.attention import LayerRecorder
from redraft.export.graph.decoder import TracedDecoder, finish, trace_decoder
from redraft.export.reference import first_layers
from redraft.export.verifier import VerifierExport
from redraft.export.weights import place
from redraft.methods.base import Method
from redraft.methods.chains import DRAWN_LOG_PROB, draft_vocabulary_tables
from redraft.methods.decoder import DecoderBuild, DecoderShape, draft_inputs, draft_outputs
from redraft.names import DRAFT, WeightRef
from redraft.signatures import VerifierShape

RANDOM_LAYERS = 4
"""Layers of a drafter with random weights."""


def exporter_of(method: Method[DecoderShape]) -> Exporter:
    """Return the exporter of a method."""

    def configure(drafter: DrafterCheckpoint, options: DecoderBuild) -> DraftModelConfig:
        """Return a drafter's configuration. Raises CheckpointError if only one of drafter and method has steering."""
        settings = drafter.configure(DraftModelConfig)
        if settings.hidden_states and not method.hidden_states:
            raise CheckpointError(
                f"{drafter.path} has steering, which {method.id} does not read", f"leave out method={method.id}"
            )
        if method.hidden_states and not settings.hidden_states:
            raise CheckpointError(
                f"{drafter.path} is a drafter of {drafter.method}: it has no steering",
                f"train it on with `redraft train {method.command} --start {drafter.path}`",
            )
        return settings

    def trained(
        name: str, drafter: DrafterCheckpoint, verifier: VerifierExport, identity: Identity, out: Path,
        options: DecoderBuild, progress: Progress = no_progress,
    ) -> ExportedDrafter:  # fmt: skip
        """Write the graphs of a drafter that was trained for this verifier, with its embedding and rows of its head.

        Raises CheckpointError if it belongs to another verifier or method, or does not load.
        """
        settings = configure(drafter, options)
        check_fit(drafter, settings, verifier, identity)
        module = empty_module(lambda: DraftModel(settings), verifier.shape.dtype)
        source, data = drafter.open_weights(parameter_shapes(module), stem(name))
        own = _Own(
            Architecture.of(settings.transformers), source=source, draft_logit_scale=settings.draft_logit_scale,
            hidden_states=settings.hidden_states,
        )  # fmt: skip
        vocabulary = DraftVocabulary.of(data, settings.limited(options.draft_vocabulary))
        return _export(name, method, own, vocabulary, verifier, out, options, progress)

    def random(
        name: str, configuration: Any, verifier: VerifierExport, out: Path, options: DecoderBuild,
        progress: Progress = no_progress,
    ) -> ExportedDrafter:  # fmt: skip
        """Write the graphs of RANDOM_LAYERS layers with random weights for a verifier of this configuration."""
        layers = min(RANDOM_LAYERS, decoder_shape(configuration.get_text_config(decoder=True)).layers)
        own = _Own(Architecture.of(first_layers(configuration, layers)), hidden_states=method.hidden_states)
        tokens = verifier.shape.vocabulary
        vocabulary = DraftVocabulary.of(_all_tokens(tokens), min(options.draft_vocabulary or tokens, tokens))
        return _export(name, method, own, vocabulary, verifier, out, options, progress)

    def checkpoint(
        name: str, checkpoint: AnyCheckpoint, verifier: VerifierExport, out: Path, options: DecoderBuild,
        progress: Progress = no_progress,
    ) -> ExportedDrafter:  # fmt: skip
        """Write the graph of a plain checkpoint, by the id `name`, into `out`, next to the graph of its verifier.

        The caller has compared the tokenizers. The logits have columns for the ids that both vocabularies have; the
        last row of the embedding stands for ids beyond it. Raises CheckpointError for too short a context, and like
        `export_verifier`.
        """
        check_counted(name, options.draft_vocabulary, "a plain checkpoint")
        architecture = Architecture.of(model_config.load_config(checkpoint))
        text, tokens = architecture.text, verifier.shape.vocabulary
        loaded = load_tensors(checkpoint, architecture)
        text.tie_word_embeddings = loaded.tied
        check_finite(checkpoint)
        own = _Own(architecture, checkpoint, loaded)
        vocabulary = DraftVocabulary.of(_all_tokens(tokens), min(tokens, decoder_shape(text).vocabulary))
        return _export(name, method, own, vocabulary, verifier, out, options, progress)

    return Exporter(configure, trained, random, checkpoint if method.takes_checkpoints else None)


@dataclass(frozen=True)
class _Own:
    """The parts of a drafter that are its own.

    checkpoint, loaded: a plain checkpoint's.   source: the weights of a trained one. Without them, weights are random.
    hidden_states: of the verifier, which steer it.
    shares: True if embedding and head are the verifier's, which all but plain checkpoints use.
    """

    architecture: Architecture
    checkpoint: AnyCheckpoint | None = None
    loaded: LoadedTensors | None = None
    source: AnySource | None = None
    draft_logit_scale: float = 1.0
    hidden_states: tuple[str, ...] = ()

    @property
    def shares(self) -> bool:
        return self.loaded is None


def _all_tokens(tokens: int) -> TokenData:
    return TokenData(torch.ones(tokens, dtype=torch.long))


def _export(
    name: str, method: Method[DecoderShape], own: _Own, vocabulary: DraftVocabulary, verifier: VerifierExport,
    out: Path, options: DecoderBuild, progress: Progress,
) -> ExportedDrafter:  # fmt: skip
    precision = drafter_precision(options.precision, verifier)
    progress("trace drafter", 0, 1)
    shape, traced, steering = _traced(name, method, own, len(vocabulary.tokens), verifier, options)
    source, new_names = _source(name, own, traced, steering, vocabulary, verifier, out, precision)
    shared = verifier.weights if own.shares else ()
    weights = _write(name, traced.model, source, new_names, shared, out, precision, progress)
    if steering is not None:
        weights += write_steering(name, steering, shape, source, out, precision, progress)
    return ExportedDrafter(shape, precision, weights, write_tables(name, vocabulary.tables(), out))


def _traced(
    name: str, method: Method[DecoderShape], own: _Own, tokens: int, verifier: VerifierExport, options: DecoderBuild
) -> tuple[DecoderShape, TracedDecoder, Steering | None]:
    """Trace the decoder for texts as long as the verifier's, with `tokens` rows of the head.

    Returns its steering too, without values.
    """
    text, context = own.architecture.text, verifier.shape.max_positions
    limits = sizes_of(name, text, context, verifier.shape.dtype)
    # Rows beyond the context: a call's padding, and drafted tokens that the verifier never sees.
    rows = replace(limits, max_positions=names.kv_rows(context + method.spare_rows) + 1)
    made: list[DecoderShape] = []
    steerings: list[Steering] = []

    def trace(network: nn.Module, recorded: LayerRecorder, found: VerifierShape) -> ir.Model:
        shape = _shape(own, found, tokens, sum(steerings[0].sizes) if steerings else 0, verifier, options)
        made.append(shape)
        decoder = tracing.VerifierModule(network, (), recorded)
        return _trace(_Graph(decoder, steerings[0] if steerings else None, shape, found.vocabulary), shape)

    def change(network: Any) -> None:
        if own.shares:
            _set_head(network, tokens)
        if states := len(own.hidden_states):
            sizes = steer(network.base_model, decoder_shape(text).layers)
            width = verifier.shape.hidden
            steerings.append(empty_module(lambda: Steering(width, states, sizes), verifier.shape.dtype))

    traced = trace_decoder(own.architecture, rows, own.checkpoint, own.loaded, trace, change=change)
    return made[0], traced, steerings[0] if steerings else None


def _set_head(network: Any, tokens: int) -> None:
    """Give the network a head of `tokens` rows of its own."""
    weight = network.get_output_embeddings().weight
    with torch.device("meta"):
        head = nn.Linear(weight.shape[1], tokens, bias=False, dtype=weight.dtype)
    network.set_output_embeddings(head.to_empty(device="cpu").requires_grad_(False))


def _shape(
    own: _Own, found: VerifierShape, tokens: int, steering: int, verifier: VerifierExport, options: DecoderBuild
) -> DecoderShape:
    return DecoderShape(
        layers=found.layers,
        hidden=found.hidden,
        vocabulary=verifier.shape.vocabulary,
        kv_heads=found.kv_heads,
        head_dim=found.head_dim,
        steps=options.steps,
        width=options.width,
        nodes=options.tree_nodes,
        draft_vocabulary=tokens,
        draft_logit_scale=own.draft_logit_scale,
        dtype=found.dtype,
        hidden_states=own.hidden_states,
        steering=steering,
    )


class _Graph(nn.Module):
    """The graph's computation, with inputs and outputs in the order of `draft_inputs` and `draft_outputs`.

    tokens: the decoder's own vocabulary, rows of its embedding. The verifier's may be larger or smaller.
    """

    def __init__(
        self, decoder: tracing.VerifierModule, steering: Steering | None, shape: DecoderShape, tokens: int
    ) -> None:
        super().__init__()
        self.model = decoder.model
        self.__dict__["decoder"], self.__dict__["steering"] = decoder, steering  # no submodules: not its parameters
        self._shape, self._tokens = shape, tokens

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, tree_mask: torch.Tensor, cache_len: torch.Tensor,
        kv_len: torch.Tensor, output_rows: torch.Tensor, caches: list[torch.Tensor], biases: list[torch.Tensor],
        sampling: Sampling, tables: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        decoder: tracing.VerifierModule = self.__dict__["decoder"]
        steering: Steering | None = self.__dict__["steering"]
        if self._tokens < self._shape.vocabulary:
            token_ids = token_ids.clamp(max=self._tokens - 1)
        with steering.applied(*biases) if steering else nullcontext():
            logits, *updates = decoder(token_ids, positions, tree_mask, cache_len, kv_len, output_rows, caches)
        if self._tokens > self._shape.vocabulary:
            logits = logits[..., : self._shape.vocabulary]
        z = sampling.noisy(logits, tables) * sampling.scale[:, None, None]  # [B, R, H]
        log_probs, columns = likeliest(z, self._shape.width)
        tokens = tracing.take(tables[-1], columns) if tables else columns
        by_rank = torch.arange(1, self._shape.width + 1) * DRAWN_LOG_PROB
        log_probs = torch.where(sampling.drawn[:, None, None] > 0, by_rank, log_probs)
        return (tokens, log_probs, logits, *updates)


def _trace(graph: _Graph, shape: DecoderShape) -> ir.Model:
    b, t, r, c = (torch.export.Dim(symbol, min=low) for symbol, low in (("B", 1), ("T", 1), ("R", 1), ("C", 2)))
    tables = draft_vocabulary_tables(shape)
    args, dynamic = tracing.decoder_arguments(shape.decoder, b, t, r, c)
    biases = [torch.zeros(*args[0].shape, shape.steering, dtype=tracing.TORCH[shape.dtype])] if shape.steering else []
    keys = torch.ones(*args[5].shape, 2, dtype=torch.long)
    sampling = Sampling.example(1)._replace(keys=keys)
    sizes = Sampling.dims(b)._replace(keys={0: b, 1: r})
    fixed: list[dict[int, Any]] = [{} for _ in tables]
    return tracing.trace_graph(
        graph, (*args, biases, sampling, examples(tables)), (*dynamic, [{0: b, 1: t}] * len(biases), sizes, fixed),
        draft_inputs(shape), draft_outputs(shape),
    )  # fmt: skip


def _source(
    name: str, own: _Own, traced: TracedDecoder, steering: Steering | None, vocabulary: DraftVocabulary,
    verifier: VerifierExport, out: Path, precision: Precision,
) -> tuple[AnySource, dict[str, str]]:  # fmt: skip
    """Return the source of both graphs' parameters, and the names in a bundle of the traced decoder's."""
    mine = stem(name)
    new_names = {parameter: f"{mine}{parameter}" for parameter in traced.parameters}
    if not own.shares:
        assert own.checkpoint is not None
        shapes = {new_names[key]: size for key, size in traced.parameters.items()}
        tensors = {new_names[key]: tensor for key, tensor in traced.tensors.items()}
        return Source(own.checkpoint, shapes, tensors, mine), new_names
    head = vocabulary.head(verifier.source, verifier.head, f"{mine}head")
    new_names |= {traced.head: head.name if head else verifier.head, traced.embedding: verifier.embedding}
    shapes = {new_names[key]: size for key, size in traced.parameters.items()}
    for shared in (traced.head, traced.embedding):
        shapes.pop(new_names[shared], None)
    if steering is not None:
        shapes |= parameters_of(name, steering)
    source = own.source or RandomSource.write(shapes, out, STORED[precision], f"{mine}random")
    return DrafterSource(DrafterSource(source, head) if head else source, verifier.source), new_names


def _write(
    name: str, model: ir.Model, source: AnySource, new_names: dict[str, str], shared: tuple[WeightRef, ...], out: Path,
    precision: Precision, progress: Progress,
) -> tuple[WeightRef, ...]:  # fmt: skip
    """Write the traced decoder's graph and its weights. Returns their places.   shared: those of the verifier."""
    passes.simplify(model)
    rename(model, new_names)
    refs = place(model, source, out, precision, progress, file=name, shared=shared)
    finish(model)
    ir.save(model, out / graph_file(name, DRAFT))
    return refs
