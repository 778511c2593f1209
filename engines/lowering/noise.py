"""`redraft::AddNoise` on the CPU: nothing if no sequence of a call has noise, otherwise with a faster hash.

The portable hash divides int64 numbers, one at a time. Numbers of 32 bits wrap by themselves, and ONNX Runtime's CPU
kernels multiply and shift several of them at once. The hashes are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import tape
from onnx_ir.convenience import replace_nodes_and_values
from onnx_ir.passes.common import RemoveUnusedFunctionsPass

from redraft import names, noise_spec
from redraft.engines.lowering.nodes import Nodes


def lower_noise(model: ir.Model) -> bool:
    """Lower every AddNoise node in place. Returns False if there is none. The graph must be sorted afterwards."""
    found = [node for node in model.graph if node.op_type == names.ADD_NOISE]
    if not found:
        return False
    identifier = next(known for known, function in model.functions.items() if function.name == names.TOKEN_HASHES)
    model.functions[identifier] = _hashes(model.functions[identifier].opset_imports)
    nodes = Nodes(model.graph, "noise")
    for node in found:
        _skip_without_noise(model.graph, nodes, node)
    RemoveUnusedFunctionsPass()(model)
    return True


def _skip_without_noise(graph: ir.Graph, nodes: Nodes, node: ir.Node) -> None:
    inputs = [value for value in node.inputs if value is not None]
    largest = nodes.node("ReduceMax", [inputs[1]], keepdims=0)
    (noisy,) = nodes.choose(
        nodes.node("Greater", [largest, nodes.constant(np.float32(0))]),
        lambda: [nodes.node(node.op_type, inputs, node.domain)],
        lambda: [nodes.node("Identity", inputs[:1])],
    )
    replace_nodes_and_values(graph, node, [node], [], node.outputs, [noisy])


def _hashes(opsets: Mapping[str, int]) -> ir.Function:
    """Return the function TokenHashes: keys [B, S, 2] and ids [H] to hashes, uint32 [B, S, H].

    ONNX Runtime multiplies int32 but not uint32, and shifts uint32 but not int32.
    """
    made = tape.Tape()

    def op(name: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        return made.op(name, inputs, attributes)

    def constant(value: int, dtype: type[np.generic] = np.int32) -> ir.Value:
        return op("Constant", value=ir.tensor(np.array(value, dtype)))

    def cast(value: ir.Value, to: ir.DataType) -> ir.Value:
        return op("Cast", value, to=to)

    def quadratic(x: ir.Value) -> ir.Value:
        square = op("Mul", x, x)
        return op("Add", x, op("Add", square, square))

    keys, ids = ir.Value(name="keys"), ir.Value(name="ids")
    signed, unsigned = ir.DataType.INT32, ir.DataType.UINT32
    first, second = made.op_multi_out("Split", [cast(keys, signed)], {"axis": 2, "num_outputs": 2}, num_outputs=2)
    x = quadratic(op("Add", op("Mul", cast(ids, signed), constant(noise_spec.FIRST)), first))
    high = op("BitShift", cast(x, unsigned), constant(noise_spec.SHIFT, np.uint32), direction="RIGHT")
    x = op("Add", x, cast(high, signed))
    x = cast(quadratic(op("Add", op("Mul", x, constant(noise_spec.SECOND)), second)), unsigned)
    for number, value in enumerate(value for node in made.nodes for value in node.outputs):
        value.name = f"value.{number}"
    graph = ir.Graph([keys, ids], [x], nodes=made.nodes, opset_imports=dict(opsets))
    return ir.Function(names.TREE_ATTENTION_DOMAIN, names.TOKEN_HASHES, graph=graph, attributes=[])
