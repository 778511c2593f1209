"""`redraft::TreeAttention` by com.microsoft.GroupQueryAttention, for one sequence.

The kernel reads the buffers in place, and rotates queries and keys itself if they have no other reader. It takes
several new rows over a past only for one sequence. Its sums are in the order of the rows, which is the order of
positions for a chain but not for a tree that branches (`redraft.engines.lowering.order`). So the exact graph takes only
chains. The fast graph takes trees too, as a bias of the scores.

The kernel computes tile by tile, or plainly if a caller requests its scores. The plain computation equals
`redraft.engines.lowering.batch`, to the bit, if the products have more than one row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import replace_nodes_and_values

from redraft import names
from redraft.engines.lowering.nodes import MICROSOFT, Nodes
from redraft.engines.lowering.order import HIDDEN, Columns, numbers

_ROTARY_MULTIPLE = 16
"""Head sizes that the kernel rotates."""
_HEAD_MULTIPLE = 8
_LARGEST_HEAD = 128
"""Larger heads are multiplied in parts that depend on the number of keys."""
_BEFORE_SOFTMAX = 1


class SingleAttention:
    """Lowers the attentions of a verifier's graph: with `exact` for chains, otherwise for trees.

    If the total equals T, without committed rows, the kernel ignores the given positions. So the total is one more than
    the written rows, with an unread column, except in a full buffer. With `exact`, a single row is computed twice and
    its copy written after it, so cache_len + max(T, 2) rows must fit. With `chains`, a graph that is not exact takes
    chains only, and needs no bias without windows and chunks.
    """

    def __init__(self, graph: ir.Graph, exact: bool, chains: bool = False) -> None:
        self._graph = graph
        self._exact = exact
        self._chains = exact or chains
        self._nodes = nodes = Nodes(graph, "single")
        make, one = nodes.node, nodes.constant([1])
        self._positions, written = nodes.inputs[names.POSITIONS], nodes.inputs[names.KV_LEN]
        self._past = nodes.inputs[names.CACHE_LEN]
        self._biases: dict[tuple[int, int], ir.Value] = {}
        if exact:
            self._tokens = make("Shape", [self._positions], start=1, end=2)
            rows = make("Max", [self._tokens, nodes.constant([2])])
            self._positions = make("Expand", [self._positions, rows])
            self._twice = make("Concat", [rows, one], axis=0)  # the shape that computes a single row twice
            written = make("Add", [self._past, rows])
        total = make("Min", [make("Add", [written, one]), nodes.kv_rows()])
        self._columns_count = total
        self._total = make("Cast", [total], to=ir.DataType.INT32)
        self._last = make("Cast", [make("Sub", [written, one])], to=ir.DataType.INT32)

    def lower(self, node: ir.Node) -> None:
        """Replace a TreeAttention node by the kernel."""
        source, rotary, attributes = fused_inputs(node)
        tables: list[ir.Value | None] = [*rotary, self._positions] if rotary else [None, None, None]
        if self._exact:
            attributes["qk_output"] = _BEFORE_SOFTMAX
            source = tuple(value and self._nodes.node("Expand", [value, self._twice]) for value in source)
        inputs = [*source, *node.inputs[3:5], self._last, self._total, *tables, self._bias(node)]
        fused = _attention(inputs, attributes, outputs=4 if self._exact else 3)
        for value, name in zip(fused.outputs, ("rows", "keys", "values", "scores"), strict=False):
            value.name = f"{node.outputs[0].name}.{name}"
        self._graph.insert_before(node, fused)
        out, keys, values = fused.outputs[:3]
        if self._exact:
            out = self._nodes.node("Slice", [out, self._nodes.constant([0]), self._tokens, self._nodes.constant([1])])
        replace_nodes_and_values(self._graph, node, [node], [], node.outputs, [out, keys, values])

    def _bias(self, node: ir.Node) -> ir.Value | None:
        """Return the bias of the scores, float32 [1, 1, U, total]: 0 for visible rows. The kernel hides later rows."""
        key = node.attributes.get_int("window", 0), node.attributes.get_int("chunk", 0)
        if self._chains and not any(key):
            return None
        if key not in self._biases and self._chains:
            visible = Columns(self._nodes, self._columns_count).visible(self._positions, *key)
            self._biases[key] = shown(self._nodes, visible)
        elif key not in self._biases:
            self._biases[key] = self._in_tree(*key)
        return self._biases[key]

    def _in_tree(self, window: int, chunk: int) -> ir.Value:
        """Return a node's ancestors and all committed rows, within window and chunk."""
        make, constant = self._nodes.node, self._nodes.constant
        three = constant([0, 0, 0])
        tokens = make("Shape", [self._positions], start=1, end=2)
        behind = make("Sub", [self._columns_count, make("Add", [self._past, tokens])])
        pads = make("Concat", [three, self._past, three, behind], axis=0)
        bias = make(
            "Pad", [shown(self._nodes, make("Unsqueeze", [self._nodes.inputs[names.TREE_MASK], constant([1])])), pads]
        )
        if not window and not chunk:
            return bias
        committed = make("Unsqueeze", [numbers(self._nodes, self._past), constant([0])])
        at = make("Concat", [committed, self._positions, constant([[0]])], axis=1)
        at = make("Slice", [at, constant([0]), self._columns_count, constant([1])])  # of the columns, [1, total]
        rows = make("Unsqueeze", [self._positions, constant([1, 3])])
        columns = make("Unsqueeze", [at, constant([1, 2])])
        if window:
            near = make("Less", [make("Sub", [rows, columns]), constant(window)])
            bias = make("Where", [near, bias, constant(HIDDEN)])
        if chunk:
            near = make("Equal", [make("Div", [value, constant(chunk)]) for value in (rows, columns)])
            bias = make("Where", [near, bias, constant(HIDDEN)])
        return bias


