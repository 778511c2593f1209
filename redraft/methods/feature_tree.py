"""The specification that methods share which autoregress at feature level and draft trees in one engine call.

The graph catches up on the rows since the last draft, then unrolls the levels of a tree. A level computes the W best
nodes of the level before, with the feature that the drafter predicted there. Each has k = W candidates. The tree keeps
the best of all candidates. What is best depends on `static`:

- False: the joint probability (Li et al. 2024, EAGLE-2, section 4: dynamic trees).
- True: the ranks of a node and its ancestors alone (EAGLE: static trees), by `methods.chains.DRAWN_LOG_PROB`. So every
  drafted tree has the same form. A smaller budget takes its likeliest nodes.

A width of 1 drafts chains.

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

MOST_STEPS = 10
"""Most levels of a tree."""
MOST_WIDTH = 10
"""Most nodes of a level that get candidates."""
MOST_ROWS = 64
"""Most rows of a tree's levels."""


@dataclass(frozen=True)
class FeatureTreeBuild(BuildOptions):
    """Options for building a drafter.

    steps:            levels of a tree.
    width:            nodes of a level that get candidates, and candidates of a node; 1 drafts chains.
    nodes:            largest tree, without its root. None takes three a level, or a chain of `steps`.
    """

    steps: int = 4
    width: int = 3
    nodes: PositiveInt | None = None

    def __post_init__(self) -> None:
        self.check(steps=MOST_STEPS, width=MOST_WIDTH)
        if (rows := self.width * (self.steps - 1)) > MOST_ROWS:
            raise UsageError(
                f"a tree of {self.steps} levels of {self.width} nodes computes {rows} rows, at most {MOST_ROWS} can be",
                "lower steps or width",
            )

    def tree_nodes(self, width: int) -> int:
        """Return K, the nodes to keep with the root, of trees of this width."""
        return min(1 + (self.nodes or self.steps * min(width, 3)), whole_tree(self.steps, width))


@dataclass(frozen=True)
class FeatureTreeShape(ChainShape):
    """Sizes of the drafter's graph and buffers.

    width: W.   nodes: K.   static: see above.   draft_vocabulary: H.
    hidden_states: of the verifier, which are a feature together.
    draft_logit_scale: factor on the logits.   head_rank: see `BuildOptions`; 0 for none.
    dtype: of features and KV, the verifier's.
    """

    width: PositiveInt
    nodes: PositiveInt
    draft_vocabulary: PositiveInt
    static: bool = False
    hidden_states: tuple[str, ...] = (names.LAST_HIDDEN_STATE,)
    draft_logit_scale: float = 1.0
    head_rank: int = 0
    dtype: Dtype = "float32"


def _describe(shape: FeatureTreeShape) -> str:
    kind = "static trees" if shape.static else "trees"
    tree = f", {kind} {shape.width} wide of {shape.nodes - 1} nodes" if shape.width > 1 else ""
    return f"{shape.steps} steps{tree}{describe_vocabulary(shape)}"


METHOD: Method[FeatureTreeShape] = Method(
    hidden_states=(names.LAST_HIDDEN_STATE,),
    rows="all",
    graphs={
        DRAFT: draft_graph(lambda shape: {names.DRAFT_VOCABULARY: shape.nodes - 1 + (shape.steps - 1) * shape.width}),
    },
    shape=FeatureTreeShape,
    state=chain_state,
    spare_rows=names.CATCH_UP_ROWS + MOST_ROWS,
    tables=draft_vocabulary_tables,
    limits=tree_limits,
    describe=_describe,
    build_options=FeatureTreeBuild,
)
"""Hidden states of a row are those that drafters with random weights read."""
