"""Signatures of the graphs of the verifier and of a step: inputs and outputs in order, by the shape of the model.

Symbols: B sequences in the call, T tokens verified at once, N nodes of all trees in a packed call, R rows of logits,
C rows of the KV buffers, V vocabulary, n hidden size, H_kv key/value heads, D head size, F rows of a feature buffer,
W rows of pending features, K nodes of a drafter's tree with its root, S nodes of a stored tree at most.
`redraft.methods` has the signatures of drafters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from redraft import names
from redraft.names import Dim, Dtype, TensorSpec


@dataclass(frozen=True)
class VerifierShape:
    """Sizes of the model that decide the verifier's buffers.

    dtype: of features and, unless `kv` is another type, of the KV buffers.
    """

    layers: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    max_positions: int
    dtype: Dtype = "float32"
    kv: Dtype | None = None

    @property
    def kv_dtype(self) -> Dtype:
        """Return the element type of the KV buffers."""
        return self.kv or self.dtype


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
        *verifier_state(shape),
    )


def verifier_outputs(shape: VerifierShape, hidden_states: tuple[str, ...]) -> tuple[TensorSpec, ...]:
    """Outputs of the verifier's graph, in order: logits, hidden states, then the KV buffers, updated in place."""
    return (
        TensorSpec(names.LOGITS, "float32", ("B", "R", shape.vocabulary)),
        *(
            TensorSpec(names.hidden_states(hidden_state), shape.dtype, ("B", "T", shape.hidden))
            for hidden_state in hidden_states
        ),
        *in_place(verifier_state(shape)),
    )


def packed_inputs(inputs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Inputs of the verifier's packed graph, from `verifier_inputs`.

    It has one row for each node: those of sequence 0, then those of sequence 1, and so on. Only attention sees the
    padded form [B, T], where T is the largest number of nodes of a sequence, and N is their sum. `packed_rows` is the
    place b * T + t of each row in that form, for node t of sequence b. The mask has the padded form. Padding writes KV
    rows after those of the nodes, so cache_len + T rows must fit. `output_rows` is in 0..N-1.
    """
    return (*_packed(inputs), TensorSpec(names.PACKED_ROWS, "int64", ("N",)))


def packed_outputs(outputs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Outputs of the verifier's packed graph, from `verifier_outputs`: logits and hidden states are packed."""
    return _packed(outputs)


def _packed(specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    sizes: dict[Dim, Dim] = {"B": 1, "T": "N"}
    rows = (names.TOKEN_IDS, names.POSITIONS, names.OUTPUT_ROWS, names.LOGITS)
    return tuple(
        replace(spec, shape=tuple(sizes.get(dim, dim) for dim in spec.shape))
        if spec.name in rows or spec.name.startswith(names.hidden_states(""))
        else spec
        for spec in specs
    )


def prepare_tree_inputs() -> tuple[TensorSpec, ...]:
    """Inputs of `STEP_PREPARE_TREE`: for each sequence, a tree of T nodes from the host and a stored one of S nodes.

    The graph takes the stored tree's first T nodes if `on_device[b]` is not 0. Parents come before their children; the
    root's is -1. `cache_len` is the number of committed rows.
    """
    return (
        TensorSpec(names.HOST_TOKENS, "int64", ("B", "T")),
        TensorSpec(names.HOST_PARENTS, "int64", ("B", "T")),
        TensorSpec(names.STORED_TOKENS, "int64", ("B", "S")),
        TensorSpec(names.STORED_PARENTS, "int64", ("B", "S")),
        TensorSpec(names.ON_DEVICE, "int64", ("B",)),
        TensorSpec(names.CACHE_LEN, "int64", ("B",)),
    )


def prepare_tree_outputs() -> tuple[TensorSpec, ...]:
    """Outputs of `STEP_PREPARE_TREE`: T nodes with positions and mask. Padding nodes are children of the root."""
    return (
        TensorSpec(names.TOKEN_IDS, "int64", ("B", "T")),
        TensorSpec(names.PARENTS, "int64", ("B", "T")),
        TensorSpec(names.POSITIONS, "int64", ("B", "T")),
        TensorSpec(names.TREE_MASK, "bool", ("B", "T", "T")),
    )


def accept_inputs(shape: VerifierShape) -> tuple[TensorSpec, ...]:
    """Inputs of `STEP_ACCEPT`: logits of every node, the tree, and its number of nodes without padding."""
    return (
        TensorSpec(names.LOGITS, "float32", ("B", "T", shape.vocabulary)),
        TensorSpec(names.TOKEN_IDS, "int64", ("B", "T")),
        TensorSpec(names.PARENTS, "int64", ("B", "T")),
        TensorSpec(names.TREE_MASK, "bool", ("B", "T", "T")),
        TensorSpec(names.NODES, "int64", ("B",)),
    )


def accept_sampled_inputs(shape: VerifierShape) -> tuple[TensorSpec, ...]:
    """Inputs of `STEP_ACCEPT_SAMPLED`: those of `STEP_ACCEPT`, and temperatures and keys of noise.

    A sequence of temperature 0 has no noise. `noise_keys[b, d]` is the key of the tokens after nodes of depth d
    (`redraft.runtime.sampling.noise.row_key`).
    """
    return (
        *accept_inputs(shape),
        TensorSpec(names.TEMPERATURE, "float32", ("B",)),
        TensorSpec(names.NOISE_KEYS, "int64", ("B", "T", 2)),
    )


def accept_outputs() -> tuple[TensorSpec, ...]:
    """Outputs of `STEP_ACCEPT` and of `STEP_ACCEPT_SAMPLED`.

    `path[b]` begins with the root and the accepted nodes; every later entry is its own index. If nodes 2 and 5 are
    accepted, it is 0, 2, 5, 3, 4 …. The host reads `accept_output[b]`: the number of accepted nodes with the root, the
    path, and the verifier's token after each node.
    """
    return (
        TensorSpec(names.PATH, "int64", ("B", "T")),
        TensorSpec(names.ACCEPT_OUTPUT, "int64", ("B", "1 + 2 T")),
    )


def compact_kv_inputs(shape: VerifierShape) -> tuple[TensorSpec, ...]:
    """Inputs of `STEP_COMPACT_KV`: the path of `STEP_ACCEPT`, the rows committed before the tree, all KV buffers."""
    return (
        TensorSpec(names.PATH, "int64", ("B", "T")),
        TensorSpec(names.CACHE_LEN, "int64", ("B",)),
        *verifier_state(shape),
    )


def compact_kv_outputs(shape: VerifierShape) -> tuple[TensorSpec, ...]:
    """Outputs of `STEP_COMPACT_KV`: each buffer, in place, with row cache_len + path[i] copied to cache_len + i."""
    return in_place(verifier_state(shape))


def gather_features_inputs(shape: VerifierShape) -> tuple[TensorSpec, ...]:
    """Inputs of `STEP_GATHER_FEATURES`: a call's feature rows, its path, pending rows, and their number."""
    return (
        TensorSpec(names.FEATURE_ROWS, shape.dtype, ("B", "F", shape.hidden)),
        TensorSpec(names.PATH, "int64", ("B", "T")),
        _pending_features(shape),
        TensorSpec(names.PENDING_OFFSET, "int64", ("B",)),
    )


def gather_features_outputs(shape: VerifierShape) -> tuple[TensorSpec, ...]:
    """Output of `STEP_GATHER_FEATURES`: pending rows, in place, with feature row path[i] at pending_offset + i.

    W is at least pending_offset + T.
    """
    return in_place((_pending_features(shape),))


def _pending_features(shape: VerifierShape) -> TensorSpec:
    return TensorSpec(names.PENDING_FEATURES, shape.dtype, ("B", "W", shape.hidden))


def store_trees_inputs() -> tuple[TensorSpec, ...]:
    """Inputs of `STEP_STORE_TREES`: a drafter's trees of K nodes, the slots to replace, and the stored trees.

    Tree b replaces the stored one if `drafted[b]` is not 0. S is at least K.
    """
    return (
        TensorSpec(names.TREE_TOKENS, "int64", ("B", "K")),
        TensorSpec(names.TREE_PARENTS, "int64", ("B", "K")),
        TensorSpec(names.DRAFTED, "int64", ("B",)),
        *_stored_trees(),
    )


def store_trees_outputs() -> tuple[TensorSpec, ...]:
    """Outputs of `STEP_STORE_TREES`: the stored trees, in place. Nodes past a new tree's K are children of its root."""
    return in_place(_stored_trees())


def _stored_trees() -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, "int64", ("B", "S")) for name in (names.STORED_TOKENS, names.STORED_PARENTS))


