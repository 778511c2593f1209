"""Rows in the order of their positions: why a tree's numbers are those of a chain, to the bit.

A row of an attention is a sum of exponentials and a sum of values. In the order of its keys both depend on where hidden
keys lie between those that a node sees: the first sum runs in as many lanes as a vector register has. A chain's keys
lie in the order of their positions. A tree's do not, so its scores are put into that order before the softmax, and the
probabilities back into the order of the rows before they meet the values.

The sum of values is one chain of additions that a hidden key leaves alone, within each block of keys that the kernels
multiply at a time (`redraft.engines.lowering.batch.block_keys`, a multiple of 128). A tree whose rows lie in two blocks
is the one case left: the runtime verifies none (`redraft.runtime.tree.exact_part`).

ONNX Runtime multiplies the probabilities of a single row by another kernel, which rounds otherwise. So no product here
has one row: a single query is taken twice.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from redraft import names
from redraft.engines.lowering.nodes import Nodes

HIDDEN = np.float32(-1e30)
"""The score of a key that a node must not see. Finite, so that a sum with it stays a number."""


def numbers(nodes: Nodes, count: ir.Value) -> ir.Value:
    """0, 1 … count - 1."""
    return nodes.node("Range", [nodes.constant(0), nodes.node("Squeeze", [count]), nodes.constant(1)])


class Columns:
    """Keys in the order of positions: column s holds the key at position s of a node's own path, 0 ≤ s < S."""

    def __init__(self, nodes: Nodes, count: ir.Value) -> None:
        """count: S, int64 [1]."""
        self._nodes = nodes
        self.numbers = numbers(nodes, count)
        """0 … S - 1, int64 [S]."""

    def visible(self, positions: ir.Value, window: int, chunk: int) -> ir.Value:
        """Columns that nodes at these positions [B, T] see: bool [B, 1, T, S]."""
        nodes = self._nodes
        queries = nodes.node("Unsqueeze", [positions, nodes.constant([1, 3])])  # [B, 1, T, 1]
        seen = nodes.node("LessOrEqual", [self.numbers, queries])
        if window:
            distance = nodes.node("Sub", [queries, self.numbers])
            seen = nodes.node("And", [seen, nodes.node("Less", [distance, nodes.constant(window)])])
        if chunk:
            chunks = [nodes.node("Div", [at, nodes.constant(chunk)]) for at in (queries, self.numbers)]
            seen = nodes.node("And", [seen, nodes.node("Equal", chunks)])
        return seen


class RowOrder:
    """What all layers of a call share: which keys its nodes see, and the order of positions against that of rows.

    The two orders differ in the columns of the new rows only, so no more is moved. A product has g rows for each node,
    one for each head that shares a key head. If g is 1, a single node is taken twice: U = 2 nodes, otherwise U = T.
    """

    def __init__(self, nodes: Nodes, count: ir.Value) -> None:
        """count: S, int64 [1]."""
        self._nodes = nodes
        self._columns = Columns(nodes, count)
        self._positions, self._past, mask = (
            nodes.inputs[name] for name in (names.POSITIONS, names.CACHE_LEN, names.TREE_MASK)
        )
        self.tokens = nodes.node("Shape", [self._positions], start=1, end=2)
        """T, int64 [1]."""
        self._new = numbers(nodes, self.tokens)
        self._orders = self._both_orders(mask)
        self._of: dict[int, ir.Value] = {}
        self._limits: dict[tuple[int, int, int], ir.Value] = {}
        self._of_heads: dict[tuple[int, int], list[ir.Value]] = {}

    def node_of(self, groups: int) -> ir.Value:
        """The node that each row of a product belongs to, int64 [g * U]."""
        if groups not in self._of:
            nodes = self._nodes
            rows = nodes.node("Max", [nodes.node("Mul", [self.tokens, nodes.constant([groups])]), nodes.constant([2])])
            self._of[groups] = nodes.node("Mod", [numbers(nodes, rows), self.tokens])
        return self._of[groups]

    def limit(self, groups: int, window: int, chunk: int) -> ir.Value:
        """The most that a score may be, in the order of positions: infinity or HIDDEN, float32 [B, 1, g * U, S]."""
        key = groups, window, chunk
        if key not in self._limits:
            node, constant = self._nodes.node, self._nodes.constant
            seen = self._columns.visible(self._positions, window, chunk)
            limit = node("Where", [seen, constant(np.float32(np.inf)), constant(HIDDEN)])
            self._limits[key] = node("Gather", [limit, self.node_of(groups)], axis=2)
        return self._limits[key]

    def by_position(self, scores: ir.Value, heads: int, groups: int) -> ir.Value:
        """Scores [B, Hkv, g * U, S] with the columns of new rows in the order of positions."""
        return self._reordered(scores, self._indexes(heads, groups)[0])

    def by_row(self, shares: ir.Value, heads: int, groups: int) -> ir.Value:
        """Probabilities [B, Hkv, g * U, S] with the columns of new rows in the order of rows again."""
        return self._reordered(shares, self._indexes(heads, groups)[1])

    def _reordered(self, values: ir.Value, indexes: ir.Value) -> ir.Value:
        block = self._nodes.node("GatherElements", [values, indexes], axis=3)
        return self._nodes.node("TensorScatter", [values, block, self._past], axis=3)

    def _indexes(self, heads: int, groups: int) -> list[ir.Value]:
        """The column of the scores for each new position, and the reverse: int64 [B, Hkv, g * U, W] both."""
        if (heads, groups) not in self._of_heads:
            node, every = self._nodes.node, self._nodes.constant([1, heads, 1, 1])
            orders = [node("Add", [order, self._unsqueezed(self._past, 1, 2)]) for order in self._orders]
            orders = [node("Gather", [order, self.node_of(groups)], axis=1) for order in orders]
            self._of_heads[heads, groups] = [node("Expand", [self._unsqueezed(order, 1), every]) for order in orders]
        return self._of_heads[heads, groups]

    def _both_orders(self, mask: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The new row that holds each new position of a node's path, and the reverse, int64 [B, T, W] both.

        A row that a node does not see goes to the last position. A node at that position sees all rows. W is T for
        trees. For chains, where the orders are one, it is 1.
        """
        node, constant = self._nodes.node, self._nodes.constant
        depths = node("Sub", [self._positions, self._unsqueezed(self._past, 1)])
        last = node("Sub", [self.tokens, constant([1])])
        to_positions = node("Where", [mask, self._unsqueezed(depths, 1), last])
        rows = node("Expand", [self._new, node("Shape", [mask])])
        to_rows = node("ScatterElements", [rows, to_positions, rows], axis=2)
        moved = node("ReduceMax", [node("Abs", [node("Sub", [depths, self._new])])], keepdims=0)
        width = node("Min", [node("Add", [node("Mul", [moved, self.tokens]), constant([1])]), self.tokens])
        first = [constant([0]), width, constant([2])]
        return node("Slice", [to_rows, *first]), node("Slice", [to_positions, *first])

    def _unsqueezed(self, value: ir.Value, *axes: int) -> ir.Value:
        return self._nodes.node("Unsqueeze", [value, self._nodes.constant(list(axes))])
