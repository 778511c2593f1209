"""The host's computations between engine calls, as graphs. On a GPU, a step then needs one small copy to the host.

Tests compare each graph with a NumPy reference in `redraft.runtime.trees.tree` (mask, depths, accepted path) or with
copied rows. Graphs hold no weights; the model's sizes are their only constants.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from redraft import names, signatures
from redraft.export.graph import tracing
from redraft.export.graph.decoder import finish
from redraft.names import TensorSpec
from redraft.signatures import VerifierShape
from redraft.types import NOT_REACHED

_ONNX_TYPES = {"int64": "INT64", "bool": "BOOL", "float32": "FLOAT", "float16": "FLOAT16", "bfloat16": "BFLOAT16"}


def export_step_graphs(shape: VerifierShape, out: Path, gathers: bool) -> dict[str, str]:
    """Write the graphs of a step into `out`. Returns their files by the graph's name.

    gathers: True if a drafter reads hidden states; it then drafts on the device.
    """
    models = {
        names.STEP_PREPARE_TREE: _prepare_tree(),
        names.STEP_ACCEPT: _accept(shape),
        names.STEP_ACCEPT_SAMPLED: _accept_sampled(shape),
        names.STEP_COMPACT_KV: _compact_kv(shape),
        names.STEP_COPY_SLOT: _copy_slot(names.STEP_COPY_SLOT, signatures.verifier_state(shape)),
    }
    if gathers:
        models[names.STEP_GATHER_FEATURES] = _gather_features(shape)
        models[names.STEP_STORE_TREES] = _store_trees()
    return {name: _save(model, out, name) for name, model in models.items()}


def export_slot_copy(name: str, state: tuple[TensorSpec, ...], out: Path) -> str:
    """Write the graph `name`, which copies the tensors of a drafter's slot to another slot. Returns its file."""
    return _save(_copy_slot(name, state), out, name)


def _save(model: ir.Model, out: Path, name: str) -> str:
    finish(model)
    ir.save(model, out / f"{name}.onnx")
    return f"{name}.onnx"


def _prepare_tree() -> ir.Model:
    """Finds ancestors by doubling: round k reaches those at most 2^k steps towards the root."""
    builder = _Builder()
    add = builder.add
    width = add("Shape", names.HOST_TOKENS, start=1, end=2)  # [1]: T
    on_device = add("Unsqueeze", add("Cast", names.ON_DEVICE, to=onnx.TensorProto.BOOL), builder.ints(1))  # [B, 1]
    for tree, host, output in (
        (names.STORED_TOKENS, names.HOST_TOKENS, names.TOKEN_IDS),
        (names.STORED_PARENTS, names.HOST_PARENTS, names.PARENTS),
    ):
        padded = add("Concat", tree, add("Sub", host, host), axis=1)  # S nodes, then T children of the root
        first = add("Slice", padded, builder.ints(0), width, builder.ints(1))
        add("Where", on_device, first, host, output=output)
    nodes = _nodes(builder)
    own = add("Equal", add("Unsqueeze", nodes, builder.ints(1)), nodes)  # [T, T]
    parent = add("Equal", add("Unsqueeze", names.PARENTS, builder.ints(2)), nodes)  # [B, T, T]
    reached = add("Or", parent, own)
    for step in range(names.MOST_DEPTH.bit_length() - 1):
        ways = add("Cast", reached, to=onnx.TensorProto.FLOAT)
        last = step == names.MOST_DEPTH.bit_length() - 2
        reached = add("Greater", add("MatMul", ways, ways), builder.real(0.0), output=names.TREE_MASK if last else "")
    depth = add("Sub", _count(builder, names.TREE_MASK, 2), builder.ints(1))
    add("Add", depth, add("Unsqueeze", names.CACHE_LEN, builder.ints(1)), output=names.POSITIONS)
    return builder.model(names.STEP_PREPARE_TREE, signatures.prepare_tree_inputs(), signatures.prepare_tree_outputs())


def _accept(shape: VerifierShape) -> ir.Model:
    builder = _Builder()
    _add_acceptance(builder, names.LOGITS, _largest(builder))
    return builder.model(names.STEP_ACCEPT, signatures.accept_inputs(shape), signatures.accept_outputs())


