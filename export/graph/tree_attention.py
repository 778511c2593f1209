"""`redraft::TreeAttention`: redraft's only operator in exported graphs, defined in torch and in ONNX.

    out, present_key, present_value = TreeAttention(
        q, k, v, key_cache, value_cache, tree_mask, positions, cache_len, kv_len, sinks)

    q            [B, T, Hq * D]     rotated queries of the T tree nodes
    k, v         [B, T, Hkv * D]    rotated keys, and values, of the same nodes
    key_cache    [B, Hkv, C, D]     rows 0 .. cache_len - 1 are committed; others are undefined
    value_cache  [B, Hkv, C, D]     the caches may have another type than q, k and v; in fp16 alone, they saturate
    tree_mask    bool [B, T, T]     node j is i itself or an ancestor of i; in a drafter's block, a later row too
    positions    int64 [B, T]       position of every node in its sequence
    cache_len    int64 [B]          committed rows before the call; row r < cache_len holds position r
    kv_len       int64 [1]          largest cache_len + T: rows to read, whatever C is
    sinks        [Hq]               optional: each head's score of one more key, without a value
    out          [B, T, Hq * D]
    present_*    the caches with k and v written to rows cache_len .. cache_len + T - 1;
                                    in place when run. out is computed from rows as the caches hold them

Attributes:

    scale              multiplies the scores
    softcap            c > 0 replaces a score s by c * tanh(s / c)
    window             w > 0 hides keys at position p from a query at position q if q - p >= w
    chunk              c > 0 hides keys at position p from a query at position q if p // c < q // c
    q_heads, kv_heads  query head h reads key head h * kv_heads // q_heads
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

from redraft.names import LARGEST_HALF, TREE_ATTENTION, TREE_ATTENTION_DOMAIN

OPSET = Opset(TREE_ATTENTION_DOMAIN, 1)
INPUTS = ("q", "k", "v", "key_cache", "value_cache", "tree_mask", "positions", "cache_len", "kv_len")
SINKS = "sinks"
"""The optional last input."""
OUTPUTS = ("out", "present_key", "present_value")
ATTRIBUTES = dict.fromkeys(("scale", "softcap"), "FLOAT") | dict.fromkeys(
    ("window", "chunk", "q_heads", "kv_heads"), "INT"
)


@torch.library.custom_op("redraft::tree_attention", mutates_args=())
def tree_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    cache_len: torch.Tensor,
    kv_len: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float,
    window: int,
    chunk: int,
    q_heads: int,
    kv_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the operator in torch: the reference for tests of the ONNX body."""
    batch, nodes, _ = q.shape
    groups = q_heads // kv_heads
    caches = []
    for cache, new in ((key_cache, k), (value_cache, v)):
        rows = cache.clone()
        for b, past in enumerate(cache_len.tolist()):
            rows[b, :, past : past + nodes] = new[b].reshape(nodes, kv_heads, -1).transpose(0, 1)
        caches.append(rows)
    read = int(kv_len.item())
    keys, values = (cache[:, :, :read].repeat_interleave(groups, dim=1) for cache in caches)
    queries = q.reshape(batch, nodes, q_heads, -1).transpose(1, 2)
    scores = queries @ keys.transpose(2, 3) * scale  # [B, Hq, T, S]
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    visible = _visible(tree_mask, positions, cache_len, read, window, chunk)
    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(batch, -1, nodes, 1)], -1)
    out = (scores.softmax(-1)[..., :read] @ values).transpose(1, 2).reshape(batch, nodes, -1)
    return out, caches[0], caches[1]


