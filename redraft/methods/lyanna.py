"""Lyanna: drafts from a chain of predicted hidden states, and resampling of the steps that a verification left unused.

Chen et al., "Make Every Draft Count: Hidden State based Speculative Decoding". The draft graph catches up on the rows
since the last draft, unrolls the chain and builds the tree (Algorithm 1). The resample graph builds a new tree from the
unused logits (Algorithm 2).

Symbols: N steps of the chain, k children of a node, K nodes of the tree with its root, H tokens of the draft
vocabulary, d rank of the token information. `redraft.signatures`, `redraft.methods.base` and `.chains` have the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from redraft import names
from redraft.methods import chains
from redraft.methods.base import BuildOptions, GraphSpec, Method
from redraft.methods.chains import (
    ChainShape,
    chain_logits,
    chain_state,
    describe_vocabulary,
    draft_graph,
    draft_integers,
    draft_vocabulary_tables,
    sampling_inputs,
    tree_limits,
    tree_outputs,
)
from redraft.names import DRAFT, RESAMPLE, Dtype, TensorSpec
from redraft.records import PositiveInt

TokenInfo = Literal["fp16", "int8", "fp8", "lowrank"]
"""Form of token information: a normalized table of E·W1·W2 in one of three types, or its two factors."""
UNION = "union"
TOKEN_INFO_INDEX = f"{names.TOKEN_INFO}index"
MOST_STEPS = 64
"""Largest number of steps of a chain. While a draft runs, their rows are beyond the context."""
LARGE_VOCABULARY, FREQUENT_TOKENS = 40_000, 32_768
"""A drafter with a larger whole vocabulary is built with a draft vocabulary of so many tokens by default."""


@dataclass(frozen=True)
class LyannaBuild(BuildOptions):
    """Options for building a drafter.

    steps:            hidden states of a chain; None takes the number that the drafter was trained for.
    width:            children of a node, and nodes expanded at each level.
    nodes:            largest tree of a draft, without its root.
    resample_nodes:   largest resampled tree, without its root; None takes `redraft.methods.base.resampled_nodes`.
    token_info:       a table in fp16, int8 or fp8, or its two low-rank factors.

    A whole vocabulary of more than LARGE_VOCABULARY tokens is drafted from FREQUENT_TOKENS by default (§6.1).
    """

    steps: PositiveInt | None = None
    width: PositiveInt = 4
    nodes: PositiveInt = 32
    resample_nodes: PositiveInt | None = None
    token_info: TokenInfo = "fp16"


@dataclass(frozen=True)
class LyannaOptions:
    """Options at run time.

    resample:  True to resample the steps that a verification left unused, in place of the next fresh draft. UNION also
               drafts anew in the same step, and verifies both trees as one, within the budget. Trees of a device and
               candidates that were drawn (`Draws`) are not merged, so there UNION is like True.
    threshold: r; resample if more than r steps remain (Algorithm 2).
    """

    resample: Literal[True, False, "union"] = True
    threshold: Annotated[int, 0, "a number of steps from 0"] = 0


@dataclass(frozen=True)
class LyannaShape(ChainShape):
    """Sizes of the drafter's graphs and buffers.

    width: k, children of a node and nodes expanded at each level.   nodes: K, root included.
    resample_nodes: largest number of nodes of a resampled tree, root included.
    draft_vocabulary: H.   rank: d, of the low-rank form.   draft_logit_scale: factor on the logits.
    head_rank: see `BuildOptions`; 0 for none.   dtype: of features and KV, the verifier's.
    """

    width: PositiveInt
    nodes: PositiveInt
    resample_nodes: PositiveInt
    token_info: TokenInfo
    draft_vocabulary: PositiveInt
    rank: PositiveInt
    draft_logit_scale: float = 1.0
    head_rank: int = 0
    dtype: Dtype = "float32"


def token_info_tables(shape: LyannaShape) -> tuple[TensorSpec, ...]:
    """Return the inputs that hold token information, bound once from a file.

    The token of column i of the logits adds `table[i, j]` to column j, times `scales[i]` if the table is int8 or fp8.
    An fp8 table holds float8 E4M3 as bytes, since ONNX's Gather does not take that type. The factors of the low-rank
    form include the normalization: row i of `left` times column j of `right` is `table[i, j]`.

    If the draft vocabulary is not the whole one, row H is for all other tokens: the mean of their rows. `index[t]` is
    the row of token t then.
    """
    columns = shape.draft_vocabulary
    pruned = columns < shape.vocabulary
    rows = columns + pruned
    specs: tuple[TensorSpec, ...]
    if shape.token_info == "lowrank":
        specs = (
            TensorSpec(f"{names.TOKEN_INFO}left", "float32", (rows, shape.rank)),
            TensorSpec(f"{names.TOKEN_INFO}right", "float32", (shape.rank, columns)),
        )
    elif shape.token_info == "fp16":
        specs = (TensorSpec(f"{names.TOKEN_INFO}table", "float16", (rows, columns)),)
    else:
        dtype: Dtype = "int8" if shape.token_info == "int8" else "uint8"
        specs = (
            TensorSpec(f"{names.TOKEN_INFO}table", dtype, (rows, columns)),
            TensorSpec(f"{names.TOKEN_INFO}scales", "float32", (rows, 1)),
        )
    return (*specs, TensorSpec(TOKEN_INFO_INDEX, "int64", (shape.vocabulary,))) if pruned else specs


def tables(shape: LyannaShape) -> tuple[TensorSpec, ...]:
    """Return all inputs that are bound once from a file."""
    return (*token_info_tables(shape), *draft_vocabulary_tables(shape))


def draft_inputs(shape: LyannaShape) -> tuple[TensorSpec, ...]:
    """Return inputs of the draft graph, in order. Its output `chain_logits` has no token information."""
    return chains.draft_inputs(shape, tables(shape))


def resample_inputs(shape: LyannaShape) -> tuple[TensorSpec, ...]:
    """Return inputs of the resample graph. `tokens[b]` was verified last; `first_step[b]` counts used steps, from 1."""
    return (
        chain_logits(shape),
        TensorSpec(names.FIRST_STEP, "int64", ("B",)),
        TensorSpec(names.TOKENS, "int64", ("B",)),
        *sampling_inputs(shape.steps - 1),
        *tables(shape),
    )


def resample_outputs(shape: LyannaShape) -> tuple[TensorSpec, ...]:
    """Return outputs of the resample graph; `tree.count[b]` nodes are real, fewer the later the first step."""
    return (*tree_outputs(shape.resample_nodes), TensorSpec(names.TREE_COUNT, "int64", ("B",)))


def _integers(shape: LyannaShape) -> Mapping[str, tuple[int, int]]:
    return {
        names.FIRST_STEP: (1, max(1, shape.steps - 1)),
        TOKEN_INFO_INDEX: (0, shape.draft_vocabulary),
        **draft_integers(shape),
    }


def _looked_up(shape: LyannaShape, levels: int, nodes: int) -> Mapping[str, int]:
    """Return rows of tables that a tree reads.

    Token information: the root's row, and k for each later level. Tokens: of all nodes but the root.
    """
    rows = 1 + (levels - 1) * shape.width
    info = {f"{names.TOKEN_INFO}{name}": rows for name in ("table", "scales", "left")}
    return {**info, TOKEN_INFO_INDEX: 1, names.DRAFT_VOCABULARY: nodes - 1}


METHOD: Method[LyannaShape] = Method(
    id="lyanna",
    hidden_states=(names.LAST_HIDDEN_STATE,),
    rows="all",
    graphs={
        DRAFT: replace(
            draft_graph(lambda shape: _looked_up(shape, shape.steps, shape.nodes)),
            inputs=draft_inputs,
            integers=_integers,
        ),
        RESAMPLE: GraphSpec(
            resample_inputs,
            resample_outputs,
            exists=lambda shape: shape.steps > 1,
            integers=_integers,
            looked_up=lambda shape: _looked_up(shape, shape.steps - 1, shape.resample_nodes),
        ),
    },
    shape=LyannaShape,
    state=chain_state,
    spare_rows=names.CATCH_UP_ROWS + MOST_STEPS,
    tables=tables,
    limits=tree_limits,
    describe=lambda shape: (
        f"{shape.steps} steps, {shape.width} wide, {shape.nodes - 1} nodes, {shape.resample_nodes - 1} resampled, "
        f"token information in {shape.token_info}{describe_vocabulary(shape)}"
    ),
    options=LyannaOptions,
    build_options=LyannaBuild,
)