def shown(nodes: Nodes, visible: ir.Value) -> ir.Value:
    """Return 0 for visible rows, HIDDEN for others."""
    return nodes.node("Where", [visible, nodes.constant(np.zeros((1, 1, 1, 1), np.float32)), nodes.constant(HIDDEN)])


def _attention(inputs: list[ir.Value | None], attributes: dict[str, Any], outputs: int) -> ir.Node:
    return ir.node("GroupQueryAttention", inputs, attributes, domain=MICROSOFT, num_outputs=outputs)


def fits_single(node: ir.Node) -> bool:
    """Return True if the kernel supports this layer with the results of the graph for batches, to the bit."""
    plain = not node.attributes["softcap"].as_float() and len(node.inputs) == names.TREE_ATTENTION_INPUTS
    cache = node.inputs[3]
    if cache is None or cache.dtype != ir.DataType.FLOAT:
        return False
    return plain and head_dim(node) % _HEAD_MULTIPLE == 0 and head_dim(node) <= _LARGEST_HEAD


class ChainAttention:
    """Lowers the attentions of a draft. In a chain row r of the KV holds position r: no mask, no positions.

    A single row continues a chain, and rows at the graph's own positions are one. Others see each other by the mask.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._nodes = Nodes(graph, "single")

    def lower(self, node: ir.Node) -> ir.Node:
        """Replace a TreeAttention node by the kernel. Returns the new node."""
        make, one = self._nodes.node, self._nodes.constant([1])
        past, positions = node.inputs[7], node.inputs[6]
        assert past is not None
        assert positions is not None
        bias = None
        source, rotary, attributes = fused_inputs(node)
        rows = positions.shape[1] if positions.shape is not None else None
        if rows == 1:
            total, last = make("Add", [past, one]), past
        else:
            total = make("Add", [past, make("Shape", [positions], start=1, end=2)])
            last = make("Sub", [total, one])
        if rows != 1 and positions.name != names.POSITIONS:  # the kernel would rotate by rows, not by positions
            source, rotary, bias = tuple(node.inputs[:3]), (), self._bias(node, past)
            attributes = {name: value for name, value in attributes.items() if "rotary" not in name}
        last, total = (make("Cast", [rows], to=ir.DataType.INT32) for rows in (last, total))
        tables = [*rotary, None] if rotary else [None, None, None]
        sinks = node.inputs[names.TREE_ATTENTION_INPUTS :]
        fused = _attention([*source, *node.inputs[3:5], last, total, *tables, bias, *sinks], attributes, outputs=3)
        replace_nodes_and_values(self._graph, node, [node], [fused], node.outputs, fused.outputs)
        return fused

    def _bias(self, node: ir.Node, past: ir.Value) -> ir.Value:
        """Return the bias of a tree's scores, float32 [1, 1, T, past + T]: 0 for ancestors and all earlier rows."""
        make, constant = self._nodes.node, self._nodes.constant
        mask = node.inputs[5]
        assert mask is not None
        bias = shown(self._nodes, make("Unsqueeze", [mask, constant([1])]))
        return make("Pad", [bias, make("Concat", [constant([0, 0, 0]), past, constant([0, 0, 0, 0])], axis=0)])


