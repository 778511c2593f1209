"""Lower the portable verifier graph to ONNX Runtime's fused CPU kernels, for one sequence.

    redraft::TreeAttention        -> com.microsoft.GroupQueryAttention, the tree as an additive bias
    Split, RotaryEmbedding x 2    -> inside it, where nothing else reads them
    Add, RMSNormalization         -> com.microsoft.SkipSimplifiedLayerNormalization

GroupQueryAttention takes several new rows over a past in batches of one only, so the portable graph stays beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import replace_nodes_and_values
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    RemoveUnusedFunctionsPass,
    RemoveUnusedNodesPass,
    TopologicalSortPass,
)

from redraft import names
from redraft.engines.bundle import single_draft_outputs, single_sequence
from redraft.engines.manifest import GraphRecord

_MICROSOFT = "com.microsoft"
_HIDDEN = np.float32(-1e30)
"""Added to the score of a row that a node must not see. Finite, so that a sum with it stays a number."""

_ROTARY_MULTIPLE = 16
"""Head sizes that the kernel rotates."""


def lower_single(folder: Path, portable: GraphRecord) -> GraphRecord | None:
    """Write `folder`/verifier.single.onnx, the lowered form of the graph `portable` there; weights are shared.

    Returns its record, or None, with nothing written, where a layer of the model does not fit the kernel.
    """
    model = ir.load(folder / portable.file)
    attentions = _attentions(model)
    if not attentions or not all(_fits(node) for node in attentions):
        return None
    _fix_batch(model.graph)
    masks = _Masks(model.graph)
    for node in attentions:
        _lower_attention(model.graph, node, masks)
    record = GraphRecord(
        f"{names.VERIFIER_SINGLE}.onnx", single_sequence(portable.inputs), single_sequence(portable.outputs)
    )
    return _save(model, folder, record)


def lower_draft(folder: Path, portable: GraphRecord, name: str) -> GraphRecord | None:
    """Write `folder`/`name`.onnx, the lowered form of a drafter's graph; otherwise as `lower_single`.

    Its rows are a causal chain, row r of the KV holding position r, so the kernel needs no mask and no positions. Every
    node after the first writes to the buffers where they are: an output of its own, in place of the same input.
    """
    model = ir.load(folder / portable.file)
    attentions = _attentions(model)
    if not attentions or not all(_fits(node) for node in attentions):
        return None
    _fix_batch(model.graph)
    for number, node in enumerate(attentions):
        fused = _lower_attention(model.graph, node, _Chain(model.graph, node))
        _write_in_place(model.graph, fused, number, last=node is attentions[-1])
    outputs = single_draft_outputs(portable.outputs, len(attentions))
    return _save(model, folder, GraphRecord(f"{name}.onnx", single_sequence(portable.inputs), outputs))


def _attentions(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == names.TREE_ATTENTION]


def _save(model: ir.Model, folder: Path, record: GraphRecord) -> GraphRecord:
    for node in [node for node in model.graph if node.op_type == "RMSNormalization"]:
        _fuse_residual(model.graph, node)
    model.opset_imports[_MICROSOFT] = 1
    tidies = (RemoveUnusedNodesPass, RemoveUnusedFunctionsPass, TopologicalSortPass, CommonSubexpressionEliminationPass)
    for tidy in tidies:
        tidy()(model)
    ir.save(model, folder / record.file)
    return record


def _write_in_place(graph: ir.Graph, fused: ir.Node, number: int, last: bool) -> None:
    """Let a node of a chain of updates read the graph's own buffers and give what it wrote as an output over them.

    A chain of in-place updates through inner values would be copies: only the graph's inputs and outputs are bound.
    """
    caches = {value.name: value for value in graph.inputs}
    for place, name in ((3, names.key_cache(0)), (4, names.value_cache(0))):
        cache, written = caches[name], fused.outputs[place - 2]
        fused.replace_input_with(place, cache)
        if last:
            continue
        written.name = f"{names.present(name)}.{number}"
        written.shape, written.type = cache.shape, cache.type
        graph.outputs.append(written)


def _head_dim(node: ir.Node) -> int:
    cache = node.inputs[3]
    head_dim = cache.shape[3] if cache is not None and cache.shape is not None else 0
    return head_dim if isinstance(head_dim, int) else 0


def _fits(node: ir.Node) -> bool:
    """Whether the kernel takes this layer: head sizes in multiples of 8."""
    return _head_dim(node) % 8 == 0


def _fix_batch(graph: ir.Graph) -> None:
    for value in (*graph.inputs, *graph.outputs):
        if value.shape is not None:
            value.shape = ir.Shape([1 if dim == "B" else dim for dim in value.shape])


class _Masks:
    """What every layer's attention shares: row counts, and an additive bias for each window.

    The kernel takes its own positions instead of ours where the total equals T, that is with no rows live; so the
    total is one more than `live`, a column that no row reaches, except in a full cache.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._inputs = {value.name: value for value in graph.inputs}
        self._first = graph[0]
        self._count = 0
        self._biases: dict[tuple[int, int], ir.Value] = {}
        live, past = self._inputs[names.LIVE], self._inputs[names.PAST_LEN]
        one = self._constant([1])
        capacity = self._node("Shape", [self._inputs[names.key_cache(0)]], start=2, end=3)
        self._total = self._node("Min", [self._node("Add", [live, one]), capacity])
        self.total = self._node("Cast", [self._total], to=ir.DataType.INT32)
        self.last = self._node("Cast", [self._node("Sub", [live, one])], to=ir.DataType.INT32)
        spare = self._node("Sub", [self._total, live])
        self._pads = self._node("Concat", [self._constant([0, 0, 0]), past, self._constant([0, 0, 0]), spare], axis=0)
        self.positions = self._inputs[names.POSITIONS]

    def bias(self, window: int, chunk: int) -> ir.Value:
        """Added to the scores, float32 [1, 1, T, total]: 0 for an ancestor or a committed row in window and chunk."""
        if (window, chunk) not in self._biases:
            self._biases[window, chunk] = self._near(window, chunk) if window or chunk else self._tree()
        return self._biases[window, chunk]

    def _tree(self) -> ir.Value:
        zero = self._constant(np.zeros((1, 1, 1, 1), np.float32))
        new = self._node("Where", [self._inputs[names.TREE_MASK], zero, self._constant(_HIDDEN)])
        return self._node("Pad", [new, self._pads])

    def _near(self, window: int, chunk: int) -> ir.Value:
        """A committed row's position is its number; a new row's is its node's."""
        scalar = self._constant(np.array(0))
        past = self._node("Squeeze", [self._inputs[names.PAST_LEN]])
        committed = self._node("Range", [scalar, past, self._constant(np.array(1))])
        committed = self._node("Unsqueeze", [committed, self._constant([0])])
        rows = self._node("Concat", [committed, self.positions, self._constant([[0]])], axis=1)
        rows = self._node("Slice", [rows, self._constant([0]), self._total, self._constant([1])])  # [1, total]
        queries = self._node("Unsqueeze", [self.positions, self._constant([2])])  # [1, T, 1]
        bias = self.bias(0, 0)
        if window:
            distance = self._node("Sub", [queries, rows])  # [1, T, total]
            near = self._node("Less", [distance, self._constant(np.array(window))])
            bias = self._node("Where", [near, bias, self._constant(_HIDDEN)])
        if chunk:
            size = self._constant(np.array(chunk))
            near = self._node("Equal", [self._node("Div", [queries, size]), self._node("Div", [rows, size])])
            bias = self._node("Where", [near, bias, self._constant(_HIDDEN)])
        return bias

    def _constant(self, values: object) -> ir.Value:
        self._count += 1
        return _initializer(self._graph, f"single.constant.{self._count}", values)

    def _node(self, op: str, inputs: list[ir.Value], **attributes: int) -> ir.Value:
        self._count += 1
        node = ir.node(op, inputs, attributes)
        node.outputs[0].name = f"single.{op.lower()}.{self._count}"
        self._graph.insert_before(self._first, node)
        return node.outputs[0]


