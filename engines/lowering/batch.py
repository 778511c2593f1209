"""`redraft::TreeAttention` by products and a softmax, for any number of sequences with packed or padded rows (`rows`).

The heads that share a key head are the rows of one product. The product packs keys once for all of them, and a single
token gives several rows.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import replace_nodes_and_values

from redraft import names
from redraft.engines.lowering.nodes import MICROSOFT, Nodes
from redraft.engines.lowering.order import RowOrder
from redraft.engines.lowering.rows import PackedRows, PaddedRows
from redraft.engines.lowering.single import head_dim, packed_rotary

_LARGEST_PART = 128
"""Numbers of a head to multiply at once. With more, the kernels' own blocks depend on the keys and the threads."""


def block_keys(size: int) -> int:
    """Return the keys of one block of the kernels' sums of values, for heads of `head_dim` numbers.

    A single thread has blocks of 128 keys, and twice as many each time the numbers halve. If several threads share a
    product, each has fewer columns and so longer blocks. Products here therefore have at most this number of keys.
    """
    keys, columns = 128, 128
    while columns > 16 and columns // 2 >= size:
        keys, columns = 2 * keys, columns // 2
    return keys


class BatchAttention:
    """Lowers the attentions of one graph. packed: True if the graph has the verifier's packed inputs."""

    def __init__(self, graph: ir.Graph, packed: bool = False) -> None:
        self._graph = graph
        self._nodes = nodes = Nodes(graph, "batch")
        self._kv_len = nodes.inputs[names.KV_LEN]
        self._kv_type = nodes.inputs[names.key_cache(0)].dtype
        self._rows: PackedRows | PaddedRows = PackedRows(nodes) if packed else PaddedRows(nodes)
        self._order = RowOrder(nodes, self._kv_len, self._rows.positions)
        self._longer: dict[int, list[ir.Value]] = {}

    def lower(self, node: ir.Node) -> None:
        """Replace a TreeAttention node by products."""
        make, order, size = self._nodes.node, self._order, head_dim(node)
        q_heads, kv_heads, window, chunk = (
            node.attributes.get_int(name, 0) for name in ("q_heads", "kv_heads", "window", "chunk")
        )
        groups = q_heads // kv_heads
        inputs = [value for value in node.inputs if value is not None]
        q, k, v = self._heads(node, q_heads, kv_heads)
        keys, values = (self._written(*new) for new in ((inputs[3], k), (inputs[4], v)))
        rows = self._reshaped(q, 0, kv_heads, -1, size) if groups > 1 else make("Gather", [q, order.node_of(1)], axis=2)
        scores = order.by_position(self._scores(node, rows, keys), kv_heads, groups)  # [B, Hkv, g * U, S]
        scores = make("Min", [scores, order.limit(groups, window, chunk)])
        shares = self._shares(scores, q_heads, kv_heads, *inputs[names.TREE_ATTENTION_INPUTS :])
        shares = order.by_row(shares, kv_heads, groups)
        summed = self._summed(shares, values, size)
        if groups > 1:
            summed = self._reshaped(summed, 0, q_heads, -1, size)
        out = self._rows.merge_heads(summed, q_heads, size, order.computed(groups))
        replace_nodes_and_values(self._graph, node, [node], [], node.outputs, [out, keys, values])

    def _heads(self, node: ir.Node, q_heads: int, kv_heads: int) -> list[ir.Value]:
        """Return rotated queries, rotated keys, and values, [B, heads, T, D] each.

        One node here rotates queries and keys that have no other reader.
        """
        fused = packed_rotary(node)
        if fused is not None:
            return self._rows.rotate_heads(*fused, q_heads, kv_heads, head_dim(node))
        return [
            self._rows.split_heads(value, heads, head_dim(node))
            for value, heads in zip(node.inputs[:3], (q_heads, kv_heads, kv_heads), strict=True)
            if value is not None
        ]

    def _written(self, cache: ir.Value, new: ir.Value) -> ir.Value:
        """Return the cache with the new rows [B, Hkv, T, D], written in place in the cache's type."""
        if self._kv_type != ir.DataType.FLOAT:
            limits = [self._nodes.constant(np.float32(limit)) for limit in (-names.LARGEST_HALF, names.LARGEST_HALF)]
            new = self._nodes.node("Cast", [self._nodes.node("Clip", [new, *limits])], to=self._kv_type)
        return self._nodes.node("TensorScatter", [cache, new, self._nodes.inputs[names.CACHE_LEN]], axis=2)

    def _read(self, cache: ir.Value, start: ir.Value, end: ir.Value) -> ir.Value:
        """Return rows of the cache, in fp32."""
        rows = self._nodes.node("Slice", [cache, start, end, self._ints(2)])
        return rows if self._kv_type == ir.DataType.FLOAT else self._nodes.node("Cast", [rows], to=ir.DataType.FLOAT)

    def _summed(self, shares: ir.Value, values: ir.Value, size: int) -> ir.Value:
        """Return products of probabilities [B, Hkv, rows, S] and the first S values, block by block of keys."""
        nodes, make, width = self._nodes, self._nodes.node, block_keys(size)
        if width not in self._longer:
            kv_len = make("Squeeze", [self._kv_len])
            self._longer[width] = [make("Greater", [kv_len, nodes.constant(keys)]) for keys in (width, 2 * width)]
        several, more = self._longer[width]
        first, second = self._ints(0), self._ints(width)

        def product(start: ir.Value, end: ir.Value) -> ir.Value:
            some = make("Slice", [shares, start, end, self._ints(3)])
            return make("MatMul", [some, self._read(values, start, end)])

        def further(number: ir.Value, summed: ir.Value) -> ir.Value:
            start = make("Unsqueeze", [make("Mul", [number, nodes.constant(width)]), self._ints(0)])
            end = make("Min", [make("Add", [start, self._ints(width)]), self._kv_len])
            return make("Add", [summed, product(start, end)])

        def one_block() -> list[ir.Value]:
            return [make("MatMul", [shares, self._read(values, first, self._kv_len)])]

        def two_blocks() -> list[ir.Value]:
            return [make("Add", [product(first, second), product(second, self._kv_len)])]

        def more_blocks() -> list[ir.Value]:
            count = make("Squeeze", [make("Div", [make("Add", [self._kv_len, self._ints(width - 1)]), second])])
            return [nodes.loop(nodes.constant(1), count, product(first, second), further)]

        def several_blocks() -> list[ir.Value]:
            return nodes.choose(more, more_blocks, two_blocks)

        (summed,) = nodes.choose(several, several_blocks, one_block)
        return summed

    def _scores(self, node: ir.Node, rows: ir.Value, keys: ir.Value) -> ir.Value:
        """Return scaled and capped products of rows and the first S keys."""
        make = self._nodes.node
        scale, softcap = (node.attributes[name].as_float() for name in ("scale", "softcap"))
        scores = self._products(rows, self._read(keys, self._ints(0), self._kv_len), scale, head_dim(node))
        if not softcap:
            return scores
        cap = self._nodes.constant(np.float32(softcap))
        return make("Mul", [make("Tanh", [make("Div", [scores, cap])]), cap])

    def _products(self, rows: ir.Value, keys: ir.Value, scale: float, size: int) -> ir.Value:
        """Return scaled products of rows and keys, one part of their numbers after the other."""
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

    def _shares(self, scores: ir.Value, q_heads: int, kv_heads: int, sinks: ir.Value | None = None) -> ir.Value:
        """Return the softmax of scores [B, Hkv, g * U, S].

        sinks: [Hq], scores of a key without a value, which are a first column until the softmax is done.
        """
        make = self._nodes.node
        if sinks is None:
            return make("Softmax", [scores], axis=-1)
        sinks = self._reshaped(sinks, 1, -1, 1, 1)
        scores = self._reshaped(scores, 0, q_heads, -1, 0)  # [B, Hq, U, S]
        outer = make("Shape", [scores], end=3)
        column = make("Expand", [sinks, make("Concat", [outer, self._ints(1)], axis=0)])
        shares = make("Softmax", [make("Concat", [column, scores], axis=3)], axis=-1)
        width = make("Shape", [shares], start=3)
        return self._reshaped(make("Slice", [shares, self._ints(1), width, self._ints(3)]), 0, kv_heads, -1, 0)

    def _reshaped(self, value: ir.Value, *shape: int) -> ir.Value:
        return self._nodes.node("Reshape", [value, self._ints(*shape)])

    def _ints(self, *values: int) -> ir.Value:
        return self._nodes.constant(list(values))
