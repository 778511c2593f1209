"""Helpers of `expand` and `native`, which replace a node by others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import replace_nodes_and_values


class Rewriter:
    """Collects nodes before `node` of `graph`; `replace` puts them in its place. Names begin with the node's own."""

    def __init__(self, graph: ir.Graph, node: ir.Node) -> None:
        self._graph, self._node = graph, node
        self._stem = node.name or node.outputs[0].name or node.op_type
        self._nodes: list[ir.Node] = []

    def node(self, op: str, inputs: Sequence[ir.Value | None], outputs: int = 1, **attributes: Any) -> Any:
        """Return the output of a new node, or its outputs if it has several."""
        made = ir.node(op, inputs, attributes, num_outputs=outputs)
        made.name = f"{self._stem}.{len(self._nodes)}.{op}"
        for number, value in enumerate(made.outputs):
            value.name = f"{made.name}.{number}"
        self._nodes.append(made)
        return made.outputs[0] if outputs == 1 else tuple(made.outputs)

    def constant(self, values: object, dtype: type[np.generic] = np.int64) -> ir.Value:
        """Return an initializer; equal ones are one."""
        array = np.asarray(values, dtype)
        name = f"tensorrt.{array.dtype}.{'x'.join(map(str, array.shape))}.{'_'.join(map(str, array.ravel().tolist()))}"
        if name not in self._graph.initializers:
            value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
            self._graph.register_initializer(value)
        return self._graph.initializers[name]

    def replace(self, *values: ir.Value) -> None:
        """Let everything that reads the node's outputs read `values`, which take their names, types and shapes."""
        replace_nodes_and_values(self._graph, self._node, [self._node], self._nodes, self._node.outputs, values)
