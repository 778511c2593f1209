"""Signatures of the verifier's graphs and of a step's: inputs and outputs in order, by the shape of the model.

Symbols: B sequences in the call, T tokens verified at once, R rows whose logits are wanted, C capacity of the KV
buffers in rows, V vocabulary, n hidden size, H_kv key/value heads, D head size, K nodes of a drafter's tree with its
root, S nodes that the store has space for a tree. A drafter's own graphs are in its method's file, in
`redraft.methods`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from redraft import names
from redraft.names import Dtype, TensorSpec


@dataclass(frozen=True)
class VerifierShape:
    """Sizes of the model that decide the verifier's buffers. `dtype` is that of the buffers and of features."""

    layers: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    max_positions: int
    dtype: Dtype = "float32"


def verifier_inputs(shape: VerifierShape) -> tuple[TensorSpec, ...]:
    """Inputs of the verifier's graph, in order.

    `tree_mask[b, i, j]` is true if node j is i or an ancestor of i (padding rows see only themselves). `cache_len` is
    the number of committed rows. `kv_len` is the largest cache_len + T. `output_rows` picks the rows whose logits are
    computed, in 0..T-1.
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


def step_layout_inputs() -> tuple[TensorSpec, ...]:
    """Inputs of the layout graph: of each sequence a tree of T nodes from the host and one of S nodes from the store,
    of which the first T are taken where `on_device` is not 0.

    Parents come before their children, -1 is the root's; `cache_len` rows are live already.
    """
    return (
        TensorSpec(names.HOST_TOKENS, "int64", ("B", "T")),
        TensorSpec(names.HOST_PARENTS, "int64", ("B", "T")),
        TensorSpec(names.STORED_TOKENS, "int64", ("B", "S")),
        TensorSpec(names.STORED_PARENTS, "int64", ("B", "S")),
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


def step_store_inputs() -> tuple[TensorSpec, ...]:
    """Inputs of the storing graph: a drafter's trees of K nodes, the slots whose trees are wanted, and the store.

    `drafted[b]` is not 0 where tree b takes the place of the one in the store. S is K at least.
    """
    return (
        TensorSpec(names.TREE_TOKENS, "int64", ("B", "K")),
        TensorSpec(names.TREE_PARENTS, "int64", ("B", "K")),
        TensorSpec(names.DRAFTED, "int64", ("B",)),
        *_store(),
    )


def step_store_outputs() -> tuple[TensorSpec, ...]:
    """Outputs of the storing graph: the store, in place. Nodes past a new tree's K hang from its root."""
    return move_outputs(_store())


def _store() -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, "int64", ("B", "S")) for name in (names.STORED_TOKENS, names.STORED_PARENTS))


Signature = tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]
"""Inputs and outputs of a graph."""


def step_signatures(shape: VerifierShape, gathers: bool) -> dict[str, Signature]:
    """Return inputs and outputs of a step's graphs by name. gathers: True if a drafter reads hidden states."""
    found = {
        names.STEP_PREPARE_TREE: (step_layout_inputs(), step_layout_outputs()),
        names.STEP_ACCEPT: (step_accept_inputs(shape), step_accept_outputs()),
        names.STEP_COMPACT_KV: (step_keep_inputs(shape), step_keep_outputs(shape)),
        names.STEP_COPY_SLOT: (move_inputs(verifier_state(shape)), move_outputs(verifier_state(shape))),
    }
    if gathers:
        found[names.STEP_GATHER_FEATURES] = (step_collect_inputs(shape), step_collect_outputs(shape))
        found[names.STEP_STORE_TREES] = (step_store_inputs(), step_store_outputs())
    return found


def move_inputs(tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Inputs of a moving graph: from which slot to which, and what is kept by slot, in axis 0."""
    slots = (TensorSpec(names.SOURCE_SLOT, "int64", (1,)), TensorSpec(names.TARGET_SLOT, "int64", (1,)))
    return (*slots, *tensors)


def move_outputs(tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Outputs of a moving graph: the same tensors, in place."""
    return tuple(replace(spec, name=names.present(spec.name), in_place_of=spec.name) for spec in tensors)


def verifier_state(shape: VerifierShape) -> tuple[TensorSpec, ...]:
    """Return the tensors that a verifier stores for each slot."""
    dims = ("B", shape.kv_heads, "C", shape.head_dim)
    return tuple(TensorSpec(cache, shape.dtype, dims) for cache in caches(shape))


def caches(shape: VerifierShape) -> list[str]:
    """Names of the KV buffers of all layers: key, value, key, …"""
    return [name(layer) for layer in range(shape.layers) for name in (names.key_cache, names.value_cache)]
