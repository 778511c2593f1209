"""Graph passes after tracing: fewer products, no reshapes or transposes that move nothing, no shape arithmetic.

They use facts of the graph (known shapes, shared inputs), never an architecture's names. Weights stay references into
the checkpoint: the graph concatenates them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import onnx_ir as ir
from onnx_ir.passes import Sequential, common
from onnx_ir.tape import Tape

from redraft import names
from redraft.export.graph.edit import constant_ints, typed


def simplify(model: ir.Model) -> None:
    """Run all passes, in order, in place."""
    compose_transposes(model)
    simplify_reshapes(model)
    drop_no_ops(model)
    expand_gemms(model)
    Sequential(common.CommonSubexpressionEliminationPass(), common.RemoveUnusedNodesPass())(model)
    merge_products(model)
    tidy = (common.RemoveUnusedNodesPass(), common.TopologicalSortPass(), common.CommonSubexpressionEliminationPass())
    Sequential(*tidy)(model)


def set_cache_type(model: ir.Model, dtype: ir.DataType) -> None:
    """Give the KV buffers another type. `redraft::TreeAttention` converts the rows that it writes and reads."""
    for value in (*model.graph.inputs, *model.graph.outputs):
        if names.is_cache(value.name or ""):
            value.type = ir.TensorType(dtype)


def compose_transposes(model: ir.Model) -> None:
    """Turn a transpose of a transpose into one, or into none if the two cancel."""
    for node in _nodes(model, "Transpose"):
        before = node.inputs[0].producer() if node.inputs[0] is not None else None
        if before is None or before.op_type != "Transpose":
            continue
        inner, outer = before.attributes["perm"].as_ints(), node.attributes["perm"].as_ints()
        perm = [inner[axis] for axis in outer]
        if perm == sorted(perm):
            _replace(node, before.inputs[0])
        else:
            node.attributes["perm"] = ir.AttrInt64s("perm", perm)
            node.replace_input_with(0, before.inputs[0])


def simplify_reshapes(model: ir.Model) -> None:
    """Let chains of reshapes start from their first input, drop useless reshapes, and make targets constant."""
    for node in _nodes(model, "Reshape"):
        source = node.inputs[0]
        while source is not None and (before := source.producer()) is not None and before.op_type == "Reshape":
            source = before.inputs[0]
        if source is None or source.shape is None or node.outputs[0].shape is None:
            continue
        node.replace_input_with(0, source)
        have, want = list(source.shape), list(node.outputs[0].shape)
        if have == want:
            _replace(node, source)
        elif (target := _constant_target(have, want)) is not None:
            node.attributes.pop("allowzero", None)
            node.replace_input_with(1, constant_ints(model, target))


def _constant_target(have: list[int | ir.SymbolicDim], want: list[int | ir.SymbolicDim]) -> list[int] | None:
    """Return a reshape target of numbers only: 0 copies the input's dimension, one -1 takes the rest."""
    target = []
    for axis, dim in enumerate(want):
        if isinstance(dim, int):
            target.append(dim)
        elif axis < len(have) and have[axis] == dim and 0 not in want:
            target.append(0)
        else:
            target.append(-1)
    return target if target.count(-1) <= 1 else None


def drop_no_ops(model: ir.Model) -> None:
    """Remove casts to the type that a value already has, and slices that keep all of it."""
    for node in [*_nodes(model, "Cast"), *_nodes(model, "Slice")]:
        source, result = node.inputs[0], node.outputs[0]
        if source is None or source.dtype is None or source.dtype != result.dtype:
            continue
        if source.shape is not None and source.shape == result.shape:
            _replace(node, source)


