"""Multi-token prediction: a module of the verifier, chained.

DeepSeek-V3, section 2.2, equations 21 to 23, defines a module of depth 1, which the chain repeats. Step i takes the
state of step i - 1 and the embedding of its most probable token, and its logits choose the next token. One engine call
unrolls the chain; the tree is that chain.

Symbols: N steps, K = N + 1 nodes. `redraft.signatures`, `redraft.methods.base` and `.chains` have the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from redraft import names
from redraft.errors import UsageError
from redraft.methods.base import BuildOptions, GraphSpec, Method, TreeLimits
from redraft.methods.chains import (
    DRAFT_PROFILES,
    chain_inputs,
    chain_logits,
    chain_state,
    chain_updates,
    describe_vocabulary,
    draft_vocabulary_integers,
    draft_vocabulary_tables,
    sampling_integers,
    tree_outputs,
)
from redraft.names import DRAFT, Dtype, TensorSpec
from redraft.records import PositiveInt

MOST_STEPS = 16
"""Largest number of steps of a chain."""


@dataclass(frozen=True)
class MtpBuild(BuildOptions):
    """Options for building a drafter.

    steps:            tokens of a draft.
    draft_vocabulary: tokens that can be drafted, the most frequent ones. None takes all that the drafter was trained
                      on.
    """

    steps: int = 4
    draft_vocabulary: PositiveInt | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= MOST_STEPS:
            raise UsageError(f"steps must be a number from 1 to {MOST_STEPS}, not {self.steps}")


@dataclass(frozen=True)
class MtpShape:
    """Sizes of the drafter's graph and buffers.

    steps: N.   draft_vocabulary: H.   draft_logit_scale: factor on the logits.
    dtype: of features and KV, the verifier's.   hidden_states: of the verifier, the one that it reads.
    """

    hidden: PositiveInt
    vocabulary: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    steps: PositiveInt
    draft_vocabulary: PositiveInt
    draft_logit_scale: float = 1.0
    dtype: Dtype = "float32"
    hidden_states: tuple[str, ...] = (names.LAST_HIDDEN_STATE,)

    @property
    def nodes(self) -> int:
        """K, root included."""
        return self.steps + 1


def draft_inputs(shape: MtpShape) -> tuple[TensorSpec, ...]:
    """Return inputs of the draft graph, in order: see `chain_inputs`."""
    return (*chain_inputs(shape), *draft_vocabulary_tables(shape))


def draft_outputs(shape: MtpShape) -> tuple[TensorSpec, ...]:
    """Return outputs of the draft graph, in order: a tree without branches, its steps' logits, the KV in place."""
    return (*tree_outputs(shape.nodes), chain_logits(shape), *chain_updates(shape))


METHOD: Method[MtpShape] = Method(
    id="mtp",
    summary="MTP: the verifier's own multi-token-prediction module, chained.",
    hidden_states=(names.LAST_HIDDEN_STATE,),
    rows="all",
    graphs={
        DRAFT: GraphSpec(
            draft_inputs,
            draft_outputs,
            profiles=DRAFT_PROFILES,
            integers=lambda shape: {**draft_vocabulary_integers(shape), **sampling_integers()},
            looked_up=lambda shape: {names.DRAFT_VOCABULARY: shape.steps},
            chain_steps=lambda shape: shape.steps,
        )
    },
    shape=MtpShape,
    state=chain_state,
    spare_rows=names.CATCH_UP_ROWS + MOST_STEPS,
    tables=draft_vocabulary_tables,
    limits=lambda shape: TreeLimits(shape.steps, 1, shape.steps),
    describe=lambda shape: f"{shape.steps} steps{describe_vocabulary(shape)}",
    build_options=MtpBuild,
    native=True,
)
