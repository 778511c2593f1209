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


def twice(nodes: Nodes) -> tuple[ir.Value, ir.Value, ir.Value]:
    """T and U = max(T, 2), int64 [1] both, and the numbers of rows, int64 [U], that take a single row twice."""
    tokens = nodes.node("Shape", [nodes.inputs[names.POSITIONS]], start=1, end=2)
    rows = nodes.node("Max", [tokens, nodes.constant([2])])
    last = nodes.node("Sub", [tokens, nodes.constant([1])])
    return tokens, rows, nodes.node("Min", [numbers(nodes, rows), last])


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

    The order of positions is also that of a chain's rows.
    """

    def __init__(self, nodes: Nodes, count: ir.Value) -> None:
        """count: S, int64 [1], more than the position of any node of a tree that branches."""
        self._nodes = nodes
        self._count = count
        self._columns = Columns(nodes, count)
        self._positions, self._past, self._mask = (
            nodes.inputs[name] for name in (names.POSITIONS, names.CACHE_LEN, names.TREE_MASK)
        )
        self._visible: dict[tuple[int, int], ir.Value] = {}
        self._orders: dict[int, list[ir.Value]] = {}
        self._tokens = nodes.node("Shape", [self._positions], start=1, end=2)
        in_order = nodes.node("Add", [self._unsqueezed(self._past, 1), numbers(nodes, self._tokens)])
        moved = nodes.node("Abs", [nodes.node("Sub", [self._positions, in_order])])
        self.branches = nodes.node("Greater", [nodes.node("ReduceMax", [moved], keepdims=0), nodes.constant(0)])
        """bool: whether the rows of any sequence are not in the order of their positions."""

    def visible(self, window: int, chunk: int) -> ir.Value:
        """Columns that each node sees: bool [B, 1, T, S]."""
        if (window, chunk) not in self._visible:
            self._visible[window, chunk] = self._columns.visible(self._positions, window, chunk)
        return self._visible[window, chunk]

    def prepare(self, q_heads: int) -> None:
        """Compute both orders for layers of so many heads, once a call, and for trees only."""
        if q_heads not in self._orders:
            nothing = self._nodes.constant(np.zeros((1, 1, 1, 1), np.int64))
            self._orders[q_heads] = self._nodes.choose(
                self.branches,
                lambda: self._both_orders(q_heads),
                lambda: [self._nodes.node("Identity", [nothing]) for _ in range(2)],
            )

    def probabilities(
        self, scores: ir.Value, visible: ir.Value, sinks: ir.Value | None = None, tree_of: int = 0
    ) -> ir.Value:
        """Softmax of scores [B, Hq, T, S] over the visible columns, 0 for the others.

        sinks: [Hq], scores of a key without a value.   tree_of: Hq where the scores are of a tree, and come and go in
        the order of its rows (see `prepare`).
        """
        nodes = self._nodes
        if tree_of:
            scores = nodes.node("GatherElements", [scores, self._orders[tree_of][0]], axis=3)
        scores = nodes.node("Where", [visible, scores, nodes.constant(HIDDEN)])
        shares = nodes.node("Softmax", [scores], axis=-1) if sinks is None else self._with_sinks(scores, sinks)
        return nodes.node("GatherElements", [shares, self._orders[tree_of][1]], axis=3) if tree_of else shares

    def _with_sinks(self, scores: ir.Value, sinks: ir.Value) -> ir.Value:
        """The softmax of the sinks, as a first column, and the scores; without that column again."""
        nodes = self._nodes
        outer = nodes.node("Shape", [scores], end=3)
        column = nodes.node(
            "Expand", [self._unsqueezed(sinks, 0, 2, 3), nodes.node("Concat", [outer, nodes.constant([1])], axis=0)]
        )
        shares = nodes.node("Softmax", [nodes.node("Concat", [column, scores], axis=3)], axis=-1)
        width = nodes.node("Shape", [shares], start=3)
        return nodes.node("Slice", [shares, nodes.constant([1]), width, nodes.constant([3])])

    def _both_orders(self, q_heads: int) -> list[ir.Value]:
        """The row that holds each position, and the position of each row, int64 [B, Hq, T, S] both.

        A row that a node does not see goes to the last column, which no node of a tree sees.
        """
        nodes = self._nodes
        batch = nodes.node("Shape", [self._past])
        shapes = [
            nodes.node("Concat", [batch, *sizes, self._count], axis=0)
            for sizes in ([], [self._tokens], [nodes.constant([q_heads]), self._tokens])
        ]
        rows = nodes.node("Expand", [self._columns.numbers, shapes[0]])
        positions = nodes.node("TensorScatter", [rows, self._positions, self._past], axis=1)  # [B, S]
        committed = nodes.node("Less", [self._columns.numbers, self._unsqueezed(self._past, 1, 2)])
        committed = nodes.node("Expand", [committed, shapes[1]])
        seen = nodes.node("TensorScatter", [committed, self._mask, self._past], axis=2)  # [B, T, S]
        hidden = nodes.node("Sub", [self._count, nodes.constant([1])])
        to_rows = nodes.node("Where", [seen, self._unsqueezed(positions, 1), hidden])
        rows = nodes.node("Expand", [self._columns.numbers, shapes[1]])
        to_positions = nodes.node("ScatterElements", [rows, to_rows, rows], axis=2)
        return [nodes.node("Expand", [self._unsqueezed(order, 1), shapes[2]]) for order in (to_positions, to_rows)]

    def _unsqueezed(self, value: ir.Value, *axes: int) -> ir.Value:
        return self._nodes.node("Unsqueeze", [value, self._nodes.constant(list(axes))])
