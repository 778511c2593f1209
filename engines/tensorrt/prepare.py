"""Rewrite a bundle's portable graph for TensorRT's ONNX parser. Weights stay in their files, except merged ones.

With the plugin, function bodies go, since TensorRT may expand a node that has one. `TreeAttention` nodes name the
plugin's creator for all versions of the parser. They look it up by operator, `plugin_version` and `plugin_namespace`,
and from 10.10 on by the node's domain. Without the plugin: the operator in TensorRT's own (`native`).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import BinaryIO, NamedTuple

import onnx
import onnx_ir as ir
from onnx_ir.convenience import replace_all_uses_with
from onnx_ir.passes import common

from redraft import names
from redraft.engines.tensorrt import operators, plugin
from redraft.engines.tensorrt.expand import expand, expand_maxima
from redraft.engines.tensorrt.native import fix_capacity, lower_attention, lower_keep
from redraft.engines.tensorrt_records import Attention, weights_file
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


def copied_bytes(model: ir.Model) -> int:
    """Return the bytes of the weights that `merge_weights` would copy."""
    return sum(_bytes(merge.parts) for merge in _merges(model) if not merge.stays)


def merge_weights(model: ir.Model, folder: Path, file: str) -> int:
    """Replace every Concat of stored weights along their first axis by one initializer, in place.

    TensorRT's parser turns such a Concat into a layer, and nothing promises that the builder folds it. If it does not,
    every call reads and writes these weights once more (vicuna-7b: 8.4 GiB of 12.6). Parts that follow one another in a
    file stay there, as `gate_proj` and `up_proj` in safetensors do. Other parts are copied, and so are parts of which
    the first is also read alone: TensorRT refuses two weights of different sizes at one place.

    folder: that of the graph and its weights.   file: the file in it for copies; it is written only if it is needed.
    Returns the bytes of the copies. Raises OSError.
    """
    copies: list[ir.ExternalTensor] = []
    for node, parts, stays in _merges(model):
        first = parts[0]
        place = str(first.location), first.offset or 0
        if not stays:
            place = file, _bytes(copies)
            copies += parts
        rows = sum(int(part.shape[0]) for part in parts)  # type: ignore[arg-type,misc]
        merged = ir.ExternalTensor(
            *place, _bytes(parts), first.dtype, name=f"{node.outputs[0].name}.merged", base_dir=folder,
            shape=ir.Shape([rows, *first.shape[1:]]),
        )  # fmt: skip
        value = ir.Value(name=merged.name, shape=merged.shape, type=ir.TensorType(merged.dtype), const_value=merged)
        model.graph.register_initializer(value)
        replace_all_uses_with(node.outputs[0], value)
        model.graph.remove(node, safe=True)
    if copies:
        with (folder / file).open("wb") as out:
            for part in copies:
                _copy(part, out)
    return _bytes(copies)


class _Merge(NamedTuple):
    """A node that is replaced, the weights that it concatenates, and whether they stay in their file."""

    node: ir.Node
    parts: list[ir.ExternalTensor]
    stays: bool


def _merges(model: ir.Model) -> list[_Merge]:
    """Return every merge of the graph."""
    readers: dict[tuple[str, int], set[ir.Node]] = {}
    for value in model.graph.initializers.values():
        if isinstance(tensor := value.const_value, ir.ExternalTensor):
            readers.setdefault(_place(tensor), set()).update(use.node for use in value.uses())
    return [
        _Merge(node, parts, _adjacent(parts) and readers[_place(parts[0])] == {node})
        for node in model.graph
        if (parts := _parts(node))
    ]


def _place(tensor: ir.ExternalTensor) -> tuple[str, int]:
    return str(tensor.path), tensor.offset or 0


def _parts(node: ir.Node) -> list[ir.ExternalTensor]:
    """Return the stored weights that a node concatenates along their first axis; none if it does anything else.

    None also for an output of the graph, which must stay the output of a node.
    """
    if node.op_type != "Concat" or node.outputs[0].is_graph_output():
        return []
    tensors = [value.const_value for value in node.inputs if value is not None and value.is_initializer()]
    stored = [tensor for tensor in tensors if isinstance(tensor, ir.ExternalTensor)]
    if len(stored) < len(node.inputs):
        return []
    return stored if node.attributes["axis"].as_int() in (0, -len(stored[0].shape)) else []


def _adjacent(parts: Sequence[ir.ExternalTensor]) -> bool:
    """Return True if the parts follow one another in one file."""
    return all(a.path == b.path and (a.offset or 0) + a.nbytes == b.offset for a, b in itertools.pairwise(parts))


def _copy(part: ir.ExternalTensor, out: BinaryIO) -> None:
    """Copy the bytes of a tensor. onnx_ir's `tofile` refuses files with hard links, which a bundle's weights are."""
    start = part.offset or 0
    if not os.path.getsize(part.path):
        raise OSError(f"{part.path} ends within {part.name}")
    with (
        Path(part.path).open("rb") as source,
        mmap(source.fileno(), 0, access=ACCESS_READ) as data,
        memoryview(data)[start : start + part.nbytes] as values,
    ):
        if len(values) < part.nbytes:
            raise OSError(f"{part.path} ends within {part.name}")
        out.write(values)


def _bytes(parts: Sequence[ir.ExternalTensor]) -> int:
    return sum(part.nbytes for part in parts)
