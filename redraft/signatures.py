"""What every graph takes and gives: its inputs and outputs in order, by the shape of the models that it was made for.

Symbols: B sequences in the call, T tokens verified at once, R rows whose logits are wanted, C capacity of the KV
buffers in rows, V vocabulary, n hidden size, H_kv key/value heads, D head size. Of a drafter: M rows that it catches up
on, N steps of its chain, K nodes of its tree (root included), H hot tokens, d rank of the token information.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from redraft import names
from redraft.config import TokenInfo
from redraft.names import Dtype, TensorSpec


@dataclass(frozen=True)
class VerifierShape:
    """What a verifier's buffers need to know of the model. `dtype` is theirs and that of its features."""

    layers: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    max_positions: int
    dtype: Dtype = "float32"


def verifier_inputs(shape: VerifierShape) -> tuple[TensorSpec, ...]:
    """Inputs of the verifier's graph, in order.

    `tree_mask[b, i, j]` is true where node j is i or an ancestor of i (padding rows see only themselves); `cache_len`
    is
    the number of rows already live; `kv_len` is the largest cache_len + T; `output_rows` picks the rows whose logits
    are
    wanted, in 0..T-1.
    """
    return (
        TensorSpec(names.TOKEN_IDS, "int64", ("B", "T")),
        TensorSpec(names.POSITIONS, "int64", ("B", "T")),
        TensorSpec(names.TREE_MASK, "bool", ("B", "T", "T")),
        TensorSpec(names.CACHE_LEN, "int64", ("B",)),
        TensorSpec(names.KV_LEN, "int64", (1,)),
        TensorSpec(names.OUTPUT_ROWS, "int64", ("B", "R")),
        *(TensorSpec(cache, shape.dtype, ("B", shape.kv_heads, "C", shape.head_dim)) for cache in caches(shape)),
    )


def verifier_outputs(shape: VerifierShape, hidden_states: tuple[str, ...]) -> tuple[TensorSpec, ...]:
    """Outputs of the verifier's graph, in order: logits, hidden states, then the KV buffers, updated in place."""
    return (
        TensorSpec(names.LOGITS, "float32", ("B", "R", shape.vocabulary)),
        *(
            TensorSpec(names.hidden_states(hidden_state), shape.dtype, ("B", "T", shape.hidden))
            for hidden_state in hidden_states
        ),
        *(
            TensorSpec(names.present(cache), shape.dtype, ("B", shape.kv_heads, "C", shape.head_dim), in_place_of=cache)
            for cache in caches(shape)
        ),
    )


@dataclass(frozen=True)
class LyannaShape:
    """What the graphs of a Lyanna drafter take and give, and what its buffers need.

    steps: N.   width: k, children of a node and nodes that go on at each level.   nodes: K, root included.
    hot:   H, tokens that have token information, the most frequent ones; the vocabulary where all have.
    rank:  d, of the low-rank form.   dtype: of features and KV, the verifier's.
    """

    hidden: int
    vocabulary: int
    kv_heads: int
    head_dim: int
    steps: int
    width: int
    nodes: int
    token_info: TokenInfo
    hot: int
    rank: int
    dtype: Dtype = "float32"


