"""`redraft::TreeAttention` in operators that TensorRT has: TensorScatter for the KV buffers, Attention under a mask.

The operator's own body puts the tree into the mask by TensorScatter, which TensorRT knows for KV buffers only. Here row
r of the mask is looked up: before `cache_len` it is committed, from there on it is node r - cache_len.

TensorScatter becomes TensorRT's KV update, which writes to the memory of an input, once for each buffer. A drafter's
chain adds single rows, each with attention to those before it. These rows are joined to the buffer, not written to it.
Rows of the buffer count up to the place of the second node's rows. From there on the buffer is unchanged, so a later
call must begin there or earlier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from redraft import names
from redraft.engines.tensorrt.expand import Rewriter
from redraft.engines.tensorrt.operators import Release, of_rtx
from redraft.engines.tensorrt.target import check_native
from redraft.errors import BackendError

DECOMPOSABLE = "TRT_decomposable"
"""Attribute of TensorRT's parser: attention may become several layers."""


def lower_attention(graph: str, model: ir.Model, release: Release) -> None:
    """Replace every TreeAttention node in place. Raises BackendError for a node that TensorRT cannot compute."""
    nodes = [node for node in model.graph if node.op_type == names.TREE_ATTENTION]
    if nodes:
        check_native(release)
    buffers = {id(value) for value in model.graph.inputs}
    single = any(value.dtype == ir.DataType.FLOAT for node in nodes for value in node.inputs[3:5] if value is not None)
    visible: dict[int, ir.Value] = {}
    chains: dict[int, _Chain] = {}
    for node in nodes:
        _check(graph, node, release)
        if id(node.inputs[3]) in buffers:
            chain = _lower(Rewriter(model.graph, node), node, visible)
            chains[id(chain.presents[0])] = chain
        else:
            _follow(graph, Rewriter(model.graph, node), node, chains.get(id(node.inputs[3])), release)
    if single:
        for node in model.graph:
            if node.op_type == "Attention":  # TensorRT has no fused kernel for float32, but builds the parts if it may
                node.attributes[DECOMPOSABLE] = ir.AttrInt64(DECOMPOSABLE, 1)


def fix_capacity(model: ir.Model, rows: int) -> None:
    """Give the KV buffers a fixed number of rows, as TensorRT's KV update wants them."""
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.shape is not None:
            value.shape = ir.Shape([rows if str(dim) == "C" else dim for dim in value.shape])


def lower_keep(model: ir.Model) -> None:
    """Declare the last axis of the compaction graph's indices, which an Expand makes, as 1.

    TensorRT gathers rows by indices whose last axis is fixed when an engine is built.
    """
    for node in [node for node in model.graph if node.op_type == "GatherND"]:
        to, batch_dims = Rewriter(model.graph, node), node.attributes["batch_dims"].as_int()
        single = to.node("Reshape", [node.inputs[1], to.constant([*[0] * batch_dims, -1, 1])])
        to.replace(to.node("GatherND", [node.inputs[0], single], batch_dims=batch_dims))


@dataclass(eq=False)
class _Chain:
    """A node over KV buffers, and the single rows that follow it.

    presents:   the buffers after it, keys and values.   joined: rows read from each, then the later rows.
    cache_len:  first row of the latest node.            seen:   masks of the buffer, then of each later row.
    """

    presents: list[ir.Value]
    joined: list[list[ir.Value]]
    kv_len: ir.Value
    cache_len: ir.Value
    seen: list[ir.Value]


def _instead(release: Release, without: str) -> str:
    """Return a hint: the plugin, if there is one, or a build without something."""
    return f"build {without}" if of_rtx(release) else f"build with --attention plugin, or {without}"


def _check(graph: str, node: ir.Node, release: Release) -> None:
    if node.attributes["softcap"].as_float() > 0:
        raise BackendError(
            f"{_called(graph, node)} with a softcap, which TensorRT's own attention lacks",
            _instead(release, "with --backend onnxruntime"),
        )


def _called(graph: str, node: ir.Node) -> str:
    return f"{graph}: node {node.name or node.outputs[0].name!r} is {names.TREE_ATTENTION}"


def _lower(to: Rewriter, node: ir.Node, visible: dict[int, ir.Value]) -> _Chain:
    q, k, v, key_cache, value_cache, tree_mask, positions, cache_len, kv_len = node.inputs
    kv_heads, window = (node.attributes[name].as_int() for name in ("kv_heads", "window"))
    if window not in visible:
        visible[window] = _visible(to, tree_mask, positions, cache_len, kv_len, window)
    presents = [
        to.node("TensorScatter", [cache, _heads(to, new, kv_heads), cache_len], axis=-2)
        for cache, new in ((key_cache, k), (value_cache, v))
    ]
    rows = [to.node("Slice", [present, to.constant([0]), kv_len, to.constant([2])]) for present in presents]
    to.replace(_attend(to, node, q, rows, visible[window]), *presents)
    assert kv_len is not None
    assert cache_len is not None
    return _Chain(presents, [[read] for read in rows], kv_len, cache_len, [])