Signature = tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]
"""Inputs and outputs of a graph."""


def step_signatures(shape: VerifierShape, gathers: bool) -> dict[str, Signature]:
    """Return inputs and outputs of a step's graphs by name. gathers: True if a drafter reads hidden states."""
    found = {
        names.STEP_PREPARE_TREE: (prepare_tree_inputs(), prepare_tree_outputs()),
        names.STEP_ACCEPT: (accept_inputs(shape), accept_outputs()),
        names.STEP_ACCEPT_SAMPLED: (accept_sampled_inputs(shape), accept_outputs()),
        names.STEP_COMPACT_KV: (compact_kv_inputs(shape), compact_kv_outputs(shape)),
        names.STEP_COPY_SLOT: (copy_slot_inputs(verifier_state(shape)), in_place(verifier_state(shape))),
    }
    if gathers:
        found[names.STEP_GATHER_FEATURES] = (gather_features_inputs(shape), gather_features_outputs(shape))
        found[names.STEP_STORE_TREES] = (store_trees_inputs(), store_trees_outputs())
    return found


def copy_slot_inputs(tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Inputs of a graph that copies a slot: the source and target slots, and tensors with slots in axis 0."""
    slots = (TensorSpec(names.SOURCE_SLOT, "int64", (1,)), TensorSpec(names.TARGET_SLOT, "int64", (1,)))
    return (*slots, *tensors)


def in_place(tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Outputs of a graph that updates these inputs in place, as one that copies a slot does."""
    return tuple(replace(spec, name=names.present(spec.name), in_place_of=spec.name) for spec in tensors)


def verifier_state(shape: VerifierShape) -> tuple[TensorSpec, ...]:
    """Return the tensors that a verifier stores for each slot."""
    dims = ("B", shape.kv_heads, "C", shape.head_dim)
    return tuple(TensorSpec(cache, shape.kv_dtype, dims) for cache in caches(shape))


def caches(shape: VerifierShape) -> list[str]:
    """Names of the KV buffers of all layers: key, value, key, …"""
    return [name(layer) for layer in range(shape.layers) for name in (names.key_cache, names.value_cache)]