def _accept_sampled(shape: VerifierShape) -> ir.Model:
    """Computes what `redraft.runtime.sampling` does, in its order, so that only the logarithms may round otherwise."""
    builder = _Builder()
    add = builder.add
    warm = add("Greater", names.TEMPERATURE, builder.real(0.0))
    divisor = add("Where", warm, names.TEMPERATURE, builder.real(1.0))
    largest = _largest(builder)
    scores = add("Div", add("Sub", names.LOGITS, largest), add("Unsqueeze", divisor, builder.ints(1, 2)))
    depths = add("Sub", _count(builder, names.TREE_MASK, 2), builder.ints(1))  # [B, T]
    keys = add("GatherND", names.NOISE_KEYS, add("Unsqueeze", depths, builder.ints(2)), batch_dims=1)  # [B, T, 2]
    scale = add("Cast", warm, to=onnx.TensorProto.FLOAT)
    ids = builder.count(add("Shape", names.LOGITS), 2)
    noisy = add(names.ADD_NOISE, scores, scale, keys, ids, domain=names.TREE_ATTENTION_DOMAIN)
    _add_acceptance(builder, noisy, largest)
    return builder.model(
        names.STEP_ACCEPT_SAMPLED, signatures.accept_sampled_inputs(shape), signatures.accept_outputs()
    )


def _largest(builder: _Builder) -> str:
    """Return the largest logit of every row, [B, T, 1]; infinity if one is NaN, whatever ReduceMax does with it."""
    real = builder.add("Where", builder.add("IsNaN", names.LOGITS), builder.real(float("inf")), names.LOGITS)
    return builder.add("ReduceMax", real, builder.ints(2), keepdims=1)


def _add_acceptance(builder: _Builder, scores: str, largest: str) -> None:
    """Find the deepest accepted node: it and its ancestors each equal the target token after their parent.

    A node's target token has the largest of its scores [B, T, V]. It is NOT_REACHED, -1, if its largest logit is not a
    finite number, and then no child is accepted.
    """
    add = builder.add
    nodes = _nodes(builder)
    finite = add("Less", add("Abs", largest), builder.real(float("inf")))
    best = add("ArgMax", scores, axis=2, keepdims=0)
    target_token_ids = add("Where", add("Squeeze", finite, builder.ints(2)), best, builder.ints(NOT_REACHED))
    expected = add("GatherElements", target_token_ids, add("Max", names.PARENTS, builder.ints(0)), axis=1)
    in_tree = add("Less", nodes, add("Unsqueeze", names.NODES, builder.ints(1)))
    drafted = add("And", add("Equal", names.TOKEN_IDS, expected), in_tree)
    right = add("Or", drafted, add("Less", names.PARENTS, builder.ints(0)))  # the root is always accepted
    above = add("And", names.TREE_MASK, add("Unsqueeze", add("Not", right), builder.ints(1)))
    holds = add("Equal", _count(builder, above, 2), builder.ints(0))  # [B, T]
    depth = add("Where", holds, _count(builder, names.TREE_MASK, 2), builder.ints(0))
    # In a type that every ArgMax takes: ONNX Runtime's CUDA kernel takes floating-point numbers only.
    last = add("ArgMax", add("Cast", depth, to=onnx.TensorProto.FLOAT), axis=1, keepdims=1)  # [B, 1]
    ancestors = add("Cast", names.TREE_MASK, to=onnx.TensorProto.INT64)
    on_path = add("Cast", add("GatherND", ancestors, last, batch_dims=1), to=onnx.TensorProto.BOOL)  # [B, T]
    # The path's nodes sort before all others, so that they come first, in order.
    width = add("Gather", add("Shape", names.TOKEN_IDS), builder.ints(1))  # [1]
    order = add("Where", on_path, nodes, add("Add", nodes, width))
    ranks = add("Cast", order, to=onnx.TensorProto.FLOAT)  # a type that every TopK takes
    _smallest, first = builder.add_all("TopK", (ranks, width), 2, axis=1, largest=0, sorted=1)
    count = add("Unsqueeze", _count(builder, on_path, 1), builder.ints(1))  # [B, 1]
    path = add("Where", add("Less", nodes, count), first, nodes, output=names.PATH)
    add("Concat", count, path, target_token_ids, output=names.ACCEPT_OUTPUT, axis=1)


def _nodes(builder: _Builder) -> str:
    """Return 0 … T - 1 for a graph with parents [B, T]."""
    return builder.count(builder.add("Shape", names.PARENTS), 1)


def _count(builder: _Builder, flags: str, axis: int) -> str:
    """Count the true elements along an axis."""
    ones = builder.add("Cast", flags, to=onnx.TensorProto.INT64)
    return builder.add("ReduceSum", ones, builder.ints(axis), keepdims=0)


def _compact_kv(shape: VerifierShape) -> ir.Model:
    builder = _Builder()
    rows = builder.add("Add", builder.add("Unsqueeze", names.CACHE_LEN, builder.ints(1)), names.PATH)  # [B, T]
    sizes = builder.add("Shape", names.PATH)
    batch, nodes = (builder.add("Gather", sizes, builder.ints(axis)) for axis in range(2))
    one = builder.ints(1)
    target = builder.add("Concat", batch, builder.ints(shape.kv_heads), nodes, one, axis=0)
    index = builder.add("Expand", builder.add("Unsqueeze", rows, builder.ints(1, 3)), target)  # [B, H_kv, T, 1]
    for cache in signatures.caches(shape):
        moved = builder.add("GatherND", cache, index, batch_dims=2)  # [B, H_kv, T, D]
        builder.add("TensorScatter", cache, moved, names.CACHE_LEN, output=names.present(cache), axis=2)
    return builder.model(
        names.STEP_COMPACT_KV, signatures.compact_kv_inputs(shape), signatures.compact_kv_outputs(shape)
    )