def _follow(graph: str, to: Rewriter, node: ir.Node, chain: _Chain | None, release: Release) -> None:
    """Add one more row of a chain: it sees the committed rows of the buffer, the rows after them, and itself."""
    q, k, v, key_cache, value_cache, tree_mask, _, cache_len, _ = node.inputs
    caches = [id(cache) for cache in (key_cache, value_cache)]
    if chain is None or caches != [id(present) for present in chain.presents] or not _continues(node, chain):
        raise BackendError(
            f"{_called(graph, node)} over a KV buffer that another node wrote, and not its next row; TensorRT itself "
            "updates only those of inputs",
            _instead(release, "without the drafter (--drafter none)"),
        )
    kv_heads = node.attributes["kv_heads"].as_int()
    if not chain.seen:
        chain.seen.append(_committed(to, chain.kv_len, cache_len))
    chain.seen.append(to.node("Unsqueeze", [tree_mask, to.constant([1])]))
    assert cache_len is not None
    chain.cache_len = cache_len
    for joined, new in zip(chain.joined, (k, v), strict=True):
        joined.append(_heads(to, new, kv_heads))
    rows = [to.node("Concat", joined, axis=2) for joined in chain.joined]  # [B, H_kv, live + rows that followed, D]
    to.replace(_attend(to, node, q, rows, to.node("Concat", chain.seen, axis=3)), *chain.presents)


def _continues(node: ir.Node, chain: _Chain) -> bool:
    """Return True if a node adds one row, without a window, right after the rows of the node before it."""
    k, cache_len = node.inputs[1], node.inputs[7]
    single = k is not None and k.shape is not None and k.shape[1] == 1
    added = cache_len.producer() if cache_len is not None else None
    if not single or node.attributes["window"].as_int() or added is None or added.op_type != "Add":
        return False
    before, rows = added.inputs
    if before is not chain.cache_len or rows is None:
        return False
    count = ir.convenience.get_const_tensor(rows)
    # The caller decides how many rows of the first node count. Each later node adds one row.
    return not chain.seen or (count is not None and count.numpy().reshape(-1).tolist() == [1])


def _attend(to: Rewriter, node: ir.Node, q: ir.Value | None, rows: list[ir.Value], visible: ir.Value) -> Any:
    """Return [B, T, Hq * D] from keys and values [B, H_kv, S, D] under the mask [B, 1, T, S]."""
    heads, scale = node.attributes["q_heads"].as_int(), node.attributes["scale"].as_float()
    attended = to.node("Attention", [_heads(to, q, heads), *rows, visible], scale=scale)
    return to.node("Reshape", [to.node("Transpose", [attended], perm=[0, 2, 1, 3]), to.constant([0, 0, -1])])


def _committed(to: Rewriter, kv_len: ir.Value, cache_len: ir.Value | None) -> Any:
    """Return rows of the buffer before `cache_len`, bool [B, 1, 1, live]."""
    rows = to.node("Unsqueeze", [_rows(to, kv_len), to.constant([0])])
    before = to.node("Less", [rows, to.node("Unsqueeze", [cache_len, to.constant([1])])])
    return to.node("Unsqueeze", [before, to.constant([1, 2])])


def _rows(to: Rewriter, kv_len: ir.Value | None) -> Any:
    """Return 0 … live - 1."""
    return to.node("Range", [to.constant(0), to.node("Squeeze", [kv_len, to.constant([0])]), to.constant(1)])


def _heads(to: Rewriter, rows: ir.Value | None, heads: int) -> Any:
    """Return [B, T, H * D] as [B, H, T, D]."""
    return to.node("Transpose", [to.node("Reshape", [rows, to.constant([0, 0, heads, -1])])], perm=[0, 2, 1, 3])


def _visible(
    to: Rewriter, tree_mask: ir.Value | None, positions: ir.Value | None, cache_len: ir.Value | None,
    kv_len: ir.Value | None, window: int,
) -> Any:  # fmt: skip
    """Return rows that each node sees, bool [B, 1, T, live]."""
    zero, one = to.constant(0), to.constant(1)
    rows = _rows(to, kv_len)
    past = to.node("Unsqueeze", [cache_len, to.constant([1])])  # [B, 1]
    place = to.node("Sub", [to.node("Unsqueeze", [rows, to.constant([0])]), past])  # [B, live]: the node of a row
    nodes = to.node("Shape", [positions], start=1, end=2)  # [1]: T
    inside = to.node("And", [to.node("Not", [to.node("Less", [place, zero])]), to.node("Less", [place, nodes])])
    node = to.node("Max", [to.node("Min", [place, to.node("Sub", [nodes, one])]), zero])  # [B, live]
    shape = to.node("Concat", [to.node("Shape", [positions]), kv_len], axis=0)
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
    """Return [B, live] for all nodes: [B, 1, live]."""
    return to.node("Unsqueeze", [rows, to.constant([1])])