def fits_chain(node: ir.Node) -> bool:
    """Return True if the kernel supports this layer, which sees all rows before it."""
    sees_all = not node.attributes.get_int("window", 0) and not node.attributes.get_int("chunk", 0)
    return sees_all and head_dim(node) % _HEAD_MULTIPLE == 0


def fused_inputs(node: ir.Node) -> tuple[tuple[ir.Value | None, ...], tuple[ir.Value, ...], dict[str, Any]]:
    """Return the kernel's inputs: q, k and v, cosines and sines if it rotates, and its attributes."""
    attributes: dict[str, Any] = {
        "num_heads": node.attributes.get_int("q_heads", 0),
        "kv_num_heads": node.attributes.get_int("kv_heads", 0),
        "scale": node.attributes["scale"].as_float(),
        "softcap": node.attributes["softcap"].as_float(),
    }
    packed = packed_rotary(node) if head_dim(node) % _ROTARY_MULTIPLE == 0 else None
    if packed is None:
        return tuple(node.inputs[:3]), (), attributes
    qkv, rotary = packed
    attributes |= {"do_rotary": 1, "rotary_interleaved": rotary.attributes.get_int("interleaved", 0)}
    return (qkv, None, None), tuple(table for table in rotary.inputs[1:3] if table is not None), attributes


def head_dim(node: ir.Node) -> int:
    """Return the numbers of a head."""
    cache = node.inputs[3]
    size = cache.shape[3] if cache is not None and cache.shape is not None else 0
    return size if isinstance(size, int) else 0


def packed_rotary(node: ir.Node) -> tuple[ir.Value, ir.Node] | None:
    """Return packed q, k, v before Split and q's rotation, if the kernel can do both rotations and alone reads them."""
    q, k, v = node.inputs[:3]
    rotated = [value.producer() if value is not None else None for value in (q, k)]
    first, second = rotated
    if first is None or second is None or any(r.op_type != "RotaryEmbedding" for r in (first, second)):
        return None
    split = v.producer() if v is not None else None
    whole = (
        split is not None
        and split.op_type == "Split"
        and (first.inputs[0], second.inputs[0], v) == tuple(split.outputs)
        and all(len(value.uses()) == 1 for value in (*split.outputs, q, k) if value is not None)
    )
    same = all(a is b for a, b in zip(first.inputs[1:], second.inputs[1:], strict=True))
    plain = all(r.attributes.get_int("rotary_embedding_dim", 0) == 0 for r in (first, second))
    packed = split.inputs[0] if split is not None else None
    if packed is None or not (whole and same and plain and first.inputs[3] is node.inputs[6]):
        return None
    return packed, first
