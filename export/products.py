"""Products over stored weights as ONNX Runtime's `MatMulNBits`: the weight-only precisions int8 and int4."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
from onnx_ir.passes import common

from redraft import names
from redraft.config import Precision
from redraft.export import quantize, stored_grids
from redraft.export.product_weights import ProductWeight, before_attention, feeds
from redraft.export.quantize import Grid
from redraft.export.sources import AnySource
from redraft.export.weight_files import ONNX_TYPES, NewTensor, Slabs


def quantize_products(model: ir.Model, source: AnySource, precision: Precision, output: str) -> list[NewTensor]:
    """Replace products over stored weights by MatMulNBits.

    With int4, the products of the logits and of queries, keys and values keep 8 bits. These are few weights, but they
    cause half of the loss of 4 bits (docs/log.md). A weight that a checkpoint stores in 4 bits keeps them without loss.
    """
    made: list[NewTensor] = []
    attended = before_attention(model)
    logits = next((value.producer() for value in model.graph.outputs if value.name == output), None)
    nodes = [node for node in model.graph if node.op_type == "MatMul"]
    products = [(node, weight) for node in nodes if (weight := ProductWeight.of(node, source.parameters))]
    kept = {weight.stem for node, weight in products if node in attended or feeds(node, logits)}  # of all its products
    for node, weight in products:
        bits = 8 if precision == "int8" or (weight.stem in kept and not stored_grids.fits(weight, source, 4)) else 4
        tensors = _tensors(weight, source, bits)
        made += [tensor for tensor in tensors if tensor.name not in model.graph.initializers]  # one of several products
        _replace(model, node, tensors, weight.shape(source)[1], bits)
    common.RemoveUnusedNodesPass()(model)
    return made


def _tensors(weight: ProductWeight, source: AnySource, bits: int) -> list[NewTensor]:
    """Return codes, scales and zero points. Producing the codes finds the grids, so the codes must come first."""
    (rows, columns), grids = weight.shape(source), list[Grid]()
    block = stored_grids.block_of(weight, source, bits)
    blocks = quantize.blocks_of(columns) * (quantize.BLOCK // block)

    def codes() -> Slabs:
        grids.clear()
        for values, grid in stored_grids.coded(weight, source, bits, block):
            grids.append(grid)
            yield values

    def zeros() -> Slabs:
        yield from (quantize.packed(grid.zeros, bits) for grid in grids)
        grids.clear()

    parts: dict[str, tuple[str, tuple[int, ...], Callable[[], Slabs]]] = {
        names.CODES: ("U8", (rows, blocks, block * bits // 8), codes),
        names.SCALES: ("F32", (rows, blocks), lambda: (grid.scales for grid in grids)),
        names.ZEROS: ("U8", (rows, -(-blocks * bits // 8)), zeros),
    }
    return [NewTensor(f"{weight.stem}{part}", dtype, shape, slabs) for part, (dtype, shape, slabs) in parts.items()]


def _replace(model: ir.Model, node: ir.Node, tensors: list[NewTensor], columns: int, bits: int) -> None:
    """Replace the product by a MatMulNBits of `columns` inputs over the tensors. Their bytes are placed later."""
    known = model.graph.initializers
    for tensor in tensors:
        if tensor.name in known:
            continue
        dtype, shape = ONNX_TYPES[tensor.dtype], ir.Shape(tensor.shape)
        value = ir.Value(name=tensor.name, shape=shape, type=ir.TensorType(dtype))
        value.const_value = ir.ExternalTensor("unplaced", 0, 0, dtype, shape=shape, name=tensor.name)
        model.graph.register_initializer(value)
    rows, _, block_bytes = tensors[0].shape
    block = block_bytes * 8 // bits
    attributes = {"K": columns, "N": rows, "bits": bits, "block_size": block, "accuracy_level": 4}
    inputs = [node.inputs[0], *(known[tensor.name] for tensor in tensors)]
    product = ir.node("MatMulNBits", inputs, attributes, domain="com.microsoft")
    product.outputs[0].shape, product.outputs[0].type = node.outputs[0].shape, node.outputs[0].type
    model.opset_imports["com.microsoft"] = 1
    model.graph.insert_before(node, product)
    output, name = node.outputs[0], node.outputs[0].name
    ir.convenience.replace_all_uses_with(output, product.outputs[0], replace_graph_outputs=True)
    model.graph.remove(node, safe=True)
    product.outputs[0].name = name