class _Chain:
    """Row counts of one node whose rows follow its past in order: what `_Masks` is for trees."""

    positions = None

    def __init__(self, graph: ir.Graph, node: ir.Node) -> None:
        self._graph, self._node = graph, node
        past, positions = node.inputs[7], node.inputs[6]
        one = _initializer(graph, f"{node.outputs[0].name}.one", [1])
        if positions is not None and positions.shape is not None and positions.shape[1] == 1:
            total, last = self._added("Add", [past, one]), past
        else:
            total = self._added("Add", [past, self._added("Shape", [positions], start=1, end=2)])
            last = self._added("Sub", [total, one])
        self.total, self.last = (self._added("Cast", [rows], to=ir.DataType.INT32) for rows in (total, last))

    def bias(self, window: int, chunk: int) -> None:
        """None is added: later rows come later."""

    def _added(self, op: str, inputs: list[ir.Value | None], **attributes: int) -> ir.Value:
        node = ir.node(op, inputs, attributes)
        node.outputs[0].name = f"{self._node.outputs[0].name}.{op.lower()}.{len(self._graph)}"
        self._graph.insert_before(self._node, node)
        return node.outputs[0]


def _initializer(graph: ir.Graph, name: str, values: object) -> ir.Value:
    value = ir.Value(name=name, const_value=ir.tensor(np.asarray(values)))
    graph.register_initializer(value)
    return value


