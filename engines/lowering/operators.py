"""`redraft::TreeAttention` by redraft's own kernel for CPUs (`redraft.plugins.operators`), for any number of sequences.

It takes packed rows as they are. It rotates queries and keys itself if they have no other reader.
"""

from __future__ import annotations

import onnx_ir as ir
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
