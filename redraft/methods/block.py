"""The specification that methods share which draft a whole block of tokens in one pass.

A block is the latest token, the anchor, and masks for the tokens to draft. Its rows read the verifier's hidden states
of all earlier positions as context, and each other: all rows (Chen et al. 2026, DFlash, arXiv 2602.06036; DeepSeek's
DSpark), or only earlier ones (Hu et al. 2026, JetSpec, arXiv 2606.18394). Each layer has KV buffers of its own with the
context's keys and values. These come from the hidden states alone, so a draft's rows need not stay there.

The graph computes the context of the rows since the last draft, then the block. A row of the block gives the candidates
of one level of a tree. The tree keeps the best of all paths by joint probability (Li et al. 2024, EAGLE-2, section 4).

Symbols: N levels, W width, K nodes with the root. `redraft.signatures`, `redraft.methods.base` and `.chains` have the
others.
"""

from __future__ import annotations

from dataclasses import dataclass

from redraft import names
from redraft.errors import UsageError
from redraft.methods.base import BuildOptions, Method
from redraft.methods.chains import (
    ChainShape,
    chain_state,
    describe_vocabulary,
    draft_graph,
    draft_vocabulary_tables,
    tree_limits,
    whole_tree,
)
from redraft.names import DRAFT, Dtype
from redraft.records import PositiveInt

MOST_STEPS = 31
"""Most tokens that a block drafts."""
MOST_WIDTH = 10
"""Most nodes of a level that get candidates."""


@dataclass(frozen=True)
class BlockBuild(BuildOptions):
    """Options for building a drafter.

    steps:            levels of a tree, one a mask; None takes as many as the drafter was trained for.
    width:            nodes of a level that get candidates, and candidates of a node; 1 drafts chains.
    nodes:            largest tree, without its root. None takes three a level, or a chain of `steps`.
    confidence:       False to leave out the head that estimates a drafted token's chance, if the drafter has one.
    """

    steps: PositiveInt | None = None
    width: int = 3
    nodes: PositiveInt | None = None
    confidence: bool = True

    def __post_init__(self) -> None:
        self.check(steps=MOST_STEPS, width=MOST_WIDTH)

    def tree_nodes(self, steps: int, width: int) -> int:
        """Return K, the nodes to keep with the root, of trees of so many levels and this width."""
        return min(1 + (self.nodes or steps * min(width, 3)), whole_tree(steps, width))


@dataclass(frozen=True)
class BlockShape(ChainShape):
    """Sizes of the drafter's graph and buffers.

    layers: of KV.   causal: True if rows of a block see earlier ones alone.   width: W.   nodes: K.
    draft_vocabulary: H.
    hidden_states: of the verifier, which are a row of context together.
    draft_logit_scale: factor on the logits.   head_rank: see `BuildOptions`; 0 for none.
    dtype: of hidden states and KV, the verifier's.
    """

    layers: PositiveInt
    causal: bool
    width: PositiveInt
    nodes: PositiveInt
    draft_vocabulary: PositiveInt
    hidden_states: tuple[str, ...] = (names.LAST_HIDDEN_STATE,)
    draft_logit_scale: float = 1.0
    head_rank: int = 0
    dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        if self.width > self.draft_vocabulary:
            raise UsageError(
                f"a node cannot have {self.width} children of {self.draft_vocabulary} tokens",
                "lower width, or raise draft_vocabulary",
            )


def _describe(shape: BlockShape) -> str:
    tree = f", trees {shape.width} wide of {shape.nodes - 1} nodes" if shape.width > 1 else ""
    return f"blocks of {shape.steps} tokens{tree}{describe_vocabulary(shape)}"


METHOD: Method[BlockShape] = Method(
    hidden_states=("0", "1", names.LAST_HIDDEN_STATE),
    rows="all",
    graphs={
        DRAFT: draft_graph(
            lambda shape: {names.DRAFT_VOCABULARY: shape.nodes - 1 + (shape.steps - 1) * shape.width},
            chain_steps=lambda shape: 1,
            one_way=lambda shape: shape.causal,
        )
    },
    shape=BlockShape,
    state=chain_state,
    spare_rows=names.CATCH_UP_ROWS + MOST_STEPS + 1,
    tables=draft_vocabulary_tables,
    limits=tree_limits,
    describe=_describe,
    build_options=BlockBuild,
)
"""Hidden states of a row are those that drafters with random weights read. Each layer's buffers are updated once."""
