"""`redraft::TreeAttention`: the one operator of ours in an exported graph, with its meaning in torch and in ONNX.

    out, present_key, present_value = TreeAttention(
        q, k, v, key_cache, value_cache, tree_mask, positions, past_len, live)

    q            [B, T, Hq * D]     rotated queries of the T tree nodes
    k, v         [B, T, Hkv * D]    rotated keys, and values, of the same nodes
    key_cache    [B, Hkv, C, D]     rows 0 .. past_len - 1 are live; the rest is garbage
    value_cache  [B, Hkv, C, D]
    tree_mask    bool [B, T, T]     node j is i itself or an ancestor of i
    positions    int64 [B, T]       position of every node in its sequence
    past_len     int64 [B]          live rows before the call; row r < past_len holds position r
    live         int64 [1]          largest past_len + T: rows that are read, whatever the capacity C
    out          [B, T, Hq * D]
    present_*    the caches with k and v written to rows past_len .. past_len + T - 1; the same buffer when run in place

Attributes: `scale` multiplies the scores; `softcap` c > 0 replaces a score s by c * tanh(s / c); `window` w > 0 hides
keys at position p from a query at position q where q - p >= w; `q_heads`, `kv_heads`. Query head h reads key head
h * kv_heads // q_heads.
"""

from __future__ import annotations

from typing import Any

import onnx
import onnx_ir as ir
import torch
from onnx import defs
from onnxscript import script
from onnxscript.onnx_opset import opset24 as op
from onnxscript.values import Op, Opset

from redraft.names import TREE_ATTENTION, TREE_ATTENTION_DOMAIN

OPSET = Opset(TREE_ATTENTION_DOMAIN, 1)
INPUTS = ("q", "k", "v", "key_cache", "value_cache", "tree_mask", "positions", "past_len", "live")
OUTPUTS = ("out", "present_key", "present_value")
ATTRIBUTES = {"scale": "FLOAT", "softcap": "FLOAT", "window": "INT", "q_heads": "INT", "kv_heads": "INT"}


@torch.library.custom_op("redraft::tree_attention", mutates_args=())
def tree_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    past_len: torch.Tensor,
    live: torch.Tensor,
    scale: float,
    softcap: float,
    window: int,
    q_heads: int,
    kv_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operator's meaning in torch: the reference that the ONNX body is tested against."""
    batch, nodes, _ = q.shape
    groups = q_heads // kv_heads
    caches = []
    for cache, new in ((key_cache, k), (value_cache, v)):
        rows = cache.clone()
        for b, past in enumerate(past_len.tolist()):
            rows[b, :, past : past + nodes] = new[b].reshape(nodes, kv_heads, -1).transpose(0, 1)
        caches.append(rows)
    read = int(live.item())
    keys, values = (cache[:, :, :read].repeat_interleave(groups, dim=1) for cache in caches)
    queries = q.reshape(batch, nodes, q_heads, -1).transpose(1, 2)
    scores = queries @ keys.transpose(2, 3) * scale  # [B, Hq, T, S]
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    visible = _visible(tree_mask, positions, past_len, read, window)
    probabilities = scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1)
    out = (probabilities @ values).transpose(1, 2).reshape(batch, nodes, -1)
    return out, caches[0], caches[1]


def _visible(
    tree_mask: torch.Tensor, positions: torch.Tensor, past_len: torch.Tensor, read: int, window: int
) -> torch.Tensor:
    """Which of the first `read` rows each node sees, bool [B, T, read]."""
    batch, nodes = positions.shape
    rows = torch.arange(read)
    visible = (rows < past_len[:, None])[:, None].repeat(1, nodes, 1)
    row_positions = rows.repeat(batch, 1)
    for b, past in enumerate(past_len.tolist()):
        visible[b, :, past : past + nodes] = tree_mask[b]
        row_positions[b, past : past + nodes] = positions[b]
    if window > 0:
        visible &= positions[:, :, None] - row_positions[:, None] < window
    return visible


@tree_attention.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(key_cache), torch.empty_like(value_cache)


# The ONNX bodies. The mask is the same in every layer of one window, so that common-subexpression elimination after
# inlining computes it once a call.


@script(OPSET, default_opset=op)
def TreeRows(tree_mask, positions, past_len, live):  # type: ignore[no-untyped-def]
    """Committed rows and ancestors of each node, bool [B, T, live]."""
    rows = op.Range(op.Constant(value_int=0), op.Squeeze(live), op.Constant(value_int=1))
    past = op.Unsqueeze(past_len, op.Constant(value_ints=[1, 2]))
    committed = op.Less(op.Unsqueeze(rows, op.Constant(value_ints=[0, 1])), past)
    base = op.Expand(committed, op.Concat(op.Shape(positions), live, axis=0))
    return op.TensorScatter(base, tree_mask, past_len, axis=2)


