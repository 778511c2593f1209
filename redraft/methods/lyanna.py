"""Lyanna: drafts from a chain of predicted hidden states, and resampling of the steps that a verification left unused.

Chen et al., "Make Every Draft Count: Hidden State based Speculative Decoding". The draft graph catches up on the rows
since the last draft, unrolls the chain and builds the tree (Algorithm 1). The resample graph builds a new tree from the
unused logits (Algorithm 2).

Symbols: N steps of the chain, k children of a node, K nodes of the tree with its root, H hot tokens, d rank of the
token information. `redraft.signatures` and `redraft.methods.base` have the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from redraft import names
from redraft.methods.base import BuildOptions, GraphSpec, Method, TreeLimits
from redraft.methods.chains import DRAFT_PROFILES, chain_inputs, chain_state, chain_updates, tree_outputs
from redraft.names import DRAFT, RESAMPLE, Dtype, TensorSpec
from redraft.records import PositiveInt

TokenInfo = Literal["fp16", "int8", "fp8", "lowrank"]
"""Form of token information: a normalized table of E·W1·W2 in one of three types, or its two factors."""
MOST_STEPS = 64
"""Largest number of steps of a chain. While a draft runs, their rows are beyond the context."""


@dataclass(frozen=True)
class LyannaBuild(BuildOptions):
    """Options for building a drafter.

    steps:       hidden states of a chain; None takes the number that the drafter was trained for.
    width:       children of a node, and nodes expanded at each level.
    nodes:       largest tree of a draft, without its root.
    token_info:  a table in fp16, int8 or fp8, or its two low-rank factors.
    hot_tokens:  tokens that have token information if the vocabulary is larger than `prune_above` (§6.1).
    """

    steps: PositiveInt | None = None
    width: PositiveInt = 4
    nodes: PositiveInt = 32
    token_info: TokenInfo = "fp16"
    hot_tokens: PositiveInt = 32_768
    prune_above: PositiveInt = 40_000


@dataclass(frozen=True)
class LyannaOptions:
    """Options at run time.

    resample:  True to resample the steps that a verification left unused.
    threshold: r; resample if more than r steps remain (Algorithm 2).
    """

    resample: bool = True
    threshold: Annotated[int, 0, "a number of steps"] = 0


@dataclass(frozen=True)
class LyannaShape:
    """Sizes of the drafter's graphs and buffers.

    steps: N.   width: k, children of a node and nodes expanded at each level.   nodes: K, root included.
    hot:   H, the most frequent tokens, which have token information; the vocabulary's size if all have.
    rank:  d, of the low-rank form.   dtype: of features and KV, the verifier's.
    """

    hidden: PositiveInt
    vocabulary: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    steps: PositiveInt
    width: PositiveInt
    nodes: PositiveInt
    token_info: TokenInfo
    hot: PositiveInt
    rank: PositiveInt
    dtype: Dtype = "float32"


def token_info_tables(shape: LyannaShape) -> tuple[TensorSpec, ...]:
    """Return the inputs that hold token information, bound once from a file.

    Hot token i adds `table[i, j]` to the logit of hot token j, times `scales[i]` if the table is int8 or fp8. An fp8
    table holds float8 E4M3 as bytes, since ONNX's Gather does not take that type. If not every token is hot, row H and
    column H of the table are zero, and `index[t]` is token t's row, or H for a cold token. The factors of the low-rank
    form include the normalization: row i of `left` times column j of `right` is `table[i, j]`.
    """
    rows = shape.hot if shape.hot == shape.vocabulary else shape.hot + 1
    specs: tuple[TensorSpec, ...]
    if shape.token_info == "lowrank":
        specs = (
            TensorSpec(f"{names.TOKEN_INFO}left", "float32", (rows, shape.rank)),
            TensorSpec(f"{names.TOKEN_INFO}right", "float32", (shape.rank, rows)),
        )
    elif shape.token_info == "fp16":
        specs = (TensorSpec(f"{names.TOKEN_INFO}table", "float16", (rows, rows)),)
    else:
        dtype: Dtype = "int8" if shape.token_info == "int8" else "uint8"
        specs = (
            TensorSpec(f"{names.TOKEN_INFO}table", dtype, (rows, rows)),
            TensorSpec(f"{names.TOKEN_INFO}scales", "float32", (rows, 1)),
        )
    pruned = (
        () if shape.hot == shape.vocabulary else (TensorSpec(f"{names.TOKEN_INFO}index", "int64", (shape.vocabulary,)),)
    )
    return (*specs, *pruned)


def draft_inputs(shape: LyannaShape) -> tuple[TensorSpec, ...]:
    """Return inputs of the draft graph, in order: see `chain_inputs`."""
    return (*chain_inputs(shape), *token_info_tables(shape))


def draft_outputs(shape: LyannaShape) -> tuple[TensorSpec, ...]:
    """Return outputs of the draft graph, in order.

    `chain_logits[b, i]` are the logits of step i + 1 before token information, times the draft logit scale.
    Resampling reads them.
    """
    return (*tree_outputs(shape.nodes), _chain_logits(shape), *chain_updates(shape))


def resample_inputs(shape: LyannaShape) -> tuple[TensorSpec, ...]:
    """Return inputs of the resample graph. `tokens[b]` was verified last; `first_step[b]` counts used steps, from 1."""
    return (
        _chain_logits(shape),
        TensorSpec(names.FIRST_STEP, "int64", ("B",)),
        TensorSpec(names.TOKENS, "int64", ("B",)),
        *token_info_tables(shape),
    )


def resample_outputs(shape: LyannaShape) -> tuple[TensorSpec, ...]:
    """Return outputs of the resample graph; `tree.count[b]` nodes are real, fewer the later the first step."""
    return (*tree_outputs(resample_nodes(shape)), TensorSpec(names.TREE_COUNT, "int64", ("B",)))


def slot_state(shape: LyannaShape) -> tuple[TensorSpec, ...]:
    """Return the tensors of a slot: KV, logits of the chain, and pending feature rows."""
    *caches, pending = chain_state(shape)
    return (*caches, _chain_logits(shape), pending)


def _chain_logits(shape: LyannaShape) -> TensorSpec:
    return TensorSpec(names.CHAIN_LOGITS, "float32", ("B", shape.steps, shape.vocabulary))


def tree_size(steps: int, width: int) -> int:
    """Return the nodes of a whole tree of Algorithm 1, root included."""
    return 1 + width + (steps - 1) * width * width if steps else 1


def level_width(shape: LyannaShape) -> int:
    """Return the most nodes of a level: after the first level, `width` nodes have `width` children each."""
    return min(shape.width if shape.steps == 1 else shape.width**2, max(shape.nodes - 1, 1))


def resample_nodes(shape: LyannaShape) -> int:
    """Return the largest number of nodes of a resampled tree, which has at least one step fewer than a fresh one."""
    return min(shape.nodes, tree_size(shape.steps - 1, shape.width))


def _integers(shape: LyannaShape) -> Mapping[str, tuple[int, int]]:
    return {names.FIRST_STEP: (1, max(1, shape.steps - 1)), f"{names.TOKEN_INFO}index": (0, shape.hot)}


def _looked_up(shape: LyannaShape, levels: int) -> Mapping[str, int]:
    """Return rows of token information that a tree of `levels` levels reads: the root's, and k for each later level."""
    rows = 1 + (levels - 1) * shape.width
    return {f"{names.TOKEN_INFO}{name}": rows for name in ("table", "scales", "left")}


