"""Shared signatures of methods whose draft graph catches up on feature rows and unrolls a causal chain.

Symbols: V tokens of the verifier's vocabulary, H of the draft vocabulary. Drafters take tokens of the whole vocabulary.
Their logits have a column for each token of the draft vocabulary, and `draft_vocabulary` [H] names these tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from redraft import names, noise_spec
from redraft.methods.base import PREFILL, TREE, GraphSpec, TreeLimits
from redraft.names import TensorSpec
from redraft.records import PositiveInt
from redraft.signatures import in_place

_DRAFT_PROFILES = {PREFILL: {"M": (names.DRAFT_WIDTHS[1],) * 3}, TREE: {"M": (names.DRAFT_WIDTHS[0],) * 3}}
"""TensorRT profiles of a draft graph: many rows after a prompt, few in a step."""


Shape = Any
"""A method's shape, with those fields of `ChainShape` and of its own that a function reads."""


@dataclass(frozen=True)
class ChainShape:
    """Sizes of a drafter with KV, of one layer unless it has `layers`, and N, the tokens of a draft's longest path."""

    hidden: PositiveInt
    vocabulary: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    steps: PositiveInt


def draft_graph(
    looked_up: Callable[[Shape], Mapping[str, int]], chain_steps: Callable[[Shape], int] = lambda shape: shape.steps,
    one_way: Callable[[Shape], bool] = lambda shape: True,
) -> GraphSpec[Shape]:  # fmt: skip
    """Return the specification of a draft graph with a draft vocabulary as its only table."""
    return GraphSpec(
        draft_inputs,
        draft_outputs,
        profiles=_DRAFT_PROFILES,
        integers=draft_integers,
        looked_up=looked_up,
        chain_steps=chain_steps,
        one_way=one_way,
    )


def draft_inputs(shape: Shape, tables: tuple[TensorSpec, ...] | None = None) -> tuple[TensorSpec, ...]:
    """Return inputs of a draft graph, in order: those of `chain_inputs`, and its tables, by default the vocabulary."""
    return (*chain_inputs(shape), *(draft_vocabulary_tables(shape) if tables is None else tables))


def draft_outputs(shape: Shape) -> tuple[TensorSpec, ...]:
    """Return outputs of a draft graph, in order: a tree, a row of logits for each of its levels, the KV in place.

    A level's logits are those of its best node. If candidates are drawn, these nodes are the chain of first draws.
    """
    return (*tree_outputs(shape.nodes), chain_logits(shape), *in_place(_caches(shape)))


def draft_integers(shape: Shape) -> Mapping[str, tuple[int, int]]:
    """Return least and largest value of the integers of sampling, and of the tokens of a draft vocabulary."""
    return {
        names.DRAFT_VOCABULARY: (0, shape.vocabulary - 1),
        names.NOISE_KEYS: (1, (1 << noise_spec.WORD_BITS) - 1),
        names.DRAWN: (0, 1),
    }


def chain_inputs(shape: Shape) -> tuple[TensorSpec, ...]:
    """Return inputs of a draft graph, in order, without tables.

    Row m of a sequence is a feature, of each hidden state, at `positions[b, m]` and the token after it; rows from
    `num_pending[b]` on are padding. The drafter's KV holds `cache_len[b]` rows before them, row r of position r;
    `kv_len` is the largest cache_len + M.
    """
    return (
        *(
            TensorSpec(names.of_state(names.FEATURE_ROWS, place), shape.dtype, ("B", "M", shape.hidden))
            for place in range(_states(shape))
        ),
        TensorSpec(names.TOKENS, "int64", ("B", "M")),
        TensorSpec(names.POSITIONS, "int64", ("B", "M")),
        TensorSpec(names.NUM_PENDING, "int64", ("B",)),
        TensorSpec(names.CACHE_LEN, "int64", ("B",)),
        TensorSpec(names.KV_LEN, "int64", (1,)),
        *_caches(shape),
        *sampling_inputs(shape.steps),
    )


