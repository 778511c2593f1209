"""The draft graph of a drafter that is a decoder: the verifier's own export, with the best candidates after each row.

draft    one run computes rows of tokens, with their biases if the decoder has steering
steer    computes these biases from the verifier's hidden states, once a draft
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from redraft import names
from redraft.errors import CheckpointError
from redraft.export.checkpoint import model_config
from redraft.export.checkpoint.architecture import Architecture
from redraft.export.checkpoint.base import AnyCheckpoint
from redraft.export.checkpoint.loading import LoadedTensors, check_finite, load_tensors
from redraft.export.checkpoint.model_config import decoder_shape
from redraft.export.checkpoint.sources import AnySource, DrafterSource, Source
from redraft.export.drafters import ExportedDrafter
from redraft.export.drafters.checkpoint import DrafterCheckpoint, TokenData
from redraft.export.drafters.decoder_drafter import DraftModel, DraftModelConfig, sizes_of
from redraft.export.drafters.draft_graph import Sampling
from redraft.export.drafters.draft_head import DraftHead, check_verifiers
from redraft.export.drafters.draft_vocabulary import DraftVocabulary, check_counted
from redraft.export.drafters.exporter import Exporter
from redraft.export.drafters.level_tree import likeliest, rank_log_probs
from redraft.export.drafters.steering import Mechanism, SteerGraph, Steering, steer
from redraft.export.drafters.writing import (
    Target,
    empty_module,
    parameter_shapes,
    random_source,
    stem,
    trace,
    write_graph,
    write_tables,
)
from redraft.export.graph import passes, tracing
from redraft.export.graph.attention import LayerRecorder
from redraft.export.graph.decoder import TracedDecoder, trace_decoder
from redraft.export.reference import first_layers
from redraft.methods.base import Method
from redraft.methods.decoder import (
    DecoderBuild,
    DecoderShape,
    draft_inputs,
    draft_outputs,
    steer_inputs,
    steer_outputs,
)
from redraft.names import STEER, WeightRef
from redraft.signatures import VerifierShape, verifier_inputs

RANDOM_LAYERS = 4
"""Layers of a drafter with random weights."""
_STEERING = "steering."
"""The prefix of its parameters in a drafter and in traced graphs."""


class DecoderExporter(Exporter[DraftModelConfig]):
    """The exporter of the family. A method with hidden states has steering."""

    config, module = DraftModelConfig, DraftModel

    def configure(self, drafter: DrafterCheckpoint, options: DecoderBuild) -> DraftModelConfig:
        """Return a drafter's configuration. Raises CheckpointError if only one of drafter and method has steering."""
        config, method = super().configure(drafter, options), self.method
        if config.hidden_states and not method.hidden_states:
            raise CheckpointError(
                f"{drafter.path} has steering, which {method.id} does not read", f"leave out method={method.id}"
            )
        if method.hidden_states and not config.hidden_states:
            raise CheckpointError(
                f"{drafter.path} is a drafter of {drafter.method}: it has no steering",
                f"train it on with `redraft train {method.command} --start {drafter.path}`",
            )
        return config

    def write(
        self, target: Target, config: DraftModelConfig, module: nn.Module, source: AnySource, tokens: TokenData
    ) -> ExportedDrafter:
        """Write the graphs of a trained drafter, with the verifier's embedding and rows of its head."""
        own = _Own(
            Architecture.of(config.transformers), source=source, draft_logit_scale=config.draft_logit_scale,
            hidden_states=config.hidden_states, steering=config.steering, steering_norm=config.steering_norm,
        )  # fmt: skip
        return self._write(target, own, DraftVocabulary.of(tokens, config.limited(target.options.draft_vocabulary)))

    def random(self, target: Target, verifier: Any) -> ExportedDrafter:
        """Write the graphs of RANDOM_LAYERS layers with random weights for a verifier of this configuration."""
        layers = min(RANDOM_LAYERS, decoder_shape(verifier.get_text_config(decoder=True)).layers)
        own = _Own(Architecture.of(first_layers(verifier, layers)), hidden_states=self.method.hidden_states)
        tokens = target.vocabulary
        drafted = min(target.options.draft_vocabulary or tokens, tokens)
        return self._write(target, own, DraftVocabulary.of(TokenData.uncounted(tokens), drafted))

    def checkpoint(self, target: Target, checkpoint: AnyCheckpoint) -> ExportedDrafter:
        """Write the graph of a plain checkpoint.

        The caller has compared the tokenizers. The logits have columns for the ids that both vocabularies have; the
        last row of the embedding stands for ids beyond it. Raises CheckpointError for too short a context, and like
        `trace_verifier`.
        """
        check_counted(target.name, target.options.draft_vocabulary, "a plain checkpoint")
        check_verifiers(target.name, target.options.head_rank, "a plain checkpoint's")
        architecture = Architecture.of(model_config.load_config(checkpoint))
        text, tokens = architecture.text, target.vocabulary
        loaded = load_tensors(checkpoint, architecture)
        text.tie_word_embeddings = loaded.tied
        check_finite(checkpoint)
        own, drafted = _Own(architecture, checkpoint, loaded), min(tokens, decoder_shape(text).vocabulary)
        return self._write(target, own, DraftVocabulary.of(TokenData.uncounted(tokens), drafted))

    def _write(self, target: Target, own: _Own, vocabulary: DraftVocabulary) -> ExportedDrafter:
        target.progress("trace drafter", 0, 1)
        shape, traced, steering = _traced(target, self.method, own, len(vocabulary.tokens))
        source, new_names = _source(target, own, traced, steering, vocabulary)
        passes.simplify(traced.model)
        shared = target.verifier.weights if own.shares else ()
        weights = write_graph(target, traced.model, new_names, source, shared=shared)
        if steering is not None:
            weights += _write_steering(target, steering, shape, source)
        return ExportedDrafter(
            shape, target.precision, weights, write_tables(target.name, vocabulary.tables(), target.out)
        )


