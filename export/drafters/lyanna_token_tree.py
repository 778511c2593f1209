"""Token-info sampling and resampling (Lyanna, Algorithms 1 and 2) as an operator of graphs, and its ONNX translation.

    columns, parents, log_probs = token_tree(step_logits, scale, drawn, used, rows, tables)

    step_logits [B, S, H]     logits of the steps of a tree, with noise, without token information
    scale       float32 [B]   factor on the sum of logits and token information
    drawn       int64 [B]     1 if the nodes' log probabilities are their ranks' (`methods.chains.sampling_inputs`)
    used        int64 [B]     how many of the last steps to leave out (0 in a fresh draft)
    rows        int64 [B]     row of token information of the last verified token
    tables                    those of `methods.lyanna.token_info_tables`, without the index
    columns, parents, log_probs [B, K]: the root, then the most probable nodes in order; a node's parent
    comes before it; nodes that do not exist have log probability IMPOSSIBLE and come last

A node's token is that of its column in the logits, which is also its row of token information. The root's column is its
row.

The noise of a position is the same after all nodes of a level, so it is added to the logits of the step.

A level has the `width` most probable children of each expanded node. The `width` most probable nodes of a level expand.

Written node by node in ONNX, it has a third fewer nodes than its trace, and each costs a microsecond of a small model's
draft. `tests/export/drafters/token_tree.py` is the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset24 as op

from redraft.export.drafters.level_tree import CERTAIN, IMPOSSIBLE, LESS
from redraft.export.graph import tracing
from redraft.methods.chains import DRAWN_LOG_PROB, whole_tree
from redraft.methods.lyanna_token_info import FP8


@torch.library.custom_op("redraft::token_tree", mutates_args=())
def token_tree(
    step_logits: torch.Tensor, scale: torch.Tensor, drawn: torch.Tensor, used: torch.Tensor, rows: torch.Tensor,
    tables: list[torch.Tensor], width: int, nodes: int, whole: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Stand for the operator in a trace, which calls only `register_fake`'s shapes."""
    raise NotImplementedError("redraft::token_tree runs in exported graphs only")


