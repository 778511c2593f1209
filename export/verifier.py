"""Export a checkpoint as a verifier graph: one ONNX file for prefill, one token and trees, and its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common
from torch import nn

from redraft import __version__, names, signatures
from redraft.config import BuildConfig
from redraft.export import noise, passes, support, tracing, tree_attention, weights
from redraft.export.architecture import Architecture
from redraft.export.attention import LayerRecorder, record_layers
from redraft.export.checkpoint import AnyCheckpoint
from redraft.export.experts import expert_tensors
from redraft.export.loading import LoadedTensors, check_finite, fill_buffers, load_tensors
from redraft.export.product_forms import ProductPlan
from redraft.export.product_weights import ProductWeight
from redraft.export.reference import first_layers
from redraft.export.sources import AnySource, RandomSource, Source
from redraft.export.stored_tensor import StoredTensor
from redraft.export.weight_files import STORED, Progress
from redraft.names import WeightRef

IR_VERSION = 11
GRAPH = "verifier.onnx"


@dataclass(frozen=True)
class VerifierExport:
    """An exported verifier. `graph` and the files of `weights` are relative to the output folder.

    embedding, head: the parameters that drafters share.   source: the source of the parameters' values.
    """

    shape: signatures.VerifierShape
    hidden_states: tuple[str, ...]
    graph: str
    weights: tuple[WeightRef, ...]
    embedding: str
    head: str
    source: AnySource


@dataclass(frozen=True)
class TracedDecoder:
    """A traced decoder, whose initializers have their parameters' names.

    parameters: shapes by name.   tensors: stored tensors by name; empty without loaded tensors.
    embedding, head: names of these parameters.
    """

    model: ir.Model
    shape: signatures.VerifierShape
    parameters: dict[str, tuple[int, ...]]
    tensors: dict[str, StoredTensor]
    embedding: str
    head: str


def trace_decoder(
    architecture: Architecture, shape: signatures.VerifierShape, checkpoint: AnyCheckpoint | None,
    loaded: LoadedTensors | None, trace: Callable[[nn.Module, LayerRecorder, signatures.VerifierShape], ir.Model],
    hidden_states: tuple[str, ...] = (), change: Callable[[nn.Module], None] = lambda network: None,
) -> TracedDecoder:  # fmt: skip
    """Trace an architecture's text model, whose rotary tables have `shape.max_positions` rows.

    loaded: tensors of `checkpoint`, whose buffers the model gets; None for random weights.
    trace: of the network, how its layers attend, and the shape with the KV buffers of all layers.
    change: prepares the network, once it has its buffers.
    """
    with tracing.empty_model(architecture, shape.max_positions, shape.dtype) as network:
        if loaded and checkpoint:
            fill_buffers(network, loaded.buffers, checkpoint)
        support.check_hidden_states(hidden_states, shape.layers)
        change(network)
        recorded = record_layers(network, shape.max_positions)
        shape = support.with_layers(shape, architecture.text, recorded.layers)
        model = trace(network, recorded, shape)
        support.check_positions(model, architecture.text)
        parameters = {name: tuple(p.shape) for name, p in network.named_parameters(remove_duplicate=False)}
        tied = support.tied_names(network)
        embedding, head = support.vocabulary_parameters(network)
        tensors = _tensors(network, loaded) if loaded else {}
    _name_parameters(model, parameters, tied)
    return TracedDecoder(model, shape, parameters, tensors, embedding, head)


@dataclass(frozen=True)
class TracedVerifier:
    """A traced checkpoint, from which verifiers of several precisions are written.

    loaded: the stored tensors, None for random weights.
    """

    checkpoint: AnyCheckpoint
    architecture: Architecture
    loaded: LoadedTensors | None
    decoder: TracedDecoder
    hidden_states: tuple[str, ...]

    @cached_property
    def products(self) -> tuple[ProductWeight, ...]:
        """The weights of the graph's products, each once, and without one that computes anything but a layer's part."""
        found = (
            ProductWeight.of(n, self.decoder.parameters) for n in self.decoder.model.graph if n.op_type == "MatMul"
        )
        return tuple(dict.fromkeys(weight for weight in found if weight is not None))

    @cached_property
    def source(self) -> Source:
        """The checkpoint's tensors by parameter. Not for random weights."""
        return Source(self.checkpoint, self.decoder.parameters, self.decoder.tensors)


