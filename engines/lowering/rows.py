"""The rows of a graph for batches, as attention needs them: a head's rows after each other, padded to T nodes.

Products of a packed graph compute one row for each node. A request that verifies one token next to a tree of 16 costs
them one row, not 16. Attention multiplies rows by the keys of their own sequence, so it has T rows of each sequence.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from redraft import names
from redraft.engines.lowering.nodes import Nodes
from redraft.engines.lowering.order import numbers


class PaddedRows:
    """Rows [B, T, H * D] of a graph that is padded everywhere."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self.positions = nodes.inputs[names.POSITIONS]
        """int64 [B, T]."""

    def split_heads(self, rows: ir.Value, heads: int, size: int) -> ir.Value:
        """[B, T, H * D] -> [B, H, T, D]."""
        shaped = self._nodes.node("Reshape", [rows, self._nodes.constant([0, 0, heads, size])])
        return self._nodes.node("Transpose", [shaped], perm=[0, 2, 1, 3])

    def rotate_heads(self, qkv: ir.Value, rotary: ir.Node, q_heads: int, kv_heads: int, size: int) -> list[ir.Value]:
        """Return rotated queries, rotated keys, and values, [B, heads, T, D] each, of all in one [B, T, …].

        rotary: the node that rotates the queries, for its attributes and tables.
        """
        heads = self.split_heads(qkv, q_heads + 2 * kv_heads, size)
        plain, values = self._nodes.split(heads, 1, q_heads + kv_heads, kv_heads)
        return [*self._nodes.split(rotated(self._nodes, plain, rotary), 1, q_heads, kv_heads), values]

    def merge_heads(self, summed: ir.Value, heads: int, size: int, computed: ir.Value | None) -> ir.Value:
        """[B, H, U, D] -> [B, T, H * D]. computed: U, int64 [1], if it is not T."""
        make, constant = self._nodes.node, self._nodes.constant
        merged = make("Reshape", [make("Transpose", [summed], perm=[0, 2, 1, 3]), constant([0, 0, heads * size])])
        if computed is None:
            return merged
        return make("Slice", [merged, constant([0]), make("Shape", [self.positions], start=1, end=2), constant([1])])


class PackedRows:
    """Rows [1, N, H * D] of a packed graph. Gathers of D numbers each pad them and put heads first, and back.

    Padding takes the values of row 0. Its positions continue the chain of its sequence after `cache_len`.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        make, constant, mask = nodes.node, nodes.constant, nodes.inputs[names.TREE_MASK]
        places, cache_len = nodes.inputs[names.PACKED_ROWS], nodes.inputs[names.CACHE_LEN]
        self._count = make("Shape", [mask], start=1, end=2)  # T
        new = numbers(nodes, self._count)
        self._shape = make("Shape", [mask], start=0, end=2)  # B, T
        chain = make("Add", [make("Unsqueeze", [cache_len, constant([1])]), new])  # [B, T]
        positions = make("Reshape", [nodes.inputs[names.POSITIONS], constant([-1])])
        self.positions = self._scattered(chain, places, positions)
        """int64 [B, T]."""
        rows = numbers(nodes, make("Shape", [places]))
        first = make("Expand", [constant([0]), self._shape])
        self._rows = make("Unsqueeze", [self._scattered(first, places, rows), constant([1])])
        """The packed row of each place, int64 [B, 1, T]."""
        column = make("Unsqueeze", [places, constant([1])])
        self._sequences, self._tokens = (make(op, [column, self._count]) for op in ("Div", "Mod"))  # [N, 1]
        self._padded: dict[tuple[int, int, int], ir.Value] = {}
        self._packed: dict[tuple[int, bool], ir.Value] = {}

    def split_heads(self, rows: ir.Value, heads: int, size: int, first: int = 0, count: int = 0) -> ir.Value:
        """[1, N, H * D] -> [B, H, T, D], of all heads or of `count` from head `first` on."""
        key = heads, first, count or heads
        if key not in self._padded:
            make, constant = self._nodes.node, self._nodes.constant
            own = constant([[number] for number in range(first, first + key[2])])
            self._padded[key] = make("Add", [make("Mul", [self._rows, constant([heads])]), own])  # [B, H, T]
        return self._nodes.node("Gather", [self._by_head(rows, size), self._padded[key]], axis=0)

    def rotate_heads(self, qkv: ir.Value, rotary: ir.Node, q_heads: int, kv_heads: int, size: int) -> list[ir.Value]:
        """Return rotated queries, rotated keys, and values, [B, heads, T, D] each, of all in one [1, N, …].

        rotary: the node that rotates the queries, for its attributes and tables.
        """
        both = q_heads + kv_heads
        plain, values = self._nodes.split(qkv, 2, both * size, kv_heads * size)
        turned = rotated(self._nodes, plain, rotary, num_heads=both)
        queries = self.split_heads(turned, both, size, 0, q_heads)
        keys = self.split_heads(turned, both, size, q_heads, kv_heads)
        return [queries, keys, self.split_heads(values, kv_heads, size)]

    def merge_heads(self, summed: ir.Value, heads: int, size: int, computed: ir.Value | None) -> ir.Value:
        """[B, H, U, D] -> [1, N, H * D]. computed: U, int64 [1], if it is not T."""
        make, constant = self._nodes.node, self._nodes.constant
        key = heads, computed is None
        if key not in self._packed:
            own = make("Add", [make("Mul", [self._sequences, constant([heads])]), constant(list(range(heads)))])
            self._packed[key] = make("Add", [make("Mul", [own, computed or self._count]), self._tokens])  # [N, H]
        rows = make("Gather", [self._by_head(summed, size), self._packed[key]], axis=0)
        return make("Reshape", [rows, constant([1, -1, heads * size])])

    def _by_head(self, values: ir.Value, size: int) -> ir.Value:
        """[…, D] -> [rows, D]."""
        return self._nodes.node("Reshape", [values, self._nodes.constant([-1, size])])

    def _scattered(self, padding: ir.Value, places: ir.Value, values: ir.Value) -> ir.Value:
        """Return `padding` [B, T] with values [N] at their places."""
        make = self._nodes.node
        flat = make("Reshape", [padding, self._nodes.constant([-1])])
        return make("Reshape", [make("ScatterElements", [flat, places, values], axis=0), self._shape])


def rotated(nodes: Nodes, plain: ir.Value, rotary: ir.Node, **attributes: Any) -> ir.Value:
    """Return heads rotated as by the node `rotary`, which rotates a part of them."""
    tables = [value for value in rotary.inputs[1:4] if value is not None]
    interleaved = rotary.attributes.get_int("interleaved", 0)
    return nodes.node("RotaryEmbedding", [plain, *tables], interleaved=interleaved, **attributes)
