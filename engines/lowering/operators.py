"""`redraft::TreeAttention` by redraft's own kernel for CPUs (`redraft.plugins.operators`), for any number of sequences.

It takes packed rows as they are. It rotates queries and keys itself if they have no other reader. What multiplies
numbers one by one between the products becomes a part of a gate or of a norm's weight.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.convenience import replace_nodes_and_values

from redraft import names
from redraft.engines.lowering.single import head_dim, packed_rotary

_HEAD_MULTIPLE, _LARGEST_HEAD, _MOST_GROUPS = 16, 256, 48


def fits_operator(node: ir.Node) -> bool:
    """Return True if the kernel supports this layer."""
    q_heads, kv_heads = (node.attributes.get_int(name, 0) for name in ("q_heads", "kv_heads"))
    size = head_dim(node)
    return 0 < size <= _LARGEST_HEAD and size % _HEAD_MULTIPLE == 0 and q_heads <= _MOST_GROUPS * kv_heads


class OperatorAttention:
    """Lowers the attentions of one graph."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._packed_rows = next((value for value in graph.inputs if value.name == names.PACKED_ROWS), None)

    def lower(self, node: ir.Node) -> ir.Node:
        """Replace a TreeAttention node by one for the kernel. Returns the new node."""
        sinks = node.inputs[names.TREE_ATTENTION_INPUTS] if len(node.inputs) > names.TREE_ATTENTION_INPUTS else None
        source: tuple[ir.Value | None, ...] = tuple(node.inputs[:3])
        tables: tuple[ir.Value | None, ...] = (None, None)
        interleaved = 0
        if (fused := packed_rotary(node)) is not None:
            qkv, rotary = fused
            source, tables = (qkv, None, None), (rotary.inputs[1], rotary.inputs[2])
            interleaved = rotary.attributes.get_int("interleaved", 0)
        inputs = [*source, *node.inputs[3 : names.TREE_ATTENTION_INPUTS], sinks, self._packed_rows, *tables]
        integers = {name: node.attributes.get_int(name, 0) for name in ("q_heads", "kv_heads", "window", "chunk")}
        floats = {name: node.attributes[name].as_float() for name in ("scale", "softcap")}
        attributes = {**integers, **floats, "interleaved": interleaved}
        made = ir.node(names.CPU_TREE_ATTENTION, inputs, attributes, domain=names.TREE_ATTENTION_DOMAIN, num_outputs=3)
        replace_nodes_and_values(self._graph, node, [node], [made], node.outputs, made.outputs)
        return made


def fuse_factors(graph: ir.Graph) -> None:
    """Replace gates by one node each, and let gates and norms multiply by the factors of a product's inputs."""
    for split in [node for node in graph if node.op_type == "Split"]:
        _fuse_gate(graph, split)
    for norm in [node for node in graph if node.op_type == "RMSNormalization"]:
        normed, weight = norm.outputs[0], norm.inputs[1]
        product, factors = _factors(graph, normed)
        if product is None or factors is None or weight is None or weight.const_value is None:
            continue
        scaled = ir.Value(name=f"{normed.name}.weight", shape=factors.shape, type=factors.type)
        scaled.const_value = ir.tensor(_numbers(weight) * _numbers(factors), name=scaled.name)
        graph.register_initializer(scaled)
        norm.replace_input_with(1, scaled)
        replace_nodes_and_values(graph, product, [product], [], product.outputs, norm.outputs)


def fuse_sums(graph: ir.Graph) -> None:
    """Let products append the sums of blocks to their inputs themselves (`redraft.export.quantization.products`)."""
    for product in [node for node in graph if node.op_type == "MatMulNBits"]:
        joined = _made_by(product.inputs[0], "Concat")
        sums = _made_by(joined.inputs[1], "ReduceSum") if joined is not None and len(joined.inputs) == 2 else None
        blocks = _made_by(sums.inputs[0], "Reshape") if sums is not None else None
        if joined is None or blocks is None or blocks.inputs[0] is not joined.inputs[0]:
            continue
        inputs = [joined.inputs[0], *product.inputs[1:]]
        attributes = {name: value.as_int() for name, value in product.attributes.items()}
        made = ir.node(names.SUMMED_PRODUCT, inputs, attributes, domain=names.TREE_ATTENTION_DOMAIN)
        replace_nodes_and_values(graph, product, [product], [made], product.outputs, made.outputs)


def _made_by(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """Return the node that computes a value, if it has this type."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type else None


def _fuse_gate(graph: ir.Graph, split: ir.Node) -> None:
    """Replace silu(g) * u of the halves g and u of each row, and factors of that, by one node."""
    sizes = split.inputs[1] if len(split.inputs) > 1 else None
    if sizes is None or sizes.const_value is None or split.attributes.get_int("axis", 0) != -1:
        return
    if len(split.outputs) != 2 or len(set(_numbers(sizes))) != 1:
        return
    gates, values = split.outputs
    if (sigmoid := next((node for node in gates.consumers() if node.op_type == "Sigmoid"), None)) is None:
        return
    if (silu := _multiplied(gates, sigmoid.outputs[0])) is None or (gated := _multiplied(silu, values)) is None:
        return
    inner = gates, values, sigmoid.outputs[0], silu
    if [len(value.uses()) for value in inner] != [2, 1, 1, 1] or any(value.is_graph_output() for value in inner):
        return
    last, factors = _factors(graph, gated)
    out = last.outputs[0] if last is not None else gated
    made = ir.node(names.SILU_GATE, [split.inputs[0], factors], domain=names.TREE_ATTENTION_DOMAIN)
    nodes = [node for node in (split, sigmoid, silu.producer(), gated.producer(), last) if node is not None]
    replace_nodes_and_values(graph, nodes[-1], nodes, [made], [out], made.outputs)


def _multiplied(a: ir.Value, b: ir.Value) -> ir.Value | None:
    """Return the product of two values, if the graph has it."""
    found = (node for node in a.consumers() if node.op_type == "Mul" and set(node.inputs) == {a, b})
    return next((node.outputs[0] for node in found), None)


def _factors(graph: ir.Graph, value: ir.Value) -> tuple[ir.Node | None, ir.Value | None]:
    """Return the node that alone reads `value` and multiplies it by constants [n], and these, if there is one."""
    readers = [] if value.is_graph_output() else list(value.uses())
    if len(readers) == 1 and (node := readers[0].node).op_type == "Mul" and node.graph is graph:
        other = node.inputs[1 - readers[0].idx]
        if other is not None and other.const_value is not None and _is_vector(other):
            return node, other
    return None, None


def _is_vector(constant: ir.Value) -> bool:
    shape = _numbers(constant).shape
    return len(shape) == 1 and shape != (1,)


def _numbers(value: ir.Value) -> NDArray[Any]:
    """Return a constant's numbers. onnx_ir's own `numpy` refuses files with hard links, as large weights may be."""
    constant = value.const_value
    assert constant is not None
    if isinstance(constant, ir.ExternalTensor):
        shape = constant.shape.numpy()
        return np.memmap(constant.path, constant.dtype.numpy(), "r", constant.offset or 0, shape)
    return constant.numpy()