def _visible(
    tree_mask: torch.Tensor, positions: torch.Tensor, cache_len: torch.Tensor, read: int, window: int, chunk: int
) -> torch.Tensor:
    """Return True for each of the first `read` rows that a node sees, bool [B, T, read]."""
    batch, nodes = positions.shape
    rows = torch.arange(read)
    visible = (rows < cache_len[:, None])[:, None].repeat(1, nodes, 1)
    row_positions = rows.repeat(batch, 1)
    for b, past in enumerate(cache_len.tolist()):
        visible[b, :, past : past + nodes] = tree_mask[b]
        row_positions[b, past : past + nodes] = positions[b]
    if window > 0:
        visible &= positions[:, :, None] - row_positions[:, None] < window
    if chunk > 0:
        visible &= positions[:, :, None] // chunk == row_positions[:, None] // chunk
    return visible


tree_attention.register_fake(lambda q, k, v, *caches: (torch.empty_like(q), *map(torch.empty_like, caches[:2])))


# The ONNX bodies. Layers with equal windows have the same mask. After inlining, common-subexpression elimination
# computes it once a call.


@script(OPSET, default_opset=op)
def TreeRows(tree_mask, positions, cache_len, kv_len):  # type: ignore[no-untyped-def]
    """Committed rows and ancestors of each node, bool [B, T, kv_len]."""
    rows = op.Range(op.Constant(value_int=0), op.Squeeze(kv_len), op.Constant(value_int=1))
    past = op.Unsqueeze(cache_len, op.Constant(value_ints=[1, 2]))
    committed = op.Less(op.Unsqueeze(rows, op.Constant(value_ints=[0, 1])), past)
    base = op.Expand(committed, op.Concat(op.Shape(positions), kv_len, axis=0))
    return op.TensorScatter(base, tree_mask, cache_len, axis=2)


@script(OPSET, default_opset=op)
def RowPositions(positions, cache_len, kv_len):  # type: ignore[no-untyped-def]
    """Position of every row, int64 [B, 1, kv_len]."""
    rows = op.Range(op.Constant(value_int=0), op.Squeeze(kv_len), op.Constant(value_int=1))
    base = op.Expand(rows, op.Concat(op.Shape(cache_len), kv_len, axis=0))
    return op.Unsqueeze(op.TensorScatter(base, positions, cache_len, axis=1), op.Constant(value_ints=[1]))


@script(OPSET, default_opset=op)
def TreeMask(tree_mask, positions, cache_len, kv_len, window: int, chunk: int):  # type: ignore[no-untyped-def]
    """True for rows that each node sees, bool [B, 1, T, kv_len], in a model without windows."""
    return op.Unsqueeze(TreeRows(tree_mask, positions, cache_len, kv_len), op.Constant(value_ints=[1]))


@script(OPSET, default_opset=op)
def WindowedTreeMask(tree_mask, positions, cache_len, kv_len, window: int, chunk: int):  # type: ignore[no-untyped-def]
    """The same in a model with windows. `window` 0 hides no more rows."""
    query_positions = op.Unsqueeze(positions, op.Constant(value_ints=[2]))
    distance = op.Sub(query_positions, RowPositions(positions, cache_len, kv_len))
    near = op.Or(op.Less(distance, window), op.Equal(window, op.Constant(value_int=0)))
    visible = op.And(TreeRows(tree_mask, positions, cache_len, kv_len), near)
    return op.Unsqueeze(visible, op.Constant(value_ints=[1]))


@script(OPSET, default_opset=op)
def ChunkedTreeMask(tree_mask, positions, cache_len, kv_len, window: int, chunk: int):  # type: ignore[no-untyped-def]
    """The same in a model with chunks. `chunk` 0 hides no more rows."""
    size = op.Max(chunk, op.Constant(value_int=1))
    query_chunks = op.Div(op.Unsqueeze(positions, op.Constant(value_ints=[2])), size)
    row_chunks = op.Div(RowPositions(positions, cache_len, kv_len), size)
    near = op.Or(op.Equal(query_chunks, row_chunks), op.Equal(chunk, op.Constant(value_int=0)))
    windowed = WindowedTreeMask(tree_mask, positions, cache_len, kv_len, window, chunk)
    return op.And(windowed, op.Unsqueeze(near, op.Constant(value_ints=[1])))


