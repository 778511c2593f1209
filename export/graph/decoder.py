"""Trace a checkpoint's text model, and refuse by name what the graph would compute differently."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir
from onnx_ir.passes import common
from torch import nn
from transformers import PretrainedConfig

from redraft import __version__, names, signatures
from redraft.errors import UnsupportedModelError, UsageError
from redraft.export.checkpoint.architecture import DECODERS_ONLY, Architecture
from redraft.export.checkpoint.base import AnyCheckpoint
from redraft.export.checkpoint.loading import LoadedTensors, fill_buffers
from redraft.export.checkpoint.stored_tensor import StoredTensor
from redraft.export.graph import noise, tracing, tree_attention
from redraft.export.graph.attention import LayerAttention, LayerRecorder, record_layers
from redraft.export.graph.experts import expert_tensors
from redraft.export.streaming import parameter_names
from redraft.signatures import VerifierShape

IR_VERSION = 11


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
        check_hidden_states(hidden_states, shape.layers)
        change(network)
        recorded = record_layers(network, shape.max_positions)
        shape = with_layers(shape, architecture.text, recorded.layers)
        model = trace(network, recorded, shape)
        check_positions(model, architecture.text)
        parameters = {name: tuple(p.shape) for name, p in network.named_parameters(remove_duplicate=False)}
        aliases = {name: first for first, *names in parameter_names(network).values() for name in names}
        embedding, head = vocabulary_parameters(network)
        # Experts are split, and other names stay.
        tensors = {**loaded.parameters, **expert_tensors(network, loaded.parameters)} if loaded else {}
    _name_parameters(model, parameters, aliases)
    return TracedDecoder(model, shape, parameters, tensors, embedding, head)


def _name_parameters(model: ir.Model, parameters: Collection[str], aliases: Mapping[str, str]) -> None:
    """Give initializers their parameters' names without the wrapper's prefix.

    aliases: the first name of a tied parameter, by its other names.
    """
    graph = model.graph
    for value in list(graph.initializers.values()):
        name = (value.name or "").removeprefix("model.")
        if name in parameters:
            value.name = name
    for name, first in aliases.items():
        if name in graph.initializers:
            if first in graph.initializers:
                ir.convenience.replace_all_uses_with(graph.initializers[name], graph.initializers[first])
                del graph.initializers[name]
            else:
                graph.initializers[name].name = first


def check_hidden_states(hidden_states: tuple[str, ...], layers: int) -> None:
    """Raise UsageError on a hidden state that the model does not have."""
    known = {names.LAST_HIDDEN_STATE, *map(str, range(layers))}
    for hidden_state in hidden_states:
        if hidden_state not in known:
            raise UsageError(
                f"unknown hidden state {hidden_state!r}",
                f"use {names.LAST_HIDDEN_STATE}, or a layer from 0 to {layers - 1}",
            )


def with_layers(shape: VerifierShape, config: PretrainedConfig, layers: Sequence[LayerAttention]) -> VerifierShape:
    """Return the shape with the KV buffers of all layers. Raises UnsupportedModelError if no shape fits them all.

    Layers with fewer key heads or smaller heads than others are padded to the largest.
    """
    kind = config.model_type
    if len(layers) != shape.layers:
        raise UnsupportedModelError(
            f"{kind}: only {len(layers)} of {shape.layers} layers keep keys and values by the attention interface",
            DECODERS_ONLY,
        )
    kv_heads, head_dim = max(layer.kv_heads for layer in layers), max(layer.head_dim for layer in layers)
    for number, layer in enumerate(layers):
        if kv_heads % layer.kv_heads or layer.q_heads % kv_heads:
            raise UnsupportedModelError(
                f"{kind}: layer {number} has {layer.q_heads} query heads and {layer.kv_heads} key heads, "
                f"others have {kv_heads} key heads"
            )
    return replace(shape, kv_heads=kv_heads, head_dim=head_dim)


def check_positions(model: ir.Model, config: PretrainedConfig) -> None:
    """Raise UnsupportedModelError if the traced model counts positions itself and ignores its `positions` input."""
    common.RemoveUnusedNodesPass()(model)
    for node in model.graph:
        # The model's code made it, if it is no constant and no index of a translated slice write.
        origin = node.metadata_props.get("pkg.torch.onnx.fx_node", "")
        counts = any(name in origin for name in ("aten.arange", "aten.cumsum"))
        if node.op_type in ("Range", "CumSum") and counts and not _is_constant(node):
            raise UnsupportedModelError(
                f"{config.model_type} counts token positions itself, which is wrong for the nodes of a token tree",
                DECODERS_ONLY,
            )


def _is_constant(node: ir.Node) -> bool:
    """Return True if all inputs of a node are computed from constants."""
    for value in node.inputs:
        if value is None or value.const_value is not None:
            continue
        producer = value.producer()
        if producer is None or (producer.op_type != "Constant" and not (producer.inputs and _is_constant(producer))):
            return False
    return True


def vocabulary_parameters(network: nn.Module) -> tuple[str, str]:
    """Return the names of the embedding's and the head's weight. Tied weights have the first name, as in graphs."""
    names = parameter_names(network)
    modules = network.get_input_embeddings(), network.get_output_embeddings()  # type: ignore[operator]
    embedding, head = (names[id(module.weight)][0] for module in modules)
    return embedding, head


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