@token_tree.register_fake
def _(
    step_logits: torch.Tensor, scale: torch.Tensor, drawn: torch.Tensor, used: torch.Tensor, rows: torch.Tensor,
    tables: list[torch.Tensor], width: int, nodes: int, whole: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    batch = step_logits.shape[0]
    whole_numbers = rows.new_empty(batch, nodes)
    return whole_numbers, rows.new_empty(batch, nodes), step_logits.new_empty(batch, nodes)


def emit_token_tree(
    step_logits: Any, scale: Any, drawn: Any, used: Any, rows: Any, tables: Sequence[Any], width: int, nodes: int,
    whole: bool,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Translate for `torch.onnx.export`: every level unrolled, all sequences at once."""
    steps = int(step_logits.shape[1])
    splits = op.Split(step_logits, axis=1, num_outputs=steps) if steps > 1 else (step_logits,)
    root_column = op.Unsqueeze(rows, _ints([1]))  # [B, 1]
    factor = op.Unsqueeze(scale, _ints([1, 2]))  # [B, 1, 1]
    by_rank = op.Unsqueeze(op.Greater(drawn, op.Constant(value_int=0)), _ints([1, 2]))
    of_ranks = op.Constant(value_floats=[DRAWN_LOG_PROB * (rank + 1) for rank in range(width)])
    zeros = op.Sub(root_column, root_column)
    frontier, joint, places = root_column, op.CastLike(zeros, step_logits), zeros
    columns, parents, joints = [root_column], [op.Add(zeros, _ints([whole_tree(steps, width)]))], [joint]
    for step, logits in enumerate(splits):
        log_probs = op.LogSoftmax(op.Mul(op.Add(logits, _emit_lookup(tables, frontier)), factor), axis=-1)  # [B, W, H]
        best, chosen = op.TopK(log_probs, _ints([width]))  # [B, W, k]
        best = op.Where(by_rank, of_ranks, best)
        above = op.Unsqueeze(joint, _ints([2]))  # [B, W, 1]
        most = op.Add(op.Mul(above, op.Constant(value_float=LESS)), op.Constant(value_float=CERTAIN))
        likely = op.Max(op.Min(op.Add(above, best), most), op.Constant(value_float=IMPOSSIBLE))
        reached = op.Reshape(likely, _ints([0, -1]))  # [B, W * k]
        chosen = op.Reshape(chosen, _ints([0, -1]))
        siblings = 1 if step == 0 else width
        columns.append(chosen)
        parents.append(op.Gather(places, _ints([node for node in range(siblings) for _ in range(width)]), axis=1))
        joints.append(reached)
        if step + 1 < steps:
            offset = _ints([whole_tree(step, width)])
            joint, going_on = op.TopK(reached, _ints([width]))
            frontier, places = op.GatherElements(chosen, going_on, axis=1), op.Add(going_on, offset)
    every = [op.Concat(*parts, axis=1) for parts in (columns, parents, joints)]
    if not whole:
        every[2] = op.Add(every[2], _beyond(used, steps, width))
    return _emit_top_nodes(every[0], every[1], every[2], nodes, zeros, whole_tree(steps, width))


def _emit_lookup(tables: Sequence[Any], rows: Any) -> Any:
    """Return rows [B, W] of token information: float32 [B, W, H]."""
    values = op.Gather(tables[0], rows)  # [B, W, H]
    if len(tables) == 1:
        values = op.Cast(values, to=ir.DataType.FLOAT)
    elif tables[1].shape[1] == 1:
        values = op.Mul(_emit_decoded(values, tables[0]), op.Gather(tables[1], rows))
    else:
        values = op.MatMul(values, tables[1])
    return values


def _emit_decoded(codes: Any, table: Any) -> Any:
    """Return int8 codes, or bytes of float8 E4M3, as float32. ONNX cannot compute with such bytes."""
    if table.dtype != ir.DataType.UINT8:
        return op.Cast(codes, to=ir.DataType.FLOAT)
    decoded = op.Constant(value_floats=FP8.tolist())
    return op.Gather(decoded, op.Cast(codes, to=ir.DataType.INT32))


def _beyond(used: Any, steps: int, width: int) -> Any:
    """Return 0 if a node's step counts, IMPOSSIBLE if it is one of the last `used`: float32 [B, nodes of the tree]."""
    steps_left = [steps + 1] + [steps - step for step in range(steps) for _ in range(width if step == 0 else width**2)]
    counts = op.Less(op.Unsqueeze(used, _ints([1])), _ints(steps_left))
    return op.Where(counts, op.Constant(value_float=0.0), op.Constant(value_float=IMPOSSIBLE))


def _emit_top_nodes(
    columns: Any, parents: Any, joints: Any, nodes: int, zeros: Any, total: int
) -> tuple[Any, Any, Any]:
    """Return the most probable of `total` nodes in order. A parent is likelier than its children, so it precedes them.

    zeros: int64 [B, 1].
    """
    best, order = op.TopK(joints, _ints([nodes]))  # [B, K]
    unranked = op.Add(zeros, _ints([0] * total + [-1]))  # [B, total + 1]: the last is the root's parent
    ranks = op.ScatterElements(unranked, order, op.Add(zeros, _ints(list(range(nodes)))), axis=1)
    parents = op.GatherElements(ranks, op.GatherElements(parents, order, axis=1), axis=1)
    return op.GatherElements(columns, order, axis=1), parents, best


TRANSLATIONS = {**tracing.TRANSLATIONS, torch.ops.redraft.token_tree.default: emit_token_tree}
"""The translations of graphs that have the operator."""


def _ints(values: list[int]) -> Any:
    return op.Constant(value_ints=values)