@script(OPSET, default_opset=op)
def SplitHeads(q, q_heads: int):  # type: ignore[no-untyped-def]
    """[B, T, Hq * D] -> [B, Hq, T, D]."""
    rest = op.Constant(value_ints=[-1])
    shape = op.Concat(op.Constant(value_ints=[0, 0]), op.Reshape(q_heads, rest), rest, axis=0)
    return op.Transpose(op.Reshape(q, shape), perm=[0, 2, 1, 3])


@script(OPSET, default_opset=op)
def WriteRows(k, cache, cache_len, kv_heads: int):  # type: ignore[no-untyped-def]
    """The cache with the new rows k [B, T, Hkv * D] written."""
    return op.TensorScatter(cache, op.CastLike(SplitHeads(k, kv_heads), cache), cache_len, axis=2)


@script(OPSET, default_opset=op)
def WriteRowsInHalf(k, cache, cache_len, kv_heads: int):  # type: ignore[no-untyped-def]
    """The same in a cache in fp16 of rows in fp32, which saturate."""
    limit = op.Constant(value_float=LARGEST_HALF)
    rows = op.Clip(SplitHeads(k, kv_heads), op.Neg(limit), limit)
    return op.TensorScatter(cache, op.CastLike(rows, cache), cache_len, axis=2)


@script(OPSET, default_opset=op)
def LiveRows(cache, kv_len, q):  # type: ignore[no-untyped-def]
    """The first `kv_len` rows of a cache, in the type of q."""
    return op.CastLike(op.Slice(cache, op.Constant(value_ints=[0]), kv_len, op.Constant(value_ints=[2])), q)


@script(OPSET, default_opset=op)
def MergeHeads(attended):  # type: ignore[no-untyped-def]
    """[B, Hq, T, D] -> [B, T, Hq * D]."""
    return op.Reshape(op.Transpose(attended, perm=[0, 2, 1, 3]), op.Constant(value_ints=[0, 0, -1]))


@script(OPSET, default_opset=op)
def TreeAttention(  # type: ignore[no-untyped-def]
    q, k, v, key_cache, value_cache, tree_mask, positions, cache_len, kv_len,
    scale: float, softcap: float, window: int, chunk: int, q_heads: int, kv_heads: int,
):  # fmt: skip
    """Write the new rows in place, read the first `kv_len` rows, and attend under the tree's mask."""
    present_key = WriteRows(k, key_cache, cache_len, kv_heads)
    present_value = WriteRows(v, value_cache, cache_len, kv_heads)
    visible = TreeMask(tree_mask, positions, cache_len, kv_len, window, chunk)
    attended, _key, _value, _scores = op.Attention(
        SplitHeads(q, q_heads), LiveRows(present_key, kv_len, q), LiveRows(present_value, kv_len, q), visible,
        scale=scale, softcap=softcap,
    )  # fmt: skip
    return MergeHeads(attended), present_key, present_value


@script(OPSET, default_opset=op)
def WithSink(rows):  # type: ignore[no-untyped-def]
    """Rows [B, Hkv, S, D] and one more of zeros."""
    return op.Pad(rows, op.Constant(value_ints=[0, 0, 0, 0, 0, 0, 1, 0]))


@script(OPSET, default_opset=op)
def SinkTreeAttention(  # type: ignore[no-untyped-def]
    q, k, v, key_cache, value_cache, tree_mask, positions, cache_len, kv_len, sinks,
    scale: float, softcap: float, window: int, chunk: int, q_heads: int, kv_heads: int,
):  # fmt: skip
    """The same with sinks: a last key of zeros, to which the mask adds its score, and a value of zeros."""
    present_key = WriteRows(k, key_cache, cache_len, kv_heads)
    present_value = WriteRows(v, value_cache, cache_len, kv_heads)
    visible = TreeMask(tree_mask, positions, cache_len, kv_len, window, chunk)
    zero = op.CastLike(op.Constant(value_float=0.0), sinks)
    hidden = op.CastLike(op.Constant(value_float=float("-inf")), sinks)
    scores = op.Where(visible, zero, hidden)
    column = op.Reshape(sinks, op.Constant(value_ints=[1, -1, 1, 1]))
    heads = op.Add(scores, op.Mul(column, zero))
    last = op.Add(op.Mul(op.CastLike(op.Unsqueeze(positions, op.Constant(value_ints=[1, 3])), sinks), zero), column)
    keys, values = LiveRows(present_key, kv_len, q), LiveRows(present_value, kv_len, q)
    attended, _key, _value, _scores = op.Attention(
        SplitHeads(q, q_heads), WithSink(keys), WithSink(values), op.Concat(heads, last, axis=3),
        scale=scale, softcap=softcap,
    )  # fmt: skip
    return MergeHeads(attended), present_key, present_value


