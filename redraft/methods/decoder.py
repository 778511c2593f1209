"""The specification that methods share whose drafter is a decoder of its own, which drafts token by token.

Its graph has the verifier's inputs, and returns the best candidates after each row. A draft runs it once a token: the
runtime chains the runs, so that a draft may have any length and stop anywhere.

With steering (Berdoz et al. 2025, "Steering Pretrained Drafters during Speculative Decoding", SD²), the drafter also
reads hidden states of the verifier. The graph `steer` computes a bias of each row's layers from them, once a draft, and
the graph `draft` adds it. Its shape has `steering` numbers of such a bias, 0 without steering.

Symbols: k candidates of a row, N levels of a draft, K nodes of its tree with the root. `redraft.signatures` and
`redraft.methods.base` have the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from redraft import names
from redraft.errors import UsageError
from redraft.methods.base import PREFILL, TOKEN, TREE, BuildOptions, GraphSpec, Method, TreeLimits
from redraft.methods.chains import (
    describe_vocabulary,
    draft_integers,
    draft_vocabulary_tables,
    pending_features,
    sampling_inputs,
    whole_tree,
)
from redraft.names import DRAFT, STEER, Dtype, TensorSpec
from redraft.records import PositiveInt
from redraft.signatures import VerifierShape, verifier_inputs, verifier_outputs, verifier_state

MOST_STEPS = 24
"""Largest number of levels of a draft."""
MOST_WIDTH = 8
"""Most nodes of a level that get candidates."""
MOST_ROWS = 64
"""Most rows of a tree's levels in one run."""
USUAL_NODES = 32
"""Nodes of a tree without its root, unless the options name another number."""
DRAFT_LENGTH = 8
"""k of SD²: the paper's drafts have so many tokens, and so do drafts in training (appendices A.4 and A.5)."""
_ROWS = (1, 1, MOST_WIDTH)
_PROFILES = {
    PREFILL: {"T": (names.DRAFT_WIDTHS[1],) * 3, "R": _ROWS},
    TREE: {"T": (names.DRAFT_WIDTHS[0],) * 3, "R": _ROWS},
    TOKEN: {"T": (1, 1, 1), "R": (1, 1, 1)},
}
"""TensorRT profiles: many rows after a prompt, few in a step, and one for each further token of a chain."""
_STEER_PROFILES = {name: {"T": sizes["T"]} for name, sizes in _PROFILES.items()}


@dataclass(frozen=True)
class DecoderBuild(BuildOptions):
    """Options for building a drafter.

    steps:            most tokens of a draft's longest path. The budget of a step chooses the length.
    """

    steps: int = MOST_STEPS

    def __post_init__(self) -> None:
        self.check(steps=MOST_STEPS)

    @property
    def width(self) -> int:
        """Nodes expanded at each level, and candidates of a node; 1 drafts chains."""
        return 1

    @property
    def tree_nodes(self) -> int:
        """K, the nodes of the largest tree with the root."""
        return 1 + self.steps


@dataclass(frozen=True)
class SteeringBuild(DecoderBuild):
    """Options for building a drafter with steering."""

    steps: int = DRAFT_LENGTH


