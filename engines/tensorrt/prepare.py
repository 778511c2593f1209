"""Rewrite a bundle's portable graph for TensorRT's ONNX parser. Weights stay in their files, except merged ones.

With the plugin, function bodies go, since TensorRT may expand a node that has one. `TreeAttention` nodes name the
plugin's creator for all versions of the parser. They look it up by operator, `plugin_version` and `plugin_namespace`,
and from 10.10 on by the node's domain. Without the plugin: the operator in TensorRT's own (`native`).
"""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from redraft import names
from redraft.engines.tensorrt import operators, plugin
from redraft.engines.tensorrt.expand import expand, expand_maxima
from redraft.engines.tensorrt.merge import merge_weights
from redraft.engines.tensorrt.native import fix_capacity, lower_attention, lower_keep
from redraft.engines.tensorrt.records import Attention, weights_file
from redraft.errors import BackendError

_NOISE = (names.ADD_NOISE, names.TOKEN_HASHES, names.QUADRATIC)


def graph_file(graph: str) -> str:
    """Return the name of the prepared graph's file. It shares the portable graph's folder and weights."""
    return f"{graph}.tensorrt.onnx"


def prepare(
    folder: Path, file: str, graph: str, release: operators.Release, attention: Attention, capacity: int | None = None
) -> onnx.ModelProto:
    """Write `folder`/`graph`.tensorrt.onnx from the portable graph `file` there, and return it without its weights.

    capacity: rows of the KV buffers where they are fixed, as TensorRT's own KV update wants them.
    Weights that the graph concatenates become one (`merge`), in `graph`.tensorrt.weights if they have to be copied.
    Raises BackendError naming the first node that the parser of `release` does not take.
    """
    model = ir.load(folder / file)
    _check_attention(graph, model)
    merge_weights(model, folder, weights_file(graph))
    if any(function.name == names.TOKEN_HASHES for function in model.functions.values()):
        expand_maxima(model)
    common.InlinePass(lambda function: function.name in _NOISE)(model)
    expand(model, release)
    if attention == "plugin":
        _name_plugin(model)
        _give_out_links(model)
    else:
        lower_attention(graph, model, release)
        if graph == names.STEP_COMPACT_KV:
            lower_keep(model)
    if capacity is not None:
        fix_capacity(model, capacity)
    model.functions.clear()
    model.opset_imports.pop(names.TREE_ATTENTION_DOMAIN, None)
    for tidy in (common.CommonSubexpressionEliminationPass(), common.RemoveUnusedNodesPass()):
        tidy(model)
    proto = ir.serde.serialize_model(model)
    operators.check(graph, proto, release)
    onnx.save(proto, folder / graph_file(graph))
    return proto


def _check_attention(graph: str, model: ir.Model) -> None:
    """Raise BackendError for attention with chunks or sinks: the plugin and TensorRT's own layers have neither.

    Removes `chunk`, which the plugin's creator does not know.
    """
    for node in _attention(model):
        chunk = node.attributes.pop("chunk", None)
        if (chunk and chunk.as_int()) or len(node.inputs) > names.TREE_ATTENTION_INPUTS:
            raise BackendError(
                f"graph {graph} has attention with chunks or sinks, which TensorRT engines do not compute",
                "build with --backend onnxruntime",
            )


def _name_plugin(model: ir.Model) -> None:
    for node in _attention(model):
        node.domain = ""
        node.attributes["plugin_version"] = ir.AttrString("plugin_version", plugin.VERSION)
        node.attributes["plugin_namespace"] = ir.AttrString("plugin_namespace", plugin.NAMESPACE)


def _give_out_links(model: ir.Model) -> None:
    """Make the KV buffers between a chain's nodes outputs (`names.link`), to be bound to the buffer's own memory.

    TensorRT's own memory would be another place, and each node would first copy the whole buffer to it.
    """
    origins = {id(value): value for value in model.graph.inputs}
    links = 0
    for node in _attention(model):
        for before, after in zip(node.inputs[3:5], node.outputs[1:3], strict=True):
            cache = origins[id(after)] = origins[id(before)]
            if after.is_graph_output():
                continue
            links += 1
            after.name = names.link(str(cache.name), links)
            model.graph.outputs.append(after)


def _attention(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == names.TREE_ATTENTION]