def token_info_tables(shape: LyannaShape) -> tuple[TensorSpec, ...]:
    """The inputs that hold token information, bound once from a file.

    `table[i, j]` is what hot token i adds to the logit of hot token j, times `scales[i]` where its type is short (fp8
    is held as bytes of float8 E4M3, which ONNX's Gather does not know). Where not every token is hot, row H of the
    table is zero, and so is its column H; `index[t]` is token t's row, H where cold. The low-rank form has the
    normalization in its factors: row i of `left` times column j of `right` is `table[i, j]`.
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


def lyanna_draft_inputs(shape: LyannaShape) -> tuple[TensorSpec, ...]:
    """Inputs of the draft graph, in order.

    Row m of a sequence is a feature at `positions[b, m]` and the token after it; rows from `pending[b]` on are padding.
    The drafter's KV holds `cache_len[b]` rows before them, row r of position r; `kv_len` is the largest cache_len + M.
    """
    cache = ("B", shape.kv_heads, "C", shape.head_dim)
    return (
        TensorSpec(names.FEATURE_ROWS, shape.dtype, ("B", "M", shape.hidden)),
        TensorSpec(names.TOKENS, "int64", ("B", "M")),
        TensorSpec(names.POSITIONS, "int64", ("B", "M")),
        TensorSpec(names.NUM_PENDING, "int64", ("B",)),
        TensorSpec(names.CACHE_LEN, "int64", ("B",)),
        TensorSpec(names.KV_LEN, "int64", (1,)),
        TensorSpec(names.key_cache(0), shape.dtype, cache),
        TensorSpec(names.value_cache(0), shape.dtype, cache),
        *token_info_tables(shape),
    )


def lyanna_draft_outputs(shape: LyannaShape) -> tuple[TensorSpec, ...]:
    """Outputs of the draft graph, in order. Nodes come likeliest first, the root before all, parents before children.

    `chain_logits[b, i]` are the logits of step i + 1 before token information, times the draft logit scale, kept for
    resampling.
    """
    cache = ("B", shape.kv_heads, "C", shape.head_dim)
    return (
        *_tree_outputs(shape.nodes),
        TensorSpec(names.CHAIN_LOGITS, "float32", ("B", shape.steps, shape.vocabulary)),
        TensorSpec(names.present(names.key_cache(0)), shape.dtype, cache, in_place_of=names.key_cache(0)),
        TensorSpec(names.present(names.value_cache(0)), shape.dtype, cache, in_place_of=names.value_cache(0)),
    )


def lyanna_resample_inputs(shape: LyannaShape) -> tuple[TensorSpec, ...]:
    """Inputs of the resample graph: `tokens[b]` was verified last, `first_step[b]` counts the steps used up, from 1."""
    return (
        TensorSpec(names.CHAIN_LOGITS, "float32", ("B", shape.steps, shape.vocabulary)),
        TensorSpec(names.FIRST_STEP, "int64", ("B",)),
        TensorSpec(names.TOKENS, "int64", ("B",)),
        *token_info_tables(shape),
    )


def lyanna_resample_outputs(shape: LyannaShape) -> tuple[TensorSpec, ...]:
    """Outputs of the resample graph, in order; `tree.count[b]` nodes are real, fewer the later the first step."""
    return (*_tree_outputs(resample_nodes(shape)), TensorSpec(names.TREE_COUNT, "int64", ("B",)))


def step_layout_inputs() -> tuple[TensorSpec, ...]:
    """Inputs of the layout graph: of each sequence a tree of T nodes from the host and one of K nodes from a drafter,
    of which the first T are taken where `on_device` is not 0.

    Parents come before their children, -1 is the root's; `cache_len` rows are live already.
    """
    return (
        TensorSpec(names.HOST_TOKENS, "int64", ("B", "T")),
        TensorSpec(names.HOST_PARENTS, "int64", ("B", "T")),
        TensorSpec(names.TREE_TOKENS, "int64", ("B", "K")),
        TensorSpec(names.TREE_PARENTS, "int64", ("B", "K")),
        TensorSpec(names.ON_DEVICE, "int64", ("B",)),
        TensorSpec(names.CACHE_LEN, "int64", ("B",)),
    )


def step_layout_outputs() -> tuple[TensorSpec, ...]:
    """Outputs of the layout graph: T nodes, those past the tree's hanging from its root, and what describes them."""
    return (
        TensorSpec(names.TOKEN_IDS, "int64", ("B", "T")),
        TensorSpec(names.PARENTS, "int64", ("B", "T")),
        TensorSpec(names.POSITIONS, "int64", ("B", "T")),
        TensorSpec(names.TREE_MASK, "bool", ("B", "T", "T")),
    )


def step_accept_inputs(shape: VerifierShape) -> tuple[TensorSpec, ...]:
    """Inputs of the accepting graph: logits of every node, the tree, and how many of its nodes are real."""
    return (
        TensorSpec(names.LOGITS, "float32", ("B", "T", shape.vocabulary)),
        TensorSpec(names.TOKEN_IDS, "int64", ("B", "T")),
        TensorSpec(names.PARENTS, "int64", ("B", "T")),
        TensorSpec(names.TREE_MASK, "bool", ("B", "T", "T")),
        TensorSpec(names.NODES, "int64", ("B",)),
    )


def step_accept_outputs() -> tuple[TensorSpec, ...]:
    """Outputs of the accepting graph.

    `path[b]` are the root and the accepted nodes, then its own place: 0, 2, 5, 3, 4 … where nodes 2 and 5 are accepted.
    `accept_output[b]` is what the host reads: how many the first ones are, the path, the verifier's token after each
    node.
    """
    return (
        TensorSpec(names.PATH, "int64", ("B", "T")),
        TensorSpec(names.ACCEPT_OUTPUT, "int64", ("B", "1 + 2 T")),
    )


def step_keep_inputs(shape: VerifierShape) -> tuple[TensorSpec, ...]:
    """Inputs of the keeping graph: the accepting graph's path, the rows live before the tree, all KV buffers."""
    return (
        TensorSpec(names.PATH, "int64", ("B", "T")),
        TensorSpec(names.CACHE_LEN, "int64", ("B",)),
        *verifier_state(shape),
    )


