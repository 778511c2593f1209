"""Results of a bundle's graphs from only their stored weights, without more rounding of a host or device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from redraft.engines.bundle import VERIFIERS, Bundle
from redraft.names import TensorSpec
from tests.engines.drafters import with_graphs

_FLOAT, *_HALVES = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16


def exact(bundle: Bundle, folder: Path, rounded: bool = False) -> Bundle:
    """Write the bundle's graphs to the new `folder`, with the same weights but in fp32 arithmetic.

    ONNX Runtime has no CPU kernels for bf16. Its products with weights in 8 and 4 bits round the other factor to eight
    bits as well, which no GPU does: `accuracy_level` of MatMulNBits asks for it, and so do DequantizeLinear and MatMul
    where it makes that of them. Here the one is left out, and the other's weights are numbers already.
    rounded: each value between two nodes that the bundle has in a half is rounded to it, which stands for a device.
    """
    folder.mkdir()
    records = {}
    for name, record in bundle.manifest.all_graphs.items():
        if name in VERIFIERS[1:]:
            continue  # a GPU runs the portable graph
        model = onnx.load(bundle.path / record.file)
        halves = _halves(model.graph)
        _widen(model)
        if rounded:
            _round(model.graph, halves)
        onnx.save(model, folder / f"{name}.onnx")
        inputs, outputs = (tuple(map(_in_fp32, specs)) for specs in (record.inputs, record.outputs))
        records[name] = replace(record, file=f"{name}.onnx", inputs=inputs, outputs=outputs)
    return Bundle(folder, replace(with_graphs(bundle.manifest, records), precision="fp32"))


def _in_fp32(spec: TensorSpec) -> TensorSpec:
    return replace(spec, dtype="float32") if spec.dtype in ("float16", "bfloat16") else spec


def _halves(graph: onnx.GraphProto) -> dict[str, int]:
    """The type of every fp16 or bf16 value."""
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.output, *graph.value_info)}
    return {name: dtype for name, dtype in types.items() if dtype in _HALVES}


def _widen(model: onnx.ModelProto) -> None:
    graph = model.graph
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type in _HALVES:
            value.type.tensor_type.elem_type = _FLOAT
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    _dequantize(graph)
    for node in (*graph.node, *(node for function in model.functions for node in function.node)):
        kept = [each for each in node.attribute if each.name != "accuracy_level"]
        for each in kept:
            _widen_tensor(each.t)
            if each.name == "to" and each.i in _HALVES:
                each.i = _FLOAT
        del node.attribute[:]
        node.attribute.extend(kept)


def _widen_tensor(tensor: onnx.TensorProto) -> None:
    if tensor.data_type in _HALVES:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))


def _dequantize(graph: onnx.GraphProto) -> None:
    """Replace nodes that compute numbers from codes and scales by the numbers."""
    stored = {tensor.name: tensor for tensor in graph.initializer}
    nodes = [node for node in graph.node if node.op_type == "DequantizeLinear"]
    for node in nodes:
        given = {name: numpy_helper.to_array(stored[name]) for name in node.input}
        graph.initializer.append(numpy_helper.from_array(ReferenceEvaluator(node).run(None, given)[0], node.output[0]))
        graph.node.remove(node)
    for name in {name for node in nodes for name in node.input}:
        graph.initializer.remove(stored[name])


def _round(graph: onnx.GraphProto, halves: Mapping[str, int]) -> None:
    """Round nodes' values and weights of codes to fp16 or bf16 again, if they had that type."""
    for tensor in graph.initializer:
        if tensor.name in halves:
            short = onnx.helper.tensor_dtype_to_np_dtype(halves[tensor.name])
            values = numpy_helper.to_array(tensor).astype(short).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    nodes = [each for node in graph.node for each in _rounding(node, halves)]
    del graph.node[:]
    graph.node.extend(nodes)


def _rounding(node: onnx.NodeProto, halves: Mapping[str, int]) -> Iterator[onnx.NodeProto]:
    """The node, and casts of its outputs."""
    yield node
    for place, name in enumerate(node.output):
        if name in halves:
            whole, short = (f"{name}.{kind}" for kind in ("whole", "short"))
            node.output[place] = whole
            yield onnx.helper.make_node("Cast", [whole], [short], to=halves[name])
            yield onnx.helper.make_node("Cast", [short], [name], to=_FLOAT)
