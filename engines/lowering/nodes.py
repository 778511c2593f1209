"""Adds nodes and constants to a graph or to a branch of an If, which the caller sorts afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from redraft import names

MICROSOFT = "com.microsoft"


class Nodes:
    """Adds nodes to `graph`; `prefix` begins the names of their values. The graph must be sorted afterwards."""

    def __init__(self, graph: ir.Graph, prefix: str) -> None:
        self.inputs = {value.name: value for value in graph.inputs}
        self._graph = graph
        self._prefix = prefix
        self._count = 0
        self._branches: list[list[ir.Node]] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}

    def constant(self, values: object) -> ir.Value:
        """Return an initializer, the same for equal values. Integers are int64."""
        array = np.asarray(values)
        key = (str(array.dtype), array.shape, array.tobytes())
        if key not in self._constants:
            name = f"{self._prefix}.constant.{len(self._constants)}"
            value = ir.Value(name=name, const_value=ir.tensor(array))
            self._graph.register_initializer(value)
            self._constants[key] = value
        return self._constants[key]

    def node(self, op: str, inputs: list[ir.Value], domain: str = "", **attributes: Any) -> ir.Value:
        """Add a node. Returns its only output."""
        return self._added(ir.node(op, inputs, attributes, domain=domain))[0]

    def split(self, value: ir.Value, axis: int, *sizes: int) -> list[ir.Value]:
        """Return parts of these sizes along an axis."""
        node = ir.node("Split", [value, self.constant(list(sizes))], {"axis": axis}, num_outputs=len(sizes))
        return self._added(node)

    def choose(
        self, condition: ir.Value, then: Callable[[], list[ir.Value]], otherwise: Callable[[], list[ir.Value]]
    ) -> list[ir.Value]:
        """Return the values of `then` if `condition`, a bool scalar, is true, else those of `otherwise`.

        Both return values of nodes that they add here, which become the branches of an If.
        """
        branches = {"then_branch": self._branch(then), "else_branch": self._branch(otherwise)}
        return self._added(ir.node("If", [condition], branches, num_outputs=len(branches["then_branch"].outputs)))

    def loop(
        self, first: ir.Value, last: ir.Value, carried: ir.Value, body: Callable[[ir.Value, ir.Value], ir.Value]
    ) -> ir.Value:
        """Return `carried` after body(number, carried) for each number first … last - 1, int64 scalars."""
        self._count += 1
        names_of = [f"{self._prefix}.loop.{self._count}.{name}" for name in ("turn", "go_on", "carried")]
        turn, go_on, inside = (ir.Value(name=name) for name in names_of)
        turn.type, go_on.type = ir.TensorType(ir.DataType.INT64), ir.TensorType(ir.DataType.BOOL)
        inside.type = ir.TensorType(ir.DataType.FLOAT)
        turn.shape, go_on.shape = ir.Shape([]), ir.Shape([])
        self._branches.append([])
        number = self.node("Add", [turn, first])
        outputs = [self.node("Identity", [go_on]), body(number, inside)]
        graph = ir.Graph([turn, go_on, inside], outputs, nodes=self._branches.pop(), name=f"{names_of[0]}.body")
        count = self.node("Sub", [last, first])
        return self._added(ir.node("Loop", [count, self.constant(np.array(True)), carried], {"body": graph}))[0]

    def kv_rows(self) -> ir.Value:
        """Return the number of rows of a KV buffer, int64 [1]."""
        return self.node("Shape", [self.inputs[names.key_cache(0)]], start=2, end=3)

    def _branch(self, make: Callable[[], list[ir.Value]]) -> ir.Graph:
        self._branches.append([])
        outputs = make()
        self._count += 1
        return ir.Graph([], outputs, nodes=self._branches.pop(), name=f"{self._prefix}.branch.{self._count}")

    def _added(self, node: ir.Node) -> list[ir.Value]:
        self._count += 1
        for place, output in enumerate(node.outputs):
            output.name = f"{self._prefix}.{node.op_type.lower()}.{self._count}.{place}"
        if self._branches:
            self._branches[-1].append(node)
        else:
            self._graph.insert_before(self._graph[0], node)
        return list(node.outputs)