EXPORTER = DecoderExporter


@dataclass(frozen=True)
class _Own:
    """The parts of a drafter that are its own.

    checkpoint, loaded: a plain checkpoint's.   source: the weights of a trained one. Without them, weights are random.
    hidden_states: of the verifier, which steer it.   steering, steering_norm: how they do, as in `DraftModelConfig`.
    shares: True if embedding and head are the verifier's, which all but plain checkpoints use.
    """

    architecture: Architecture
    checkpoint: AnyCheckpoint | None = None
    loaded: LoadedTensors | None = None
    source: AnySource | None = None
    draft_logit_scale: float = 1.0
    hidden_states: tuple[str, ...] = ()
    steering: Mechanism = "up"
    steering_norm: bool = False

    @property
    def shares(self) -> bool:
        return self.loaded is None


def _traced(
    target: Target, method: Method[DecoderShape], own: _Own, tokens: int
) -> tuple[DecoderShape, TracedDecoder, Steering | None]:
    """Trace the decoder for texts as long as the verifier's, with `tokens` rows of the head.

    Returns its steering too, without values.
    """
    text, context = own.architecture.text, target.verifier.shape.max_positions
    limits = sizes_of(target.name, text, context, target.dtype)
    # Rows beyond the context: a call's padding, and drafted tokens that the verifier never sees.
    rows = replace(limits, max_positions=names.kv_rows(context + method.spare_rows) + 1)
    made: list[DecoderShape] = []
    steerings: list[Steering] = []

    def trace_network(network: nn.Module, recorded: LayerRecorder, found: VerifierShape) -> ir.Model:
        shape = _shape(target, own, found, tokens, sum(steerings[0].sizes) if steerings else 0)
        made.append(shape)
        decoder = tracing.VerifierModule(network, (), recorded)
        return _trace(_Graph(decoder, steerings[0] if steerings else None, shape, found.vocabulary), shape)

    def change(network: Any) -> None:
        if own.shares:
            rank, dtype = target.options.head_rank or 0, tracing.TORCH[target.dtype]
            network.set_output_embeddings(DraftHead(tokens, target.verifier.shape.hidden, rank, dtype))
        if states := len(own.hidden_states):
            widths = steer(network.base_model, decoder_shape(text).layers, own.steering)
            sizes = target.verifier.shape.hidden, states, widths
            steerings.append(empty_module(lambda: Steering(*sizes, own.steering, own.steering_norm), target.dtype))

    traced = trace_decoder(own.architecture, rows, own.checkpoint, own.loaded, trace_network, change=change)
    return made[0], traced, steerings[0] if steerings else None


