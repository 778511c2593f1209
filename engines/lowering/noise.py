"""`redraft::AddNoise` on the CPU: nothing if no sequence of a call has noise, otherwise with a faster hash.

The portable hash divides int64 numbers, one at a time. Its words fit into int32, whose products wrap, and ONNX
Runtime's CPU kernels shift and mask several of them at once. The words are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import tape
from onnx_ir.convenience import replace_nodes_and_values

from redraft import names, noise_spec
from redraft.engines.lowering.nodes import Nodes


def lower_noise(model: ir.Model) -> bool:
    """Lower every AddNoise node in place. Returns False if there is none. The graph must be sorted afterwards."""
    found = [node for node in model.graph if node.op_type == names.ADD_NOISE]
    if not found:
        return False
    identifier = next(known for known, function in model.functions.items() if function.name == names.TOKEN_WORDS)
    model.functions[identifier] = _words(model.functions[identifier].opset_imports)
    nodes = Nodes(model.graph, "noise")
    for node in found:
        _skip_without_noise(model.graph, nodes, node)
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


def _words(opsets: Mapping[str, int]) -> ir.Function:
    """Return the function TokenWords: keys [B, S, 2] and ids [H] to words, int32 [B, S, H]."""
    made = tape.Tape()

    def op(name: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        return made.op(name, inputs, attributes)

    def constant(value: int, dtype: type[np.generic] = np.int32) -> ir.Value:
        return op("Constant", value=ir.tensor(np.array(value, dtype)))

    keys, ids = ir.Value(name="keys"), ir.Value(name="ids")
    narrow: Sequence[ir.Value] = [op("Cast", value, to=ir.DataType.INT32) for value in (keys, ids)]
    first, second = made.op_multi_out("Split", narrow[:1], {"axis": 2, "num_outputs": 2}, num_outputs=2)
    mask, shift = constant((1 << noise_spec.WORD_BITS) - 1), constant(noise_spec.SHIFT, np.uint32)
    x = op("Add", first, narrow[1])
    for number in range(noise_spec.ROUNDS):
        if number:
            high = op("BitShift", op("Cast", x, to=ir.DataType.UINT32), shift, direction="RIGHT")
            x = op("Add", x, op("Cast", high, to=ir.DataType.INT32))
        factor = op("Add", op("Add", x, x), second if number % 2 == 0 else first)
        x = op("BitwiseAnd", op("Mul", x, factor), mask)
    for number, value in enumerate(value for node in made.nodes for value in node.outputs):
        value.name = f"value.{number}"
    graph = ir.Graph([keys, ids], [x], nodes=made.nodes, opset_imports=dict(opsets))
    return ir.Function(names.TREE_ATTENTION_DOMAIN, names.TOKEN_WORDS, graph=graph, attributes=[])