def sampling_inputs(steps: int) -> tuple[TensorSpec, ...]:
    """Return the inputs by which candidates follow the sampling of each sequence, for trees of `steps` levels.

    Candidates after a node are the best of z = draft_logit_scale * (logits + noise_scale * noise), and log_softmax(z)
    are their log probabilities. `noise_keys[b, i]` is the key of the noise (`redraft.export.graph.noise`) of the
    position at depth i + 1. With noise_scale 0 the noise does not count, and neither do its keys. With noise_scale T, z
    orders tokens as logits / T + noise does.

    If `drawn[b]` is 1, candidates are draws without replacement from softmax(draft_logit_scale * logits), for
    noise_scale = 1 / draft_logit_scale. Then a node's log probability is its rank's alone (`DRAWN_LOG_PROB`): the
    drawn numbers must not decide which nodes a tree has.
    """
    return (
        TensorSpec(names.DRAFT_LOGIT_SCALE, "float32", ("B",)),
        TensorSpec(names.NOISE_SCALE, "float32", ("B",)),
        TensorSpec(names.NOISE_KEYS, "int64", ("B", steps, 2)),
        TensorSpec(names.DRAWN, "int64", ("B",)),
    )


DRAWN_LOG_PROB = -0.6875
"""Log probability of the first of a node's drawn children. The second has twice this number, and so on: 1/2, 1/4 …
Its sums are exact in float32, so equal sums of ranks are ties."""


def chain_logits(shape: Shape) -> TensorSpec:
    """Return the logits of a draft's steps, before draft logit scale and noise."""
    return TensorSpec(names.CHAIN_LOGITS, "float32", ("B", shape.steps, shape.draft_vocabulary))


def draft_vocabulary_tables(shape: Shape) -> tuple[TensorSpec, ...]:
    """Return the table with the token of each column of the logits, in order; none if every token has its column."""
    if shape.draft_vocabulary == shape.vocabulary:
        return ()
    return (TensorSpec(names.DRAFT_VOCABULARY, "int64", (shape.draft_vocabulary,)),)


def describe_vocabulary(shape: Shape) -> str:
    """Return the draft vocabulary and the head's rank in words, each after a comma; nothing for a whole one."""
    tokens = shape.draft_vocabulary
    some = "" if tokens == shape.vocabulary else f", {tokens} of {shape.vocabulary} tokens"
    return f"{some}, head of rank {shape.head_rank}" if shape.head_rank else some


def chain_state(shape: Shape) -> tuple[TensorSpec, ...]:
    """Return the tensors of a slot: KV, logits of the last draft's steps, and pending rows of its hidden states."""
    return (*_caches(shape), chain_logits(shape), *pending_features(shape, _states(shape)))


def _states(shape: Shape) -> int:
    """Return the number of hidden states that a drafter reads."""
    return len(getattr(shape, "hidden_states", (names.LAST_HIDDEN_STATE,)))


def pending_features(shape: Shape, states: int) -> tuple[TensorSpec, ...]:
    """Return the tensors of a slot for pending rows of so many hidden states."""
    return tuple(
        TensorSpec(names.of_state(names.PENDING_FEATURES, place), shape.dtype, ("B", "W", shape.hidden))
        for place in range(states)
    )


def tree_outputs(nodes: int) -> tuple[TensorSpec, ...]:
    """Return a tree's outputs. Nodes come in order of probability, the root first and parents before children."""
    return (
        TensorSpec(names.TREE_TOKENS, "int64", ("B", nodes)),
        TensorSpec(names.TREE_PARENTS, "int64", ("B", nodes)),
        TensorSpec(names.TREE_LOG_PROBS, "float32", ("B", nodes)),
    )


def whole_tree(steps: int, width: int) -> int:
    """Return the nodes of a whole tree, root included: `width` candidates of the root, and of `width` nodes a level."""
    return 1 + width + (steps - 1) * width * width if steps else 1


def tree_limits(shape: Shape) -> TreeLimits:
    """Return the largest tree. From the second level on, `width` nodes have `width` candidates each."""
    width = shape.width if shape.steps == 1 else shape.width**2
    return TreeLimits(shape.steps, min(width, shape.nodes - 1), shape.nodes - 1)


def _caches(shape: Shape) -> tuple[TensorSpec, ...]:
    """Return the key and value buffers of each layer; shapes without `layers` have one."""
    dims = "B", shape.kv_heads, "C", shape.head_dim
    return tuple(
        TensorSpec(name(layer), shape.dtype, dims)
        for layer in range(getattr(shape, "layers", 1))
        for name in (names.key_cache, names.value_cache)
    )