def _shape(target: Target, own: _Own, found: VerifierShape, tokens: int, steering: int) -> DecoderShape:
    return DecoderShape(
        layers=found.layers,
        hidden=found.hidden,
        vocabulary=target.vocabulary,
        kv_heads=found.kv_heads,
        head_dim=found.head_dim,
        steps=target.options.steps,
        width=target.options.width,
        nodes=target.options.tree_nodes,
        draft_vocabulary=tokens,
        draft_logit_scale=own.draft_logit_scale,
        head_rank=target.options.head_rank or 0,
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
        self.model, self.steering = decoder.model, steering
        self.__dict__["decoder"] = decoder  # no submodule: its model is one
        self._shape, self._tokens = shape, tokens

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, tree_mask: torch.Tensor, cache_len: torch.Tensor,
        kv_len: torch.Tensor, output_rows: torch.Tensor, caches: list[torch.Tensor], biases: list[torch.Tensor],
        sampling: Sampling, tables: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        decoder: tracing.VerifierModule = self.__dict__["decoder"]
        if self._tokens < self._shape.vocabulary:
            token_ids = token_ids.clamp(max=self._tokens - 1)
        with self.steering.applied(*biases) if self.steering else nullcontext():
            logits, *updates = decoder(token_ids, positions, tree_mask, cache_len, kv_len, output_rows, caches)
        if self._tokens > self._shape.vocabulary:
            logits = logits[..., : self._shape.vocabulary]
        log_probs, columns = likeliest(sampling.scaled(logits, tables), self._shape.width)  # [B, R, k]
        tokens = tracing.take(tables[-1], columns) if tables else columns
        log_probs = torch.where(sampling.drawn[:, None, None] > 0, rank_log_probs(self._shape.width), log_probs)
        return (tokens, log_probs, logits, *updates)


def _trace(graph: _Graph, shape: DecoderShape) -> ir.Model:
    own = len(verifier_inputs(shape.decoder))
    first = own - 2 * shape.layers

    def group(inputs: list[Any]) -> tuple[Any, ...]:
        biased = own + bool(shape.steering)
        sampled = biased + len(Sampling._fields)
        sampling, tables = Sampling(*inputs[biased:sampled]), inputs[sampled:]
        return (*inputs[:first], inputs[first:own], inputs[own:biased], sampling, tables)

    return trace(graph, (draft_inputs(shape), draft_outputs(shape)), group)


def _source(
    target: Target, own: _Own, traced: TracedDecoder, steering: Steering | None, vocabulary: DraftVocabulary
) -> tuple[AnySource, dict[str, str]]:
    """Return the source of both graphs' parameters, and the names in a bundle of the traced decoder's."""
    mine, verifier = stem(target.name), target.verifier
    new_names = {parameter: f"{mine}{parameter}" for parameter in traced.parameters}
    if not own.shares:
        assert own.checkpoint is not None
        shapes = {new_names[key]: size for key, size in traced.parameters.items()}
        tensors = {new_names[key]: tensor for key, tensor in traced.tensors.items()}
        return Source(own.checkpoint, shapes, tensors, mine), new_names
    head, rank = vocabulary.head(verifier.source, verifier.head, f"{mine}head"), target.options.head_rank
    factors = new_names[traced.head].removesuffix("weight")
    new_names |= {traced.head: head.name if head else verifier.head, traced.embedding: verifier.embedding}
    shapes = {new_names[key]: size for key, size in traced.parameters.items()}
    for shared in (new_names[traced.head], new_names[traced.embedding], f"{factors}left", f"{factors}right"):
        shapes.pop(shared, None)
    if steering is not None:  # conditional steering has weights in both graphs
        shapes |= parameter_shapes(steering, f"{mine}{_STEERING}")
        new_names |= _steering_names(target, steering)
    source = own.source or random_source(target, shapes)
    whole = DrafterSource(DrafterSource(source, head) if head else source, verifier.source)
    return (DrafterSource(target.factors(whole, new_names[traced.head], factors), whole) if rank else whole), new_names


def _write_steering(
    target: Target, steering: Steering, shape: DecoderShape, source: AnySource
) -> tuple[WeightRef, ...]:
    """Trace and write the graph `steer` and its weights. Returns their places.

    source: of the drafter's parameters, by their names in a bundle.
    """
    signature = steer_inputs(shape), steer_outputs(shape)
    model = trace(SteerGraph(steering), signature, lambda inputs: (inputs[:-2], *inputs[-2:]))
    passes.simplify(model)
    return write_graph(target, model, _steering_names(target, steering), source, STEER)


def _steering_names(target: Target, steering: Steering) -> dict[str, str]:
    """Return the names in a bundle of the parameters of `steering`, by their names in traced graphs."""
    return {name: f"{stem(target.name)}{name}" for name in parameter_shapes(steering, _STEERING)}
