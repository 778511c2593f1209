"""Rows in the order of their positions, so that a tree's numbers equal those of a chain, to the bit.

An attention computes a sum of exponentials and a sum of values for each row. Both depend on the places of hidden keys
between visible ones, since the first sum runs in the lanes of a vector register. A chain's keys are in the order of
their positions, but a tree's are not. Its scores are therefore put into that order before the softmax. The
probabilities return to the order of the rows before they multiply the values.

The sum of values is one chain of additions within each block of keys that the kernels multiply at once
(`redraft.engines.lowering.batch.block_keys`, a multiple of 128). Hidden keys do not change it. The remaining case is a
tree with rows in two blocks, which the runtime never verifies (`redraft.runtime.trees.tree.exact_part`).

ONNX Runtime multiplies the probabilities of a single row by another kernel, which rounds differently. No product here
has only one row: a single query is computed twice.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from redraft import names
from redraft.engines.lowering.nodes import Nodes

HIDDEN = np.float32(-1e30)
"""The score of a key that a node must not see. It is finite, so that sums with it stay numbers."""


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
        """Return the columns that nodes at these positions [B, T] see: bool [B, 1, T, S]."""
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
    """Values that all layers of a call share: visible keys, and the mapping between orders of positions and rows.

    The orders differ only in the columns of the new rows, so only these move. A product has g rows for each node, one
    for each head that shares a key head. If g is 1, a single node is computed twice: U = 2 nodes, otherwise U = T.
    """

    def __init__(self, nodes: Nodes, count: ir.Value, positions: ir.Value) -> None:
        """count: S, int64 [1].   positions: int64 [B, T]. Those of padding continue a chain, whose W is then 1."""
        self._nodes = nodes
        self._columns = Columns(nodes, count)
        self._positions = positions
        self._past, mask = nodes.inputs[names.CACHE_LEN], nodes.inputs[names.TREE_MASK]
        self.tokens = nodes.node("Shape", [self._positions], start=1, end=2)
        """T, int64 [1]."""
        self._new = numbers(nodes, self.tokens)
        self._orders = self._both_orders(mask)
        self._of: dict[int, ir.Value] = {}
        self._limits: dict[tuple[int, int, int], ir.Value] = {}
        self._of_heads: dict[tuple[int, int], list[ir.Value]] = {}

    def computed(self, groups: int) -> ir.Value | None:
        """Return the number of computed nodes, U: int64 [1]. None if it is T."""
        return self._nodes.node("Shape", [self.node_of(1)]) if groups == 1 else None

    def node_of(self, groups: int) -> ir.Value:
        """Return the node of each row of a product, int64 [g * U]."""
        if groups not in self._of:
            nodes = self._nodes
            rows = nodes.node("Max", [nodes.node("Mul", [self.tokens, nodes.constant([groups])]), nodes.constant([2])])
            self._of[groups] = nodes.node("Mod", [numbers(nodes, rows), self.tokens])
        return self._of[groups]

    def limit(self, groups: int, window: int, chunk: int) -> ir.Value:
        """Return upper bounds of scores in the order of positions: infinity or HIDDEN, float32 [B, 1, g * U, S]."""
        key = groups, window, chunk
        if key not in self._limits:
            node, constant = self._nodes.node, self._nodes.constant
            seen = self._columns.visible(self._positions, window, chunk)
            limit = node("Where", [seen, constant(np.float32(np.inf)), constant(HIDDEN)])
            self._limits[key] = node("Gather", [limit, self.node_of(groups)], axis=2)
        return self._limits[key]

    def by_position(self, scores: ir.Value, heads: int, groups: int) -> ir.Value:
        """Return scores [B, Hkv, g * U, S] with the columns of new rows in the order of positions."""
        return self._reordered(scores, self._indexes(heads, groups)[0])

    def by_row(self, shares: ir.Value, heads: int, groups: int) -> ir.Value:
        """Return probabilities [B, Hkv, g * U, S] with the columns of new rows in the order of rows again."""
        return self._reordered(shares, self._indexes(heads, groups)[1])

    def _reordered(self, values: ir.Value, indexes: ir.Value) -> ir.Value:
        block = self._nodes.node("GatherElements", [values, indexes], axis=3)
        return self._nodes.node("TensorScatter", [values, block, self._past], axis=3)

    def _indexes(self, heads: int, groups: int) -> list[ir.Value]:
        """Return the column of the scores for each new position, and the reverse: int64 [B, Hkv, g * U, W] each."""
        if (heads, groups) not in self._of_heads:
            node, every = self._nodes.node, self._nodes.constant([1, heads, 1, 1])
            orders = [node("Add", [order, self._unsqueezed(self._past, 1, 2)]) for order in self._orders]
            orders = [node("Gather", [order, self.node_of(groups)], axis=1) for order in orders]
            self._of_heads[heads, groups] = [node("Expand", [self._unsqueezed(order, 1), every]) for order in orders]
        return self._of_heads[heads, groups]

    def _both_orders(self, mask: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return the new row of each new position of a node's path, and the reverse, int64 [B, T, W] each.

        A row that a node does not see gets the last position; a node at that position sees all rows. W is T for trees.
        The orders of a chain are equal, so its W is 1.
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
