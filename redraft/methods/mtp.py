"""Multi-token prediction: a module of the verifier, chained.

DeepSeek-V3, section 2.2, equations 21 to 23, defines a module of depth 1, which the chain repeats. Step i takes the
state of step i - 1 and the embedding of its most probable token, and its logits choose the next token. One engine call
unrolls the chain; the tree is that chain.

Symbols: N steps, K = N + 1 nodes. `redraft.signatures`, `redraft.methods.base` and `.chains` have the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from redraft import names
from redraft.methods.base import BuildOptions, Method, TreeLimits
from redraft.methods.chains import ChainShape, chain_state, describe_vocabulary, draft_graph, draft_vocabulary_tables
from redraft.names import DRAFT, Dtype
from redraft.records import PositiveInt

MOST_STEPS = 16
"""Largest number of steps of a chain."""


@dataclass(frozen=True)
class MtpBuild(BuildOptions):
    """Options for building a drafter.

    steps:            tokens of a draft.
    """

    steps: int = 4

    def __post_init__(self) -> None:
        self.check(steps=MOST_STEPS)


@dataclass(frozen=True)
class MtpShape(ChainShape):
    """Sizes of the drafter's graph and buffers.

    draft_vocabulary: H.   draft_logit_scale: factor on the logits.   head_rank: see `BuildOptions`; 0 for none.
    dtype: of features and KV, the verifier's.   hidden_states: of the verifier, the one that it reads.
    """

    draft_vocabulary: PositiveInt
    draft_logit_scale: float = 1.0
    head_rank: int = 0
    dtype: Dtype = "float32"
    hidden_states: tuple[str, ...] = (names.LAST_HIDDEN_STATE,)

    @property
    def nodes(self) -> int:
        """K, root included."""
        return self.steps + 1


METHOD: Method[MtpShape] = Method(
    id="mtp",
    hidden_states=(names.LAST_HIDDEN_STATE,),
    rows="all",
    graphs={DRAFT: draft_graph(lambda shape: {names.DRAFT_VOCABULARY: shape.steps})},
    shape=MtpShape,
    state=chain_state,
    spare_rows=names.CATCH_UP_ROWS + MOST_STEPS,
    tables=draft_vocabulary_tables,
    limits=lambda shape: TreeLimits(shape.steps, 1, shape.steps),
    describe=lambda shape: f"{shape.steps} steps{describe_vocabulary(shape)}",
    build_options=MtpBuild,
    native=True,
)
