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

_LARGEST_PART = 128
"""Numbers of a head that are multiplied at once: the kernels' own parts of more depend on the keys and the threads."""


def block_keys(size: int) -> int:
    """Keys whose values, of heads of so many numbers, the kernels add up before they begin anew.

    So many of a single thread: 128, and twice as many each time the numbers halve. Where several threads share a
    product each has fewer columns and so longer blocks, which is why no product here has more keys than this.
    """
    keys, columns = 128, 128
    while columns > 16 and columns // 2 >= size:
        keys, columns = 2 * keys, columns // 2
    return keys


class BatchAttention:
    """Lowers the attentions of one graph."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._nodes = nodes = Nodes(graph, "batch")
        self._kv_len = nodes.inputs[names.KV_LEN]
        self._order = RowOrder(nodes, self._kv_len)
        self._long: dict[int, tuple[ir.Value, ir.Value]] = {}
        self._twice: tuple[ir.Value, ir.Value, ir.Value] | None = None

    def lower(self, node: ir.Node) -> None:
        """Put products in the place of a TreeAttention node."""
        make, kv_len = self._nodes.node, self._kv_len
        q_heads, kv_heads, window, chunk = (
            attribute(node, name, 0) for name in ("q_heads", "kv_heads", "window", "chunk")
        )
        q, k, v, key_cache, value_cache, *_ = inputs = [value for value in node.inputs if value is not None]
        alone = q_heads == kv_heads
        caches = [self._written(*rows, kv_heads) for rows in ((k, key_cache), (v, value_cache))]
        keys = make("Slice", [caches[0], self._ints(0), kv_len, self._ints(2)])
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
        shares = make("Reshape", [shares, make("Concat", [self._ints(0, kv_heads, -1), kv_len], axis=0)])
        summed = self._reshaped(self._summed(shares, caches[1], head_dim(node)), 0, q_heads, -1, head_dim(node))
        out = self._reshaped(make("Transpose", [summed], perm=[0, 2, 1, 3]), 0, 0, -1)
        if alone:
            out = make("Slice", [out, self._ints(0), self._rows()[0], self._ints(1)])
        replace_nodes_and_values(self._graph, node, [node], [], node.outputs, [out, *caches])

    def _summed(self, shares: ir.Value, values: ir.Value, size: int) -> ir.Value:
        """Products of probabilities [B, Hkv, rows, S] and the first S values, a block of keys after the other."""
        nodes, make = self._nodes, self._nodes.node
        width = block_keys(size)
        if size not in self._long:
            more = make("Greater", [make("Squeeze", [self._kv_len]), nodes.constant(width)])
            blocks = make("Div", [make("Add", [self._kv_len, self._ints(width - 1)]), self._ints(width)])
            self._long[size] = more, make("Squeeze", [blocks])
        more, blocks = self._long[size]

        def product(start: ir.Value, end: ir.Value) -> ir.Value:
            some = make("Slice", [shares, start, end, self._ints(3)])
            return make("MatMul", [some, make("Slice", [values, start, end, self._ints(2)])])

        def further(number: ir.Value, summed: ir.Value) -> ir.Value:
            start = make("Unsqueeze", [make("Mul", [number, nodes.constant(width)]), self._ints(0)])
            end = make("Min", [make("Add", [start, self._ints(width)]), self._kv_len])
            return make("Add", [summed, product(start, end)])

        (summed,) = nodes.choose(
            more,
            lambda: [nodes.loop(nodes.constant(1), blocks, product(self._ints(0), self._ints(width)), further)],
            lambda: [product(self._ints(0), self._kv_len)],
        )
        return summed

    def _scores(self, node: ir.Node, grouped: ir.Value, keys: ir.Value, q_heads: int) -> ir.Value:
        make = self._nodes.node
        scale, softcap = (node.attributes[name].as_float() for name in ("scale", "softcap"))
        products = self._products(grouped, keys, scale, head_dim(node))
        scores = make("Reshape", [products, make("Concat", [self._ints(0, q_heads, -1), self._kv_len], axis=0)])
        if not softcap:
            return scores
        cap = self._nodes.constant(np.float32(softcap))
        return make("Mul", [make("Tanh", [make("Div", [scores, cap])]), cap])

    def _products(self, rows: ir.Value, keys: ir.Value, scale: float, size: int) -> ir.Value:
        """Scaled products of rows and keys, a part of their numbers after the other."""
        make, total = self._nodes.node, None
        for start in range(0, size, _LARGEST_PART):
            parts = (rows, keys)
            if size > _LARGEST_PART:
                ends = self._ints(start), self._ints(min(start + _LARGEST_PART, size)), self._ints(3)
                parts = (make("Slice", [rows, *ends]), make("Slice", [keys, *ends]))
            product = make("FusedMatMul", [*parts], MICROSOFT, transB=1, alpha=scale)
            total = product if total is None else make("Add", [total, product])
        assert total is not None
        return total

    def _written(self, rows: ir.Value, cache: ir.Value, kv_heads: int) -> ir.Value:
        """The cache with the new rows [B, T, Hkv * D] written in place."""
        past = self._nodes.inputs[names.CACHE_LEN]
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
