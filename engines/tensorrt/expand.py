"""Operators spelled out: RMS normalization and rotary embedding for parsers that lack them, and maxima beside hashes.

RMSNormalization (opset 23): y = x / sqrt(mean(x²) + epsilon) * gain, the mean over the last axis and in float32.
RotaryEmbedding (opset 23), halves not interleaved: (a, b) -> (a cos - b sin, b cos + a sin); later entries are kept.
Forms that the exporter does not write stay unchanged; the check of operators names them.

A maximum along an axis that TensorRT fuses with a hash's integer arithmetic takes it minutes to compile (measured with
TensorRT for RTX 1.7.1: 100 s for `step.accept_sampled`, 384 s for a draft of Medusa). TopK of one is the same number,
and is not fused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import replace_nodes_and_values
from onnx_ir.passes import common

from redraft.engines.tensorrt.operators import Release, lacks


class Rewriter:
    """Collects nodes before `node` of `graph`; `replace` puts them in its place. Names begin with the node's own."""

    def __init__(self, graph: ir.Graph, node: ir.Node) -> None:
        self._graph, self._node = graph, node
        self._stem = node.name or node.outputs[0].name or node.op_type
        self._nodes: list[ir.Node] = []

    def node(self, op: str, inputs: Sequence[ir.Value | None], outputs: int = 1, **attributes: Any) -> Any:
        """Return the output of a new node, or its outputs if it has several."""
        added = ir.node(op, inputs, attributes, num_outputs=outputs)
        added.name = f"{self._stem}.{len(self._nodes)}.{op}"
        for number, value in enumerate(added.outputs):
            value.name = f"{added.name}.{number}"
        self._nodes.append(added)
        return added.outputs[0] if outputs == 1 else tuple(added.outputs)

    def constant(self, values: object, dtype: type[np.generic] = np.int64) -> ir.Value:
        """Return an initializer; equal ones are one."""
        array = np.asarray(values, dtype)
        name = f"tensorrt.{array.dtype}.{'x'.join(map(str, array.shape))}.{'_'.join(map(str, array.ravel().tolist()))}"
        if name not in self._graph.initializers:
            value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
            self._graph.register_initializer(value)
        return self._graph.initializers[name]

    def replace(self, *values: ir.Value) -> None:
        """Let everything that reads the node's outputs read `values`, which take their names, types and shapes."""
        replace_nodes_and_values(self._graph, self._node, [self._node], self._nodes, self._node.outputs, values)


def expand(model: ir.Model, release: Release) -> None:
    """Replace every node that is newer than `release`, in place, by older operators if that is possible.

    Types and shapes that the graph lacks are inferred, also in bodies of functions.
    """
    lacking = [node for node in model.graph if node.op_type in _FORMS and lacks(node.op_type, release)]
    if any(node.inputs[0] is None or node.inputs[0].dtype is None for node in lacking):
        common.ShapeInferencePass()(model)
        lacking = [node for node in model.graph if node.op_type in _FORMS and lacks(node.op_type, release)]
    for node in lacking:
        _FORMS[node.op_type](Rewriter(model.graph, node), node)


def expand_maxima(model: ir.Model) -> None:
    """Replace ReduceMax, LogSoftmax and ReduceLogSumExp along one axis, in place, by forms whose maximum is a TopK."""
    for node in model.graph:
        if node.op_type in _MAXIMA and (axis := _axis(node)) is not None:
            to = Rewriter(model.graph, node)
            to.replace(_MAXIMA[node.op_type](to, node.inputs[0], axis))


def _axis(node: ir.Node) -> int | None:
    """Return the axis of a node that keeps it; None if there are several."""
    if node.op_type == "LogSoftmax":
        return node.attributes.get_int("axis", -1)
    axes = ir.convenience.get_const_tensor(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] else None
    single = axes is not None and axes.size == 1 and node.attributes.get_int("keepdims", 1) == 1
    return int(axes.numpy().item()) if axes is not None and single else None


def _largest(to: Rewriter, x: ir.Value | None, axis: int) -> Any:
    return to.node("TopK", [x, to.constant([1])], outputs=2, axis=axis)[0]


def _log_sum(to: Rewriter, below: ir.Value, axis: int) -> Any:
    """Return the logarithm of the sum of exponentials of numbers below 0."""
    return to.node("Log", [to.node("ReduceSum", [to.node("Exp", [below]), to.constant([axis])], keepdims=1)])


def _log_softmax(to: Rewriter, x: ir.Value | None, axis: int) -> Any:
    below = to.node("Sub", [x, _largest(to, x, axis)])
    return to.node("Sub", [below, _log_sum(to, below, axis)])


def _log_sum_exp(to: Rewriter, x: ir.Value | None, axis: int) -> Any:
    largest = _largest(to, x, axis)
    return to.node("Add", [largest, _log_sum(to, to.node("Sub", [x, largest]), axis)])


def _normalize(to: Rewriter, node: ir.Node) -> None:
    x, gain = node.inputs[0], node.inputs[1]
    usual = node.attributes.get_int("axis", -1) == -1 and node.attributes.get_int("stash_type", 1) == 1
    if x is None or x.dtype is None or not usual:
        return
    wide = x if x.dtype == ir.DataType.FLOAT else to.node("Cast", [x], to=ir.DataType.FLOAT)
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    mean = to.node("ReduceMean", [to.node("Mul", [wide, wide]), to.constant([-1])], keepdims=1)
    norm = to.node("Sqrt", [to.node("Add", [mean, to.constant(epsilon, np.float32)])])
    normed = to.node("Div", [wide, norm])
    if x.dtype != ir.DataType.FLOAT:
        normed = to.node("Cast", [normed], to=x.dtype)
    to.replace(to.node("Mul", [normed, gain]))


def _rotate(to: Rewriter, node: ir.Node) -> None:
    x, cos, sin, positions = (*node.inputs, None)[:4]
    heads = node.attributes.get_int("num_heads", 0)
    known = x is not None and x.shape is not None and x.shape.rank() == 3 and isinstance(x.shape[2], int)
    if not known or not heads or positions is None or cos is None or node.attributes.get_int("interleaved", 0) != 0:
        return
    size = int(x.shape[2]) // heads  # type: ignore[union-attr, arg-type, index]
    half = (node.attributes.get_int("rotary_embedding_dim", 0) or size) // 2
    rest = size - 2 * half
    split = to.node("Reshape", [x, to.constant([0, 0, heads, size])])  # [B, T, H, D]
    lengths = to.constant([half, half, *([rest] if rest else [])])
    first, second, *others = to.node("Split", [split, lengths], outputs=3 if rest else 2, axis=-1)
    c, s = (_at(to, table, positions) for table in (cos, sin))
    turned = [
        to.node("Sub", [to.node("Mul", [first, c]), to.node("Mul", [second, s])]),
        to.node("Add", [to.node("Mul", [second, c]), to.node("Mul", [first, s])]),
    ]
    joined = to.node("Concat", [*turned, *others], axis=-1)
    to.replace(to.node("Reshape", [joined, to.constant([0, 0, heads * size])]))


def _at(to: Rewriter, table: ir.Value | None, positions: ir.Value) -> Any:
    """Return rows of a table [P, R / 2] at positions [B, T], for every head: [B, T, 1, R / 2]."""
    return to.node("Unsqueeze", [to.node("Gather", [table, positions]), to.constant([2])])


_FORMS = {"RMSNormalization": _normalize, "RotaryEmbedding": _rotate}
_MAXIMA = {"ReduceMax": _largest, "LogSoftmax": _log_softmax, "ReduceLogSumExp": _log_sum_exp}