def step_keep_outputs(shape: VerifierShape) -> tuple[TensorSpec, ...]:
    """Outputs of the keeping graph: row cache_len + path[i] of each buffer now at cache_len + i as well, in place."""
    return move_outputs(verifier_state(shape))


def step_collect_inputs(shape: VerifierShape) -> tuple[TensorSpec, ...]:
    """Inputs of the collecting graph: a call's feature rows, its path, and what waits already, W rows of which some."""
    return (
        TensorSpec(names.FEATURE_ROWS, shape.dtype, ("B", "F", shape.hidden)),
        TensorSpec(names.PATH, "int64", ("B", "T")),
        TensorSpec(names.PENDING_FEATURES, shape.dtype, ("B", "W", shape.hidden)),
        TensorSpec(names.PENDING_OFFSET, "int64", ("B",)),
    )


def step_collect_outputs(shape: VerifierShape) -> tuple[TensorSpec, ...]:
    """Output of the collecting graph: feature row path[i] at row pending_offset + i, in place; W holds T rows more."""
    return (
        TensorSpec(
            names.present(names.PENDING_FEATURES),
            shape.dtype,
            ("B", "W", shape.hidden),
            in_place_of=names.PENDING_FEATURES,
        ),
    )


Signature = tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]
"""Inputs and outputs of a graph."""


def step_signatures(shape: VerifierShape, lyanna: LyannaShape | None) -> dict[str, Signature]:
    """The signatures of the graphs of a step by name."""
    found = {
        names.STEP_PREPARE_TREE: (step_layout_inputs(), step_layout_outputs()),
        names.STEP_ACCEPT: (step_accept_inputs(shape), step_accept_outputs()),
        names.STEP_COMPACT_KV: (step_keep_inputs(shape), step_keep_outputs(shape)),
        names.STEP_COPY_SLOT: (move_inputs(verifier_state(shape)), move_outputs(verifier_state(shape))),
    }
    if lyanna:
        found[names.STEP_GATHER_FEATURES] = (step_collect_inputs(shape), step_collect_outputs(shape))
        found[names.LYANNA_COPY_SLOT] = (move_inputs(lyanna_state(lyanna)), move_outputs(lyanna_state(lyanna)))
    return found


def move_inputs(tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Inputs of a moving graph: from which slot to which, and what is kept by slot, in axis 0."""
    slots = (TensorSpec(names.SOURCE_SLOT, "int64", (1,)), TensorSpec(names.TARGET_SLOT, "int64", (1,)))
    return (*slots, *tensors)


def move_outputs(tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Outputs of a moving graph: the same tensors, in place."""
    return tuple(replace(spec, name=names.present(spec.name), in_place_of=spec.name) for spec in tensors)


def verifier_state(shape: VerifierShape) -> tuple[TensorSpec, ...]:
    """What a verifier keeps by slot."""
    dims = ("B", shape.kv_heads, "C", shape.head_dim)
    return tuple(TensorSpec(cache, shape.dtype, dims) for cache in caches(shape))


def lyanna_state(shape: LyannaShape) -> tuple[TensorSpec, ...]:
    """What a Lyanna drafter keeps by slot."""
    dims = ("B", shape.kv_heads, "C", shape.head_dim)
    return (
        TensorSpec(names.key_cache(0), shape.dtype, dims),
        TensorSpec(names.value_cache(0), shape.dtype, dims),
        TensorSpec(names.CHAIN_LOGITS, "float32", ("B", shape.steps, shape.vocabulary)),
        TensorSpec(names.PENDING_FEATURES, shape.dtype, ("B", "W", shape.hidden)),
    )


def caches(shape: VerifierShape) -> list[str]:
    """Names of the KV buffers of all layers: key, value, key, …"""
    return [name(layer) for layer in range(shape.layers) for name in (names.key_cache, names.value_cache)]


def tree_size(steps: int, width: int) -> int:
    """Nodes of a whole tree of Algorithm 1, root included."""
    return 1 + width + (steps - 1) * width * width if steps else 1


def resample_nodes(shape: LyannaShape) -> int:
    """Nodes that a resampled tree is cut to: one step fewer than a fresh one at least."""
    return min(shape.nodes, tree_size(shape.steps - 1, shape.width))


def _tree_outputs(nodes: int) -> tuple[TensorSpec, ...]:
    return (
        TensorSpec(names.TREE_TOKENS, "int64", ("B", nodes)),
        TensorSpec(names.TREE_PARENTS, "int64", ("B", nodes)),
        TensorSpec(names.TREE_LOG_PROBS, "float32", ("B", nodes)),
    )