def expand_gemms(model: ir.Model) -> None:
    """Write a Gemm as a product and a sum, which other passes know, with a transpose before them if transB is set."""
    for node in _nodes(model, "Gemm"):
        plain = all(node.attributes[n].as_float() == 1.0 for n in ("alpha", "beta") if n in node.attributes)
        turned = {n for n in ("transA", "transB") if n in node.attributes and node.attributes[n].as_int()}
        if not plain or "transA" in turned:
            continue
        tape, result = Tape(), node.outputs[0]
        left, right, *bias = node.inputs
        if turned:
            right = tape.op("Transpose", [right], {"perm": [1, 0]})
        value = tape.op("MatMul", [left, right])
        value.shape, value.type = result.shape, result.type
        if bias and bias[0] is not None:
            value = tape.op("Add", [value, bias[0]])
            value.shape, value.type = result.shape, result.type
        model.graph.insert_before(node, tape.nodes)
        _replace(node, value)


def merge_products(model: ir.Model) -> None:
    """Join sibling projections (of one parent module) that multiply the same value into one product, then split it."""
    siblings: dict[tuple[int, str], list[ir.Node]] = defaultdict(list)
    for node in _nodes(model, "MatMul"):
        weight = weight_of(node)
        if weight is not None:
            siblings[id(node.inputs[0]), weight.name.rsplit(".", 2)[0]].append(node)  # type: ignore[union-attr]
    for group in siblings.values():
        if len(group) > 1:
            _merge(model, group)


def weight_of(product: ir.Node) -> ir.Value | None:
    """Return the stored weight [out, in] of a MatMul over its transpose, or None for any other product."""
    transpose = product.inputs[1].producer() if product.inputs[1] is not None else None
    if transpose is None or transpose.op_type != "Transpose":
        return None
    weight = transpose.inputs[0]
    return weight if weight is not None and weight.is_initializer() else None


def _merge(model: ir.Model, products: list[ir.Node]) -> None:
    weights = [weight for product in products if (weight := weight_of(product)) is not None]
    biases = [bias for product in products if (bias := _bias_of(product)) is not None]
    if biases and len(biases) < len(products):
        return
    ends = [add for add, _ in biases] or products
    sizes = [int(weight.shape[0]) for weight in weights]  # type: ignore[index, arg-type]
    x = products[0].inputs[0]
    assert x is not None
    tape = Tape()
    joined = tape.op("Transpose", [tape.op("Concat", weights, {"axis": 0})], {"perm": [1, 0]})
    stem = (weights[0].name or "").rsplit(".", 2)[0]
    name = f"{stem}.{len(model.graph)}.product"
    whole = typed(tape.op("MatMul", [x, joined], name=name), x, sum(sizes))
    whole.name = name
    if biases:
        joined_bias = tape.op("Concat", [value for _, value in biases], {"axis": 0})
        whole = typed(tape.op("Add", [whole, joined_bias]), x, sum(sizes))
    inputs = [whole, constant_ints(model, sizes)]
    parts = tape.op_multi_out("Split", inputs, {"axis": -1}, num_outputs=len(products))
    model.graph.insert_before(products[0], tape.nodes)
    for end, part, size in zip(ends, parts, sizes, strict=True):
        _replace(end, typed(part, x, size))


def _bias_of(product: ir.Node) -> tuple[ir.Node, ir.Value] | None:
    """Return the Add of a stored bias if it is the product's only consumer."""
    uses = list(product.outputs[0].uses())
    if len(uses) != 1 or uses[0].node.op_type != "Add":
        return None
    other = uses[0].node.inputs[1 - uses[0].idx]
    if other is None or not other.is_initializer() or other.shape is None or other.shape.rank() != 1:
        return None
    return uses[0].node, other


def _nodes(model: ir.Model, op_type: str) -> Iterable[ir.Node]:
    return [node for node in model.graph if node.op_type == op_type]


def _replace(node: ir.Node, value: ir.Value | None) -> None:
    """Let all uses of the node's output read `value`. A graph output keeps its name through an Identity."""
    assert value is not None
    output = node.outputs[0]
    if output.is_graph_output():
        return
    ir.convenience.replace_all_uses_with(output, value)