METHOD: Method[LyannaShape] = Method(
    id="lyanna",
    summary="Lyanna: a chain of predicted hidden states with token information.",
    hidden_states=(names.LAST_HIDDEN_STATE,),
    rows="all",
    graphs={
        DRAFT: GraphSpec(
            draft_inputs,
            draft_outputs,
            profiles=DRAFT_PROFILES,
            integers=_integers,
            looked_up=lambda shape: _looked_up(shape, shape.steps),
            chain_steps=lambda shape: shape.steps,
        ),
        RESAMPLE: GraphSpec(
            resample_inputs,
            resample_outputs,
            exists=lambda shape: shape.steps > 1,
            integers=_integers,
            looked_up=lambda shape: _looked_up(shape, shape.steps - 1),
        ),
    },
    shape=LyannaShape,
    state=slot_state,
    spare_rows=names.CATCH_UP_ROWS + MOST_STEPS,
    tables=token_info_tables,
    limits=lambda shape: TreeLimits(shape.steps, level_width(shape), shape.nodes - 1),
    describe=lambda shape: (
        f"{shape.steps} steps, {shape.width} wide, {shape.nodes - 1} nodes, "
        f"token information of {shape.hot} tokens in {shape.token_info}"
    ),
    options=LyannaOptions,
    build_options=LyannaBuild,
)