def export_verifier(
    checkpoint: AnyCheckpoint,
    out: Path,
    config: BuildConfig | None = None,
    progress: Progress = lambda stage, done, total: None,
    layers: int | None = None,
) -> VerifierExport:
    """Write `out`/verifier.onnx and `out`/weights/; with `layers`, of a model with only the first `layers` layers.

    Raises UnsupportedModelError naming a part that cannot be exported, CheckpointError naming a tensor that is missing
    or of the wrong shape. Reads only weights that need another type.
    """
    config = config or BuildConfig()
    return write_verifier(trace_verifier(checkpoint, config, progress, layers), out, config, progress)


def trace_verifier(
    checkpoint: AnyCheckpoint, config: BuildConfig, progress: Progress = lambda stage, done, total: None,
    layers: int | None = None,
) -> TracedVerifier:  # fmt: skip
    """Trace a checkpoint's graph, which is the same in all precisions of one compute type.

    Raises like `export_verifier`.
    """
    progress("trace", 0, 1)
    found = support.load_config(checkpoint)
    architecture = Architecture.of(found if layers is None else first_layers(found, layers))
    text = architecture.text
    shape = support.verifier_shape(text, config.max_model_len, names.ELEMENTS[config.compute_dtype])
    support.check_rope(text, shape.max_positions)
    loaded = None if config.random_weights else load_tensors(checkpoint, architecture, partly=layers is not None)
    if loaded:
        text.tie_word_embeddings = loaded.tied
        check_finite(checkpoint)
    traced = trace_decoder(
        architecture,
        shape,
        checkpoint,
        loaded,
        lambda network, recorded, shape: tracing.trace(
            tracing.VerifierModule(network, config.hidden_states, recorded), shape
        ),
        config.hidden_states,
    )
    passes.simplify(traced.model)
    progress("trace", 1, 1)
    return TracedVerifier(checkpoint, architecture, loaded, traced, config.hidden_states)


def write_verifier(
    traced: TracedVerifier, out: Path, config: BuildConfig, progress: Progress = lambda stage, done, total: None,
    plan: ProductPlan | None = None,
) -> VerifierExport:  # fmt: skip
    """Write `out`/verifier.onnx and `out`/weights/ of a traced checkpoint in a precision.

    plan: bits of each product; by default, those of the precision. Raises like `export_verifier`.
    """
    decoder, model = traced.decoder, traced.decoder.model.clone()
    source: AnySource = (
        traced.source if traced.loaded else RandomSource.write(decoder.parameters, out, STORED[config.compute_dtype])
    )
    kind = config.weight_only
    refs = weights.place(
        model, source, out, config.precision if kind is None else config.compute_dtype, progress,
        file=config.precision, weight_only=kind, plan=plan,
    )  # fmt: skip
    finish(model)
    ir.save(model, out / GRAPH)
    return VerifierExport(decoder.shape, traced.hidden_states, GRAPH, refs, decoder.embedding, decoder.head, source)


def _tensors(network: nn.Module, loaded: LoadedTensors) -> dict[str, StoredTensor]:
    """Return the stored tensors of the network's parameters: experts are split, and other names stay."""
    return {**loaded.parameters, **expert_tensors(network, loaded.parameters)}


def _name_parameters(model: ir.Model, parameters: dict[str, Any], tied: dict[str, str]) -> None:
    """Give initializers their parameters' names without the wrapper's prefix; tied ones keep only the first name."""
    for value in list(model.graph.initializers.values()):
        name = (value.name or "").removeprefix("model.")
        if name in parameters:
            value.name = name
    order = list(parameters)
    graph = model.graph
    for name, first in tied.items():
        if order.index(first) < order.index(name) and name in graph.initializers:
            if first in graph.initializers:
                ir.convenience.replace_all_uses_with(graph.initializers[name], graph.initializers[first])
                del graph.initializers[name]
            else:
                graph.initializers[name].name = first


def finish(model: ir.Model) -> None:
    """Drop unused nodes and the tracer's metadata, and append the bodies of redraft's operators."""
    common.RemoveUnusedNodesPass()(model)
    tree_attention.add_bodies(model)
    noise.add_bodies(model)
    model.ir_version = IR_VERSION
    model.producer_name = "redraft"
    model.producer_version = __version__
    common.ClearMetadataAndDocStringPass()(model)
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for value in model.graph.initializers.values():
        value.metadata_props.clear()