def _lower_attention(graph: ir.Graph, node: ir.Node, masks: _Masks | _Chain) -> ir.Node:
    q, k, v, key_cache, value_cache = node.inputs[:5]
    heads = {name: node.attributes[name].as_int() for name in ("q_heads", "kv_heads", "window")}
    attributes: dict[str, Any] = {
        "num_heads": heads["q_heads"],
        "kv_num_heads": heads["kv_heads"],
        "scale": node.attributes["scale"].as_float(),
        "softcap": node.attributes["softcap"].as_float(),
    }
    source: tuple[ir.Value | None, ...] = (q, k, v)
    tables: tuple[ir.Value | None, ...] = (None, None, None)
    packed = _packed_rotary(node) if _head_dim(node) % _ROTARY_MULTIPLE == 0 else None
    if packed is not None:
        qkv, rotary = packed
        source, tables = (qkv, None, None), (*rotary.inputs[1:3], masks.positions)
        attributes |= {"do_rotary": 1, "rotary_interleaved": _attribute(rotary, "interleaved", 0)}
    bias, sinks = masks.bias(heads["window"], _attribute(node, "chunk", 0)), node.inputs[names.TREE_ATTENTION_INPUTS :]
    fused = ir.node(
        "GroupQueryAttention",
        [*source, key_cache, value_cache, masks.last, masks.total, *tables, bias, *sinks],
        attributes,
        domain=_MICROSOFT,
        num_outputs=3,
    )
    replace_nodes_and_values(graph, node, [node], [fused], node.outputs, fused.outputs)
    return fused


def _packed_rotary(node: ir.Node) -> tuple[ir.Value, ir.Node] | None:
    """The packed q, k, v before Split, and q's rotation, where both rotations are the kernel's own and only for it."""
    q, k, v = node.inputs[:3]
    rotated = [value.producer() if value is not None else None for value in (q, k)]
    first, second = rotated
    if first is None or second is None or any(r.op_type != "RotaryEmbedding" for r in (first, second)):
        return None
    split = v.producer() if v is not None else None
    whole = (
        split is not None
        and split.op_type == "Split"
        and (first.inputs[0], second.inputs[0], v) == tuple(split.outputs)
        and all(len(value.uses()) == 1 for value in (*split.outputs, q, k) if value is not None)
    )
    same = all(a is b for a, b in zip(first.inputs[1:], second.inputs[1:], strict=True))
    plain = all(_attribute(r, "rotary_embedding_dim", 0) == 0 for r in (first, second))
    packed = split.inputs[0] if split is not None else None
    if packed is None or not (whole and same and plain and first.inputs[3] is node.inputs[6]):
        return None
    return packed, first


def _fuse_residual(graph: ir.Graph, norm: ir.Node) -> None:
    """Add, then RMSNormalization over the last axis: one node that gives the sum and its norm.

    A bias or a scalar in place of a whole summand is left alone: the kernel takes summands of [B, T, n] only.
    """
    total = norm.inputs[0]
    add = total.producer() if total is not None else None
    if total is None or add is None or add.op_type != "Add" or _attribute(norm, "axis", -1) != -1:
        return
    if any(x is not None and x.shape is not None and x.shape.rank() != 3 for x in add.inputs):
        return
    epsilon = norm.attributes["epsilon"].as_float() if "epsilon" in norm.attributes else 1e-5
    fused = ir.node(
        "SkipSimplifiedLayerNormalization",
        [*add.inputs, norm.inputs[1]],
        {"epsilon": epsilon},
        domain=_MICROSOFT,
        num_outputs=4,
    )
    for unused in fused.outputs[1:3]:
        unused.name = ""
    normed, _, _, summed = fused.outputs
    replace_nodes_and_values(graph, norm, [norm, add], [fused], [norm.outputs[0], total], [normed, summed])


def _attribute(node: ir.Node, name: str, default: int) -> int:
    return node.attributes[name].as_int() if name in node.attributes else default
