"""Medusa: heads on the verifier's last hidden state draft several tokens at once, as a static tree of candidates.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", Medusa-1. Head k
reads the hidden state that gave the root's token, and predicts the k-th token after the root.
`redraft.methods.static_tree` has the tree.

Symbols: N levels, K nodes with the root. `redraft.signatures`, `redraft.methods.base` and `.chains` have the others.
"""

from __future__ import annotations

from redraft import names
from redraft.methods.base import TREE, GraphSpec, Method
from redraft.methods.chains import chain_logits, draft_integers, draft_vocabulary_tables, sampling_inputs, tree_outputs
from redraft.methods.static_tree import StaticTreeBuild, StaticTreeShape, describe, looked_up, tree_limits
from redraft.names import DRAFT, TensorSpec


def draft_inputs(shape: StaticTreeShape) -> tuple[TensorSpec, ...]:
    """Return inputs of the draft graph, in order.

    Feature row `num_pending[b]` - 1 of `pending_features[b]` gave the root's token, `tokens[b]`.
    """
    return (
        _pending_features(shape),
        TensorSpec(names.NUM_PENDING, "int64", ("B",)),
        TensorSpec(names.TOKENS, "int64", ("B",)),
        *sampling_inputs(shape.steps),
        *draft_vocabulary_tables(shape),
    )


def draft_outputs(shape: StaticTreeShape) -> tuple[TensorSpec, ...]:
    """Return outputs of the draft graph, in order: a tree, and the logits of each level's head."""
    return (*tree_outputs(shape.nodes), chain_logits(shape))


def _pending_features(shape: StaticTreeShape) -> TensorSpec:
    return TensorSpec(names.PENDING_FEATURES, shape.dtype, ("B", names.MAX_PENDING_FEATURES, shape.hidden))


METHOD: Method[StaticTreeShape] = Method(
    id="medusa",
    hidden_states=(names.LAST_HIDDEN_STATE,),
    rows="last",
    graphs={
        DRAFT: GraphSpec(
            draft_inputs,
            draft_outputs,
            profiles={TREE: {}},
            integers=lambda shape: {names.NUM_PENDING: (1, names.MAX_PENDING_FEATURES), **draft_integers(shape)},
            looked_up=looked_up,
        )
    },
    shape=StaticTreeShape,
    state=lambda shape: (chain_logits(shape), _pending_features(shape)),
    tables=draft_vocabulary_tables,
    limits=tree_limits,
    describe=describe,
    build_options=StaticTreeBuild,
)
