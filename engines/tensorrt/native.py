"""`redraft::TreeAttention` in operators that TensorRT has: TensorScatter for the KV buffers, Attention under a mask.

The operator's own body puts the tree into the mask by TensorScatter, which TensorRT knows for KV buffers only. Here row
r of the mask is looked up: before `past_len` it is committed, from there on it is node r - past_len.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from redraft import names
from redraft.engines.tensorrt.operators import SINCE, Release
from redraft.engines.tensorrt.rewrite import Rewriter
from redraft.errors import BackendError

_STALE_ROWS = ((11, 1), (11, 2))
"""Releases whose own attention was seen to read rows of a KV buffer that are not live."""
_PLUGIN = "build with --attention plugin"


def lower_attention(graph: str, model: ir.Model, release: Release) -> None:
    """Replace every TreeAttention node in place. Raises BackendError for what TensorRT's own layers do not compute."""
    nodes = [node for node in model.graph if node.op_type == names.TREE_ATTENTION]
    if nodes and release < SINCE["TensorScatter"]:
        raise BackendError(
            f"TensorRT {_text(release)} has no KV update of its own", f"{_PLUGIN}, or use 10.15 or newer"
        )
    if nodes and release in _STALE_ROWS:
        raise BackendError(
            f"TensorRT {_text(release)} may read rows of KV buffers that are not live", f"{_PLUGIN}, or another version"
        )
    inputs = {id(value) for value in model.graph.inputs}
    visible: dict[int, ir.Value] = {}
    for node in nodes:
        _check(graph, node, inputs)
        _lower(Rewriter(model.graph, node), node, visible)


def _check(graph: str, node: ir.Node, inputs: set[int]) -> None:
    called = f"{graph}: node {node.name or node.outputs[0].name!r} is {names.TREE_ATTENTION}"
    if node.attributes["softcap"].as_float() > 0:
        raise BackendError(f"{called} with a softcap, which TensorRT's own attention has not", _PLUGIN)
    if id(node.inputs[3]) not in inputs:
        raise BackendError(
            f"{called} over a KV buffer that another node wrote; TensorRT itself updates those of inputs only",
            f"{_PLUGIN}, or without the drafter (--lyanna none)",
        )


def _lower(to: Rewriter, node: ir.Node, visible: dict[int, ir.Value]) -> None:
    q, k, v, key_cache, value_cache, tree_mask, positions, past_len, live = node.inputs
    q_heads, kv_heads, window = (node.attributes[name].as_int() for name in ("q_heads", "kv_heads", "window"))
    if window not in visible:
        visible[window] = _visible(to, tree_mask, positions, past_len, live, window)
    presents = [
        to.node("TensorScatter", [cache, _heads(to, new, kv_heads), past_len], axis=-2)
        for cache, new in ((key_cache, k), (value_cache, v))
    ]
    keys, values = (
        to.node("Slice", [present, to.constant([0]), live, to.constant([2])]) for present in presents
    )  # [B, H_kv, live, D]
    scale = node.attributes["scale"].as_float()
    attended = to.node("Attention", [_heads(to, q, q_heads), keys, values, visible[window]], scale=scale)
    rows = to.node("Transpose", [attended], perm=[0, 2, 1, 3])
    to.replace(to.node("Reshape", [rows, to.constant([0, 0, -1])]), *presents)


def _heads(to: Rewriter, rows: ir.Value | None, heads: int) -> Any:
    """[B, T, H * D] as [B, H, T, D]."""
    return to.node("Transpose", [to.node("Reshape", [rows, to.constant([0, 0, heads, -1])])], perm=[0, 2, 1, 3])


def _visible(
    to: Rewriter, tree_mask: ir.Value | None, positions: ir.Value | None, past_len: ir.Value | None,
    live: ir.Value | None, window: int,
) -> Any:  # fmt: skip
    """Rows that each node sees, bool [B, 1, T, live]."""
    zero, one = to.constant(0), to.constant(1)
    rows = to.node("Range", [zero, to.node("Squeeze", [live, to.constant([0])]), one])
    past = to.node("Unsqueeze", [past_len, to.constant([1])])  # [B, 1]
    place = to.node("Sub", [to.node("Unsqueeze", [rows, to.constant([0])]), past])  # [B, live]: the node of a row
    nodes = to.node("Shape", [positions], start=1, end=2)  # [1]: T
    inside = to.node("And", [to.node("Not", [to.node("Less", [place, zero])]), to.node("Less", [place, nodes])])
    node = to.node("Max", [to.node("Min", [place, to.node("Sub", [nodes, one])]), zero])  # [B, live]
    shape = to.node("Concat", [to.node("Shape", [positions]), live], axis=0)
    wide = to.node("Expand", [to.node("Unsqueeze", [node, to.constant([1])]), shape])  # [B, T, live]
    seen = to.node("And", [to.node("GatherElements", [tree_mask, wide], axis=2), _over(to, inside)])
    committed = _over(to, to.node("Less", [place, zero]))
    visible = to.node("Or", [seen, committed])
    if window:
        row_positions = to.node("GatherElements", [positions, node], axis=1)
        row_positions = to.node("Where", [inside, row_positions, to.node("Unsqueeze", [rows, to.constant([0])])])
        queries = to.node("Unsqueeze", [positions, to.constant([2])])
        near = to.node("Less", [to.node("Sub", [queries, _over(to, row_positions)]), to.constant(window, np.int64)])
        visible = to.node("And", [visible, near])
    return to.node("Unsqueeze", [visible, to.constant([1])])


def _over(to: Rewriter, rows: ir.Value) -> Any:
    """[B, live] for all nodes: [B, 1, live]."""
    return to.node("Unsqueeze", [rows, to.constant([1])])


def _text(release: Release) -> str:
    return ".".join(map(str, release))
