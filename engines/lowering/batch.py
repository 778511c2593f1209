"""`redraft::TreeAttention` by products and a softmax, for any number of sequences.

The heads that share a key head are the rows of one product: keys are packed once for all of them, and a single token
gives several rows.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import replace_nodes_and_values

from redraft import names
from redraft.engines.lowering.nodes import MICROSOFT, Nodes
from redraft.engines.lowering.order import RowOrder, twice
from redraft.engines.lowering.single import attribute, head_dim

_BLOCK_NUMBERS = 128
_LEAST_KEYS = 65
"""Heads of more numbers than a block's are multiplied in parts, whose size is another for fewer keys."""


class BatchAttention:
    """Lowers the attentions of one graph, whose heads have up to `head_dim` numbers."""

    def __init__(self, graph: ir.Graph, head_dim: int) -> None:
        self._graph = graph
        self._nodes = nodes = Nodes(graph, "batch")
        self._live = nodes.inputs[names.LIVE]
        if head_dim > _BLOCK_NUMBERS:
            least = nodes.node("Min", [nodes.capacity(), nodes.constant([_LEAST_KEYS])])
            self._live = nodes.node("Max", [self._live, least])
        self._order = RowOrder(nodes, self._live)
        self._twice: tuple[ir.Value, ir.Value, ir.Value] | None = None

    def lower(self, node: ir.Node) -> None:
        """Put products in the place of a TreeAttention node."""
        make, live = self._nodes.node, self._live
        q_heads, kv_heads, window, chunk = (
            attribute(node, name, 0) for name in ("q_heads", "kv_heads", "window", "chunk")
        )
        q, k, v, key_cache, value_cache, *_ = inputs = [value for value in node.inputs if value is not None]
        alone = q_heads == kv_heads
        caches = [self._written(*rows, kv_heads) for rows in ((k, key_cache), (v, value_cache))]
        keys, values = (make("Slice", [cache, self._ints(0), live, self._ints(2)]) for cache in caches)
        if alone:
            q = make("Gather", [q, self._rows()[2]], axis=1)
        grouped = self._reshaped(self._heads(q, q_heads), 0, kv_heads, -1, head_dim(node))
        scores = self._scores(node, grouped, keys, q_heads)  # [B, Hq, U, S]
        self._order.prepare(q_heads)
        visible = self._order.visible(window, chunk)
        sinks = inputs[names.TREE_ATTENTION_INPUTS] if len(inputs) > names.TREE_ATTENTION_INPUTS else None
        (shares,) = self._nodes.choose(
            self._order.branches,
            lambda: [self._order.probabilities(scores, visible, sinks, q_heads)],
            lambda: [self._order.probabilities(scores, visible, sinks)],
        )
        shares = make("Reshape", [shares, make("Concat", [self._ints(0, kv_heads, -1), live], axis=0)])
        summed = self._reshaped(make("MatMul", [shares, values]), 0, q_heads, -1, head_dim(node))
        out = self._reshaped(make("Transpose", [summed], perm=[0, 2, 1, 3]), 0, 0, -1)
        if alone:
            out = make("Slice", [out, self._ints(0), self._rows()[0], self._ints(1)])
        replace_nodes_and_values(self._graph, node, [node], [], node.outputs, [out, *caches])

    def _scores(self, node: ir.Node, grouped: ir.Value, keys: ir.Value, q_heads: int) -> ir.Value:
        make = self._nodes.node
        scale, softcap = (node.attributes[name].as_float() for name in ("scale", "softcap"))
        products = make("FusedMatMul", [grouped, keys], MICROSOFT, transB=1, alpha=scale)
        scores = make("Reshape", [products, make("Concat", [self._ints(0, q_heads, -1), self._live], axis=0)])
        if not softcap:
            return scores
        cap = self._nodes.constant(np.float32(softcap))
        return make("Mul", [make("Tanh", [make("Div", [scores, cap])]), cap])

    def _written(self, rows: ir.Value, cache: ir.Value, kv_heads: int) -> ir.Value:
        """The cache with the new rows [B, T, Hkv * D] written in place."""
        past = self._nodes.inputs[names.PAST_LEN]
        return self._nodes.node("TensorScatter", [cache, self._heads(rows, kv_heads), past], axis=2)

    def _heads(self, rows: ir.Value, heads: int) -> ir.Value:
        """[B, T, H * D] -> [B, H, T, D]."""
        return self._nodes.node("Transpose", [self._reshaped(rows, 0, 0, heads, -1)], perm=[0, 2, 1, 3])

    def _rows(self) -> tuple[ir.Value, ir.Value, ir.Value]:
        if self._twice is None:
            self._twice = twice(self._nodes)
        return self._twice

    def _reshaped(self, value: ir.Value, *shape: int) -> ir.Value:
        return self._nodes.node("Reshape", [value, self._ints(*shape)])

    def _ints(self, *values: int) -> ir.Value:
        return self._nodes.constant(list(values))
