"""The LM head, softmax and top-k as separate graphs, of a draft graph's true sizes and kernel, for timing.

Weights are random: products take the same time with any.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from redraft import names
from redraft.bench.report_inputs import TOGETHER
from redraft.errors import BundleError

STAGES = ("head", "softmax", "top_k")
OPSET, IR_VERSION = 24, 11
_INPUT, _LOGITS, _PROBS, _BEST, _CHOSEN = "in", "logits", "probabilities", "best", "chosen"


def find_head(graph: onnx.GraphProto) -> onnx.NodeProto:
    """Return the product that gives the chain's logits, perhaps scaled. Raises BundleError if none does."""
    producers = {name: node for node in graph.node for name in node.output}
    wanted, initializers = names.CHAIN_LOGITS, {tensor.name for tensor in graph.initializer}
    while wanted in producers:
        node: onnx.NodeProto = producers[wanted]
        if node.op_type.startswith("MatMul"):
            return node
        wanted = next(name for name in node.input if name not in initializers)
    raise BundleError(f"no product of the LM head gives {names.CHAIN_LOGITS}", "build the bundle again")


def needed(graph: onnx.GraphProto, tensors: Iterable[str]) -> set[str]:
    """Return names of the nodes that the tensors depend on."""
    producers = {name: node for node in graph.node for name in node.output}
    found: set[str] = set()
    waiting = list(tensors)
    while waiting:
        node = producers.get(waiting.pop())
        if node is not None and node.name not in found:
            found.add(node.name)
            waiting.extend(_read(node))
    return found


def _read(node: onnx.NodeProto) -> Iterable[str]:
    """Return the tensors that a node reads, also inside of its branches."""
    yield from node.input
    for branch in (attribute.g for attribute in node.attribute):
        for inner in branch.node:
            yield from _read(inner)


def write_stages(draft: Path, hidden: int, vocabulary: int, width: int, folder: Path) -> dict[str, Path]:
    """Write a graph for each stage, and one of all of them, of [1, M, n] or [1, M, V] each, into `folder`."""
    model = onnx.load(str(draft), load_external_data=False)
    head = find_head(model.graph)
    shapes = {tensor.name: tensor for tensor in model.graph.initializer}
    random = np.random.default_rng(0)
    weights = [_random(shapes[name], random) for name in head.input[1:] if name in shapes]
    product = onnx.NodeProto()
    product.CopyFrom(head)
    del product.input[0], product.output[:]
    product.input.insert(0, _INPUT)
    product.output.append(_LOGITS)
    count = numpy_helper.from_array(np.array([width]), "k")

    def softmax(source: str) -> onnx.NodeProto:
        return helper.make_node("Softmax", [source], [_PROBS], axis=-1)

    def top_k(source: str) -> onnx.NodeProto:
        return helper.make_node("TopK", [source, "k"], [_BEST, _CHOSEN], axis=-1)

    stages = {
        "head": ([product], hidden, weights),
        "softmax": ([softmax(_INPUT)], vocabulary, []),
        "top_k": ([top_k(_INPUT)], vocabulary, [count]),
        TOGETHER: ([product, softmax(_LOGITS), top_k(_PROBS)], hidden, [*weights, count]),
    }
    paths = {}
    for name, (nodes, size, tensors) in stages.items():
        paths[name] = folder / f"{name}.onnx"
        onnx.save(_model(nodes, size, tensors, vocabulary, width, list(model.opset_import)), str(paths[name]))
    return paths


def outputs_of(stage: str, rows: int, vocabulary: int, width: int) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    """Return arrays for the outputs of a stage for `rows` rows."""
    if stage in ("head", "softmax"):
        return {_LOGITS if stage == "head" else _PROBS: np.zeros((1, rows, vocabulary), np.float32)}
    return {_BEST: np.zeros((1, rows, width), np.float32), _CHOSEN: np.zeros((1, rows, width), np.int64)}


def _model(
    nodes: list[onnx.NodeProto], size: int, tensors: list[onnx.TensorProto], vocabulary: int, width: int,
    opsets: list[onnx.OperatorSetIdProto],
) -> onnx.ModelProto:  # fmt: skip
    last = nodes[-1].output
    kinds = {_CHOSEN: TensorProto.INT64}
    sizes = {_LOGITS: vocabulary, _PROBS: vocabulary}
    given = [
        helper.make_tensor_value_info(name, kinds.get(name, TensorProto.FLOAT), [1, "M", sizes.get(name, width)])
        for name in last
    ]
    taken = [helper.make_tensor_value_info(_INPUT, TensorProto.FLOAT, [1, "M", size])]
    graph = helper.make_graph(nodes, "stage", taken, given, tensors)
    return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)


def _random(tensor: onnx.TensorProto, random: np.random.Generator) -> onnx.TensorProto:
    """Return a tensor of the same name, shape and type."""
    kind = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    shape = tuple(tensor.dims)
    if np.issubdtype(kind, np.floating):
        values = (0.02 * random.standard_normal(shape)).astype(kind)
    else:
        values = random.integers(0, 127, shape).astype(kind)
    return numpy_helper.from_array(values, tensor.name)