@dataclass(frozen=True)
class TreeBuild(DecoderBuild):
    """Options for building a drafter that may draft trees.

    width: nodes expanded at each level, and candidates of a node; 1 drafts chains.
    nodes: largest tree, without its root; None takes 32, or a chain of `steps`.
    """

    width: int = 1
    nodes: PositiveInt | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(width=MOST_WIDTH)
        if self.width * (self.steps - 1) > MOST_ROWS and self.width > 1:
            raise UsageError(
                f"a tree of {self.steps} levels of {self.width} nodes is too large",
                f"choose steps={MOST_ROWS // self.width + 1}, or fewer",
            )

    @property
    def tree_nodes(self) -> int:
        """K, the nodes of the largest tree with the root."""
        usual = self.steps if self.width == 1 else USUAL_NODES
        return min(1 + (self.nodes or usual), whole_tree(self.steps, self.width))


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of the drafter's graphs and buffers.

    layers: of the drafter.   steps: N.   width: k, and nodes expanded at a level.   nodes: K, root included.
    draft_vocabulary: H.   draft_logit_scale: factor on the logits.   head_rank: see `BuildOptions`; 0 for none.
    dtype: of the KV, features and biases.
    hidden_states: of the verifier, which steer it.   steering: numbers of a row's bias, of all layers together.
    """

    layers: PositiveInt
    hidden: PositiveInt
    vocabulary: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    steps: PositiveInt
    width: PositiveInt
    nodes: PositiveInt
    draft_vocabulary: PositiveInt
    draft_logit_scale: float = 1.0
    head_rank: int = 0
    dtype: Dtype = "float32"
    hidden_states: tuple[str, ...] = ()
    steering: int = 0

    @property
    def decoder(self) -> VerifierShape:
        """The same sizes as those of a verifier with H tokens."""
        return VerifierShape(
            self.layers, self.kv_heads, self.head_dim, self.hidden, self.draft_vocabulary, 0, self.dtype
        )


def draft_inputs(shape: DecoderShape) -> tuple[TensorSpec, ...]:
    """Return inputs of the graph, in order: the verifier's, steering, those of sampling with keys a row, and tables.

    Tokens are of the whole vocabulary. `output_rows` picks the rows that get candidates. `steering` is the bias of each
    row.
    """
    scale, noise_scale, keys, drawn = sampling_inputs(1)
    keys = TensorSpec(keys.name, keys.dtype, ("B", "R", 2))
    return (
        *verifier_inputs(shape.decoder),
        *_biases(shape),
        *(scale, noise_scale, keys, drawn),
        *draft_vocabulary_tables(shape),
    )


def draft_outputs(shape: DecoderShape) -> tuple[TensorSpec, ...]:
    """Return outputs of the graph, in order: candidates, their log probabilities, logits, then the KV in place.

    Candidates come best first, with log probabilities given their row (`redraft.methods.chains.sampling_inputs`).
    `logits` are before draft logit scale and noise.
    """
    logits, *updates = verifier_outputs(shape.decoder, ())
    return (
        TensorSpec(names.CANDIDATES, "int64", ("B", "R", shape.width)),
        TensorSpec(names.CANDIDATE_LOG_PROBS, "float32", ("B", "R", shape.width)),
        logits,
        *updates,
    )


def steer_inputs(shape: DecoderShape) -> tuple[TensorSpec, ...]:
    """Return inputs of the graph `steer`, in order: hidden states, positions, and the last pending row of a sequence.

    Row t has the verifier's hidden states at `positions[b, t]` - 1. The row at position 0 has none, so its numbers do
    not count.
    """
    return (
        *(
            TensorSpec(names.of_state(names.FEATURE_ROWS, place), shape.dtype, ("B", "T", shape.hidden))
            for place in range(len(shape.hidden_states))
        ),
        TensorSpec(names.POSITIONS, "int64", ("B", "T")),
        TensorSpec(names.OUTPUT_ROWS, "int64", ("B", 1)),
    )


def steer_outputs(shape: DecoderShape) -> tuple[TensorSpec, ...]:
    """Return outputs of the graph `steer`, in order: the bias of each row, and that of the last pending row."""
    return (*_biases(shape), TensorSpec(names.STEERING_LAST, shape.dtype, ("B", 1, shape.steering)))


def _biases(shape: DecoderShape) -> tuple[TensorSpec, ...]:
    return (TensorSpec(names.STEERING, shape.dtype, ("B", "T", shape.steering)),) if shape.steering else ()


def _state(shape: DecoderShape) -> tuple[TensorSpec, ...]:
    return (*verifier_state(shape.decoder), *pending_features(shape, len(shape.hidden_states)))


def _describe(shape: DecoderShape) -> str:
    tree = f", {shape.width} wide, {shape.nodes - 1} nodes" if shape.width > 1 else ""
    steering = f", steering by hidden states {', '.join(shape.hidden_states)}" if shape.steering else ""
    return f"{shape.layers} layers, {shape.steps} steps{tree}{describe_vocabulary(shape)}{steering}"


METHOD: Method[DecoderShape] = Method(
    graphs={
        STEER: GraphSpec(
            steer_inputs, steer_outputs, exists=lambda shape: shape.steering > 0, profiles=_STEER_PROFILES
        ),
        DRAFT: GraphSpec(
            draft_inputs,
            draft_outputs,
            profiles=_PROFILES,
            integers=draft_integers,
            looked_up=lambda shape: {names.DRAFT_VOCABULARY: shape.width**2},
            decoder=True,
        ),
    },
    shape=DecoderShape,
    state=_state,
    spare_rows=names.CATCH_UP_ROWS + MOST_ROWS,
    tables=draft_vocabulary_tables,
    limits=lambda shape: TreeLimits(shape.steps, shape.width, shape.nodes - 1),
    describe=_describe,
    build_options=DecoderBuild,
)
"""A row with hidden states has steering; these are those that steer drafters with random weights."""
