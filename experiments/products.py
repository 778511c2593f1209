"""The floor under a verifier's time: only the matrix products of its graph, each over its own weights."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
from onnx_ir.convenience import extract

from redraft.files import link_or_copy

_PRODUCTS = ("MatMul", "MatMulNBits")
_TOKENS = "T"


def write_products(graph: Path, out: Path) -> None:
    """Write to `out`, in another folder, the products of `graph` that multiply by weights. Weights are linked there.

    The new graph has an input `rows.{K}` [T, K] for each number of columns K that a product reads, and an output
    `product.{i}` [T, N] for each product, in the order of the graph. Raises ValueError if the graph has none.
    """
    model = ir.load(graph)
    products = [node for node in model.graph if node.op_type in _PRODUCTS and _is_constant(node.inputs[1])]
    if not products:
        raise ValueError(f"{graph} multiplies nothing by weights")
    inputs: dict[int, ir.Value] = {}
    for number, node in enumerate(products):
        rows, out_rows = node.inputs[0], node.outputs[0]
        assert rows is not None
        columns = _columns(rows)
        if columns not in inputs:
            inputs[columns] = ir.Value(name=f"rows.{columns}", shape=ir.Shape([_TOKENS, columns]), type=rows.type)
        node.replace_input_with(0, inputs[columns])
        out_rows.name, out_rows.shape = f"product.{number}", ir.Shape([_TOKENS, _columns(out_rows)])
    outputs = [node.outputs[0] for node in products]
    model.graph.inputs.extend(inputs.values())
    alone = ir.Model(extract(model.graph, list(inputs.values()), outputs), ir_version=model.ir_version)
    ir.save(alone, out)
    for weights in {
        value.const_value.location
        for value in alone.graph.initializers.values()
        if isinstance(value.const_value, ir.ExternalTensor)
    }:
        (out.parent / weights).parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(graph.parent / weights, out.parent / weights)


def _is_constant(value: ir.Value | None) -> bool:
    """Return True if only initializers go into the value."""
    if value is None or value.is_initializer():
        return value is not None
    producer = value.producer()
    return producer is not None and all(map(_is_constant, producer.inputs))


def _columns(value: ir.Value) -> int:
    """Return the last dimension."""
    assert value.shape is not None
    columns = value.shape[-1]
    assert isinstance(columns, int)
    return columns