@script(OPSET, default_opset=op)
def TreeMask(tree_mask, positions, past_len, live, window: int):  # type: ignore[no-untyped-def]
    """Rows that each node sees, bool [B, 1, T, live], in a model without windows."""
    return op.Unsqueeze(TreeRows(tree_mask, positions, past_len, live), op.Constant(value_ints=[1]))


@script(OPSET, default_opset=op)
def WindowedTreeMask(tree_mask, positions, past_len, live, window: int):  # type: ignore[no-untyped-def]
    """The same in a model with windows; `window` 0 hides nothing more."""
    zero = op.Constant(value_int=0)
    rows = op.Range(zero, op.Squeeze(live), op.Constant(value_int=1))
    base = op.Expand(rows, op.Concat(op.Shape(past_len), live, axis=0))
    row_positions = op.TensorScatter(base, positions, past_len, axis=1)
    query_positions = op.Unsqueeze(positions, op.Constant(value_ints=[2]))
    distance = op.Sub(query_positions, op.Unsqueeze(row_positions, op.Constant(value_ints=[1])))
    near = op.Or(op.Less(distance, window), op.Equal(window, zero))
    visible = op.And(TreeRows(tree_mask, positions, past_len, live), near)
    return op.Unsqueeze(visible, op.Constant(value_ints=[1]))


@script(OPSET, default_opset=op)
def TreeAttention(  # type: ignore[no-untyped-def]
    q, k, v, key_cache, value_cache, tree_mask, positions, past_len, live,
    scale: float, softcap: float, window: int, q_heads: int, kv_heads: int,
):  # fmt: skip
    """Write the new rows in place, read the live ones, attend under the tree's mask."""
    keep = op.Constant(value_ints=[0, 0])
    rest = op.Constant(value_ints=[-1])
    zero = op.Constant(value_ints=[0])
    rows_axis = op.Constant(value_ints=[2])
    kv_shape = op.Concat(keep, op.Reshape(kv_heads, rest), rest, axis=0)
    q_shape = op.Concat(keep, op.Reshape(q_heads, rest), rest, axis=0)
    new_key = op.Transpose(op.Reshape(k, kv_shape), perm=[0, 2, 1, 3])
    new_value = op.Transpose(op.Reshape(v, kv_shape), perm=[0, 2, 1, 3])
    present_key = op.TensorScatter(key_cache, new_key, past_len, axis=2)
    present_value = op.TensorScatter(value_cache, new_value, past_len, axis=2)
    queries = op.Transpose(op.Reshape(q, q_shape), perm=[0, 2, 1, 3])
    keys = op.Slice(present_key, zero, live, rows_axis)
    values = op.Slice(present_value, zero, live, rows_axis)
    visible = TreeMask(tree_mask, positions, past_len, live, window)
    attended, _key, _value, _scores = op.Attention(queries, keys, values, visible, scale=scale, softcap=softcap)
    out = op.Reshape(op.Transpose(attended, perm=[0, 2, 1, 3]), op.Concat(keep, rest, axis=0))
    return out, present_key, present_value


def _schema() -> defs.OpSchema:
    floats, integers, booleans = "T", "tensor(int64)", "tensor(bool)"
    types = dict.fromkeys(INPUTS, floats) | dict.fromkeys(("positions", "past_len", "live"), integers)
    types["tree_mask"] = booleans
    return defs.OpSchema(
        TREE_ATTENTION,
        TREE_ATTENTION_DOMAIN,
        1,
        inputs=[defs.OpSchema.FormalParameter(name, types[name]) for name in INPUTS],
        outputs=[defs.OpSchema.FormalParameter(name, floats) for name in OUTPUTS],
        type_constraints=[(floats, ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], "")],
        attributes=[
            defs.OpSchema.Attribute(name, getattr(defs.OpSchema.AttrType, kind)) for name, kind in ATTRIBUTES.items()
        ],
    )


_NODE = Op(OPSET, TREE_ATTENTION, _schema())


def emit(*operands: Any) -> Any:
    """Translation of the torch operator for `torch.onnx.export`: the bare node."""
    count = len(INPUTS)
    return _NODE(*operands[:count], **dict(zip(ATTRIBUTES, operands[count:], strict=True)))


def bodies(windowed: bool) -> list[onnx.FunctionProto]:
    """The function bodies of a model with or without windows, each before its callers, as some readers want them."""
    rows, mask, attention = (
        body.to_function_proto() for body in (TreeRows, WindowedTreeMask if windowed else TreeMask, TreeAttention)
    )
    mask.name = TreeMask.name
    return [rows, mask, attention]


def add_bodies(model: ir.Model) -> None:
    """Append the function bodies that the model's TreeAttention nodes need."""
    nodes = [node for node in model.graph.all_nodes() if node.op_type == TREE_ATTENTION]
    for proto in bodies(any(node.attributes["window"].as_int() > 0 for node in nodes)):
        function = ir.serde.deserialize_function(proto)
        model.functions[function.identifier()] = function
    model.opset_imports[TREE_ATTENTION_DOMAIN] = 1