def _schema() -> defs.OpSchema:
    floats, integers, booleans = "T", "tensor(int64)", "tensor(bool)"
    types = dict.fromkeys(INPUTS, floats) | dict.fromkeys(("positions", "cache_len", "kv_len"), integers)
    types["tree_mask"] = booleans
    return defs.OpSchema(
        TREE_ATTENTION,
        TREE_ATTENTION_DOMAIN,
        1,
        inputs=[
            *(defs.OpSchema.FormalParameter(name, types[name]) for name in INPUTS),
            defs.OpSchema.FormalParameter(SINKS, floats, param_option=defs.OpSchema.FormalParameterOption.Optional),
        ],
        outputs=[defs.OpSchema.FormalParameter(name, floats) for name in OUTPUTS],
        type_constraints=[(floats, ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], "")],
        attributes=[
            defs.OpSchema.Attribute(name, getattr(defs.OpSchema.AttrType, kind)) for name, kind in ATTRIBUTES.items()
        ],
    )


_NODE = Op(OPSET, TREE_ATTENTION, _schema())


def emit(*operands: Any) -> Any:
    """Translate the torch operator for `torch.onnx.export` into one node."""
    count = len(INPUTS)
    sinks = () if operands[count] is None else operands[count : count + 1]
    return _NODE(*operands[:count], *sinks, **dict(zip(ATTRIBUTES, operands[count + 1 :], strict=True)))


def bodies(
    windowed: bool, chunked: bool = False, sinks: bool = False, half: bool = False
) -> list[onnx.FunctionProto]:  # fmt: skip
    """Return the function bodies of a model, each before its callers, as some readers of ONNX require.

    windowed, chunked, sinks: True if any of its layers has a window, chunks, sinks.
    half: True if its caches alone are in fp16.
    """
    mask = ChunkedTreeMask if chunked else WindowedTreeMask if windowed else TreeMask
    masks = [RowPositions] * (windowed or chunked) + [WindowedTreeMask] * chunked
    write = WriteRowsInHalf if half else WriteRows
    helpers = [TreeRows, *masks, mask, SplitHeads, write, LiveRows, MergeHeads, *[WithSink] * sinks]
    protos = [body.to_function_proto() for body in (*helpers, SinkTreeAttention if sinks else TreeAttention)]
    protos[helpers.index(mask)].name = TreeMask.name
    protos[helpers.index(write)].name = WriteRows.name
    protos[-1].name = TREE_ATTENTION
    return protos


def add_bodies(model: ir.Model) -> None:
    """Append the function bodies that the model's TreeAttention nodes need."""
    nodes = [node for node in model.graph.all_nodes() if node.op_type == TREE_ATTENTION]
    windowed, chunked = (any(node.attributes[name].as_int() > 0 for node in nodes) for name in ("window", "chunk"))
    sinks = any(len(node.inputs) > len(INPUTS) for node in nodes)
    types = [[value.dtype for value in node.inputs if value is not None] for node in nodes]
    half = any(ir.DataType.FLOAT16 == own[3] != own[0] for own in types)
    for proto in bodies(windowed, chunked, sinks, half):
        function = ir.serde.deserialize_function(proto)
        model.functions[function.identifier()] = function
    model.opset_imports[TREE_ATTENTION_DOMAIN] = 1
