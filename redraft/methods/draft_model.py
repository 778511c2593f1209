"""An independent draft model: a smaller decoder with the verifier's tokenizer drafts token by token.

Leviathan et al. 2023 and Chen et al. 2023 (speculative sampling). Its graph has the verifier's inputs, and returns the
best candidates after each row. A draft runs it once a token: the runtime chains the runs, so that a draft may have any
length and stop anywhere.

Symbols: k candidates of a row, N levels of a draft, K nodes of its tree with the root. `redraft.signatures` and
`redraft.methods.base` have the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from redraft import names
from redraft.errors import UsageError
from redraft.methods.base import PREFILL, TOKEN, TREE, BuildOptions, GraphSpec, Method, TreeLimits
from redraft.methods.chains import (
    describe_vocabulary,
    draft_vocabulary_integers,
    draft_vocabulary_tables,
    sampling_inputs,
    sampling_integers,
)
from redraft.names import DRAFT, Dtype, TensorSpec
from redraft.records import PositiveInt
from redraft.signatures import VerifierShape, verifier_inputs, verifier_outputs, verifier_state

MOST_STEPS = 24
"""Largest number of levels of a draft."""
MOST_WIDTH = 8
"""Most nodes of a level that get candidates."""
MOST_ROWS = 64
"""Most rows of a tree's levels in one run."""
_ROWS = (1, 1, MOST_WIDTH)
_PROFILES = {
    PREFILL: {"T": (names.DRAFT_WIDTHS[1],) * 3, "R": _ROWS},
    TREE: {"T": (names.DRAFT_WIDTHS[0],) * 3, "R": _ROWS},
    TOKEN: {"T": (1, 1, 1), "R": (1, 1, 1)},
}
"""TensorRT profiles: many rows after a prompt, few in a step, and one for each further token of a chain."""


@dataclass(frozen=True)
class DraftModelBuild(BuildOptions):
    """Options for building a drafter.

    steps:            most tokens of a draft's longest path. The budget of a step chooses the length.
    width:            nodes expanded at each level, and candidates of a node; 1 drafts chains.
    nodes:            largest tree, without its root; None takes 32, or a chain of `steps`.
    draft_vocabulary: tokens that can be drafted, the most frequent ones. None takes all that the drafter was trained
                      on. A plain checkpoint has no counts of tokens, so it drafts all.
    """

    steps: int = MOST_STEPS
    width: int = 1
    nodes: PositiveInt | None = None
    draft_vocabulary: PositiveInt | None = None

    def __post_init__(self) -> None:
        for name, most in (("steps", MOST_STEPS), ("width", MOST_WIDTH)):
            if not 1 <= getattr(self, name) <= most:
                raise UsageError(f"{name} must be a number from 1 to {most}, not {getattr(self, name)}")
        if self.width * (self.steps - 1) > MOST_ROWS and self.width > 1:
            raise UsageError(
                f"a tree of {self.steps} levels of {self.width} nodes is too large",
                f"choose steps={MOST_ROWS // self.width + 1}, or fewer",
            )


@dataclass(frozen=True)
class DraftModelShape:
    """Sizes of the drafter's graph and buffers.

    layers: of the draft model.   steps: N.   width: k, and nodes expanded at a level.   nodes: K, root included.
    draft_vocabulary: H.   draft_logit_scale: factor on the logits.   dtype: of the KV.
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
    dtype: Dtype = "float32"

    @property
    def decoder(self) -> VerifierShape:
        """The same sizes as those of a verifier with H tokens."""
        return VerifierShape(
            self.layers, self.kv_heads, self.head_dim, self.hidden, self.draft_vocabulary, 0, self.dtype
        )


def draft_inputs(shape: DraftModelShape) -> tuple[TensorSpec, ...]:
    """Return inputs of the graph, in order: the verifier's, those of sampling with keys for each row, and tables.

    Tokens are of the whole vocabulary. `output_rows` picks the rows that get candidates.
    """
    scale, noise_scale, keys, drawn = sampling_inputs(1)
    keys = TensorSpec(keys.name, keys.dtype, ("B", "R", 2))
    return (*verifier_inputs(shape.decoder), scale, noise_scale, keys, drawn, *draft_vocabulary_tables(shape))


def draft_outputs(shape: DraftModelShape) -> tuple[TensorSpec, ...]:
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


def tree_nodes(steps: int, width: int) -> int:
    """Return the nodes of a whole tree, root included: `width` candidates of the root, and of `width` nodes a level."""
    return 1 + width + (steps - 1) * width * width


def _integers(shape: DraftModelShape) -> Mapping[str, tuple[int, int]]:
    return {**draft_vocabulary_integers(shape), **sampling_integers()}


METHOD: Method[DraftModelShape] = Method(
    id="draft_model",
    summary="A smaller decoder with the same tokenizer, which drafts token by token.",
    graphs={
        DRAFT: GraphSpec(
            draft_inputs,
            draft_outputs,
            profiles=_PROFILES,
            integers=_integers,
            looked_up=lambda shape: {names.DRAFT_VOCABULARY: shape.width**2},
            decoder=True,
        )
    },
    shape=DraftModelShape,
    state=lambda shape: verifier_state(shape.decoder),
    spare_rows=names.CATCH_UP_ROWS + MOST_ROWS,
    tables=draft_vocabulary_tables,
    limits=lambda shape: TreeLimits(shape.steps, shape.width, shape.nodes - 1),
    describe=lambda shape: (
        f"{shape.layers} layers, {shape.steps} steps"
        + (f", {shape.width} wide, {shape.nodes - 1} nodes" if shape.width > 1 else "")
        + describe_vocabulary(shape)
    ),
    build_options=DraftModelBuild,
    takes_checkpoints=True,
    training="student",
)