def _gather_features(shape: VerifierShape) -> ir.Model:
    builder = _Builder()
    axes = builder.ints(2)
    rows = builder.add("GatherND", names.FEATURE_ROWS, builder.add("Unsqueeze", names.PATH, axes), batch_dims=1)
    sizes = builder.add("Shape", names.PATH)
    sequences, steps = (
        builder.add("Unsqueeze", builder.count(sizes, axis), builder.ints(1 - axis)) for axis in range(2)
    )
    places = builder.add("Add", builder.add("Unsqueeze", names.PENDING_OFFSET, builder.ints(1)), steps)  # [B, T]
    pairs = [builder.add("Unsqueeze", x, axes) for x in (builder.add("Expand", sequences, sizes), places)]
    target = builder.add("Concat", *pairs, axis=2)  # [B, T, 2]
    # Not by TensorScatter: TensorRT supports it only for KV buffers of four axes.
    builder.add("ScatterND", names.PENDING_FEATURES, target, rows, output=names.present(names.PENDING_FEATURES))
    return builder.model(
        names.STEP_GATHER_FEATURES, signatures.gather_features_inputs(shape), signatures.gather_features_outputs(shape)
    )


def _store_trees() -> ir.Model:
    builder = _Builder()
    add = builder.add
    drafted = add("Unsqueeze", add("Cast", names.DRAFTED, to=onnx.TensorProto.BOOL), builder.ints(1))  # [B, 1]
    for tree, stored in ((names.TREE_TOKENS, names.STORED_TOKENS), (names.TREE_PARENTS, names.STORED_PARENTS)):
        space = add("Shape", stored, start=1, end=2)  # [1]: S
        padded = add("Concat", tree, add("Sub", stored, stored), axis=1)  # K nodes, then S children of the root
        first = add("Slice", padded, builder.ints(0), space, builder.ints(1))
        add("Where", drafted, first, stored, output=names.present(stored))
    return builder.model(names.STEP_STORE_TREES, signatures.store_trees_inputs(), signatures.store_trees_outputs())


def _copy_slot(name: str, state: tuple[TensorSpec, ...]) -> ir.Model:
    builder = _Builder()
    target = builder.add("Unsqueeze", names.TARGET_SLOT, builder.ints(1))  # [1, 1]
    for spec in state:
        rows = builder.add("Gather", spec.name, names.SOURCE_SLOT, axis=0)
        builder.add("ScatterND", spec.name, target, rows, output=names.present(spec.name))
    return builder.model(name, signatures.copy_slot_inputs(state), signatures.in_place(state))


class _Builder:
    """A graph built node by node. Tracing these few nodes with torch would take seconds of every build."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []

    def add(self, kind: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Append a node. Returns its output's name."""
        name = output or f"{kind}.{len(self._nodes)}"
        self._nodes.append(onnx.helper.make_node(kind, inputs, [name], **attributes))
        return name

    def add_all(self, kind: str, inputs: tuple[str, ...], count: int, **attributes: Any) -> list[str]:
        """Append a node with several outputs. Returns their names."""
        outputs = [f"{kind}.{len(self._nodes)}.{place}" for place in range(count)]
        self._nodes.append(onnx.helper.make_node(kind, inputs, outputs, **attributes))
        return outputs

    def ints(self, *values: int) -> str:
        """Return a constant int64 vector."""
        return self.add("Constant", value_ints=values)

    def count(self, sizes: str, axis: int) -> str:
        """Return 0, 1, … up to the size of an axis, which `sizes` holds."""
        end = self.add("Squeeze", self.add("Gather", sizes, self.ints(axis)))
        zero, one = (self.add("Constant", value_int=value) for value in range(2))
        return self.add("Range", zero, end, one)

    def real(self, value: float) -> str:
        """Return a constant float32 without axes."""
        return self.add("Constant", value_float=value)

    def model(self, name: str, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> ir.Model:
        """Return the finished graph with its signature."""
        graph = onnx.helper.make_graph(self._nodes, name, list(map(_value, inputs)), list(map(_value, outputs)))
        opsets = [onnx.helper.make_opsetid("", tracing.OPSET)]
        return ir.from_proto(onnx.helper.make_model(graph, opset_imports=opsets))


def _value(spec: TensorSpec) -> onnx.ValueInfoProto:
    kind = getattr(onnx.TensorProto, _ONNX_TYPES[spec.dtype])
    return onnx.helper.make_tensor_value_info(spec.name, kind, spec.shape)
