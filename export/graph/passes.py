"""Graph passes after tracing: fewer products, no reshapes or transposes that move nothing, no shape arithmetic.

They use facts of the graph (known shapes, shared inputs), never an architecture's names. Weights stay references into
the
checkpoint: the graph concatenates them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import onnx_ir as ir
from onnx_ir.passes import Sequential, common


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
            node.replace_input_with(1, _constant(model, target))


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
        if not plain or _flag(node, "transA"):
            continue
        turned = [ir.node("Transpose", [node.inputs[1]], {"perm": [1, 0]})] if _flag(node, "transB") else []
        nodes = [ir.node("MatMul", [node.inputs[0], turned[0].outputs[0] if turned else node.inputs[1]])]
        if len(node.inputs) > 2 and node.inputs[2] is not None:
            nodes.append(ir.node("Add", [nodes[0].outputs[0], node.inputs[2]]))
        for part in nodes:
            part.outputs[0].shape, part.outputs[0].type = node.outputs[0].shape, node.outputs[0].type
        model.graph.insert_before(node, [*turned, *nodes])
        _replace(node, nodes[-1].outputs[0])


def _flag(node: ir.Node, name: str) -> bool:
    return name in node.attributes and node.attributes[name].as_int() != 0


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
    weights = [weight_of(product) for product in products]
    biases = [_bias_of(product) for product in products]
    if any(biases) and not all(biases):
        return
    ends = [add for add, _ in biases] if all(biases) else products  # type: ignore[misc]
    sizes = [int(weight.shape[0]) for weight in weights]  # type: ignore[union-attr, index, arg-type]
    first = products[0]
    joined = ir.node("Concat", weights, {"axis": 0})
    turned = ir.node("Transpose", [joined.outputs[0]], {"perm": [1, 0]})
    product = ir.node("MatMul", [first.inputs[0], turned.outputs[0]])
    nodes, last = [joined, turned, product], product
    if all(biases):
        bias = ir.node("Concat", [value for _, value in biases], {"axis": 0})  # type: ignore[misc]
        last = ir.node("Add", [product.outputs[0], bias.outputs[0]])
        nodes += [bias, last]
    split = ir.node("Split", [last.outputs[0], _constant(model, sizes)], {"axis": -1}, num_outputs=len(products))
    stem = weights[0].name.rsplit(".", 2)[0]  # type: ignore[union-attr]
    product.name = product.outputs[0].name = f"{stem}.{len(model.graph)}.product"
    lead = list(first.inputs[0].shape)[:-1]  # type: ignore[union-attr, arg-type]
    for value, size in [
        (product.outputs[0], sum(sizes)),
        (last.outputs[0], sum(sizes)),
        *zip(split.outputs, sizes, strict=True),
    ]:
        value.shape, value.type = ir.Shape([*lead, size]), ends[0].outputs[0].type
    model.graph.insert_before(first, [*nodes, split])
    for end, part in zip(ends, split.outputs, strict=True):
        _replace(end, part)


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


def _constant(model: ir.Model, numbers: list[int]) -> ir.Value:
    """Return an int64 vector among the initializers, one for equal vectors."""
    name = "ints." + "_".join(map(str, numbers))
    if name not in model.graph.initializers:
        value = ir.Value(name=name, shape=ir.Shape([len(numbers)]), type=ir.TensorType(ir.DataType.INT64))
        value.const_value = ir.tensor(numbers, ir.DataType.INT64, name=name)
        model.graph.register_initializer(value)
    return model.graph.initializers[name]
