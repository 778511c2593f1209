"""Shared parts of methods whose heads draft a static tree: its form, its size and its options.

Each head predicts one of the next tokens, and no head reads another one's token. So all nodes of a level have the same
candidates. The form of the tree is fixed when a drafter is built, from the accuracies of the heads' candidates (Cai et
al. 2024, Medusa, section 2.3.3).

Symbols: N levels, R candidates of a head, K nodes with the root. `redraft.methods.chains` has the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from redraft import names
from redraft.methods.base import BuildOptions, TreeLimits
from redraft.methods.chains import describe_vocabulary
from redraft.names import Dtype
from redraft.records import PositiveInt

MOST_HEADS = 16
"""Most heads of a drafter."""
MOST_NODES = 255
"""Most nodes of a tree, without its root."""
Node = tuple[int, ...]
"""A node: the ranks of its ancestors' tokens among the candidates of heads 1, 2 …, and the rank of its own."""


@dataclass(frozen=True)
class StaticTreeBuild(BuildOptions):
    """Options for building a drafter.

    nodes:            of the tree, without its root.
    steps:            levels of the tree at most; None takes the number of heads.
    width:            candidates of a head at most; None takes all whose accuracies are known.
    """

    nodes: int = 31
    steps: PositiveInt | None = None
    width: PositiveInt | None = None

    def __post_init__(self) -> None:
        self.check(nodes=MOST_NODES, steps=MOST_HEADS)


@dataclass(frozen=True)
class StaticTreeShape:
    """Sizes of the drafter's graph and buffers.

    tree: all nodes but the root, by falling accuracy.   draft_vocabulary: H.   draft_logit_scale: factor on the logits.
    head_rank: see `BuildOptions`; 0 for none.   dtype: of features, the verifier's.
    """

    hidden: PositiveInt
    vocabulary: PositiveInt
    tree: tuple[Node, ...]
    draft_vocabulary: PositiveInt
    draft_logit_scale: float = 1.0
    head_rank: int = 0
    dtype: Dtype = "float32"

    @property
    def steps(self) -> int:
        """N."""
        return max(map(len, self.tree))

    @property
    def width(self) -> int:
        """R."""
        return 1 + max(map(max, self.tree))

    @property
    def nodes(self) -> int:
        """K, root included."""
        return 1 + len(self.tree)


def best_tree(accuracies: Sequence[Sequence[float]], nodes: int) -> dict[Node, float]:
    """Return the nodes whose products of accuracies are the largest, largest first, with these products.

    A product is the chance of a node to be accepted, so this tree has the most accepted tokens (section 2.3.3). No
    product is larger than the parent's, or than that of a sibling of a better rank. So the largest ones of all are
    found one by one, among children and next siblings of the nodes so far.

    accuracies: how often the candidate is right, by head and rank. If a later rank was right more often, they are
    swapped: only chance can do that.
    """
    ranked = [sorted(shares, reverse=True) for shares in accuracies]
    found: dict[Node, float] = {}
    waiting: list[tuple[float, int, Node, float]] = []

    def wait(path: Node, above: float) -> None:
        """Add a node to those that could be next. Of equal products the shorter path, then the better rank is first."""
        depth, rank = len(path), path[-1]
        if depth <= len(ranked) and rank < len(ranked[depth - 1]):
            heappush(waiting, (-above * ranked[depth - 1][rank], depth, path, above))

    wait((0,), 1.0)
    while waiting and len(found) < nodes:
        product, _, path, above = heappop(waiting)
        found[path] = -product
        wait((*path[:-1], path[-1] + 1), above)
        wait((*path, 0), -product)
    return found


def tree_limits(shape: StaticTreeShape) -> TreeLimits:
    """Return the largest tree: that of the shape."""
    return TreeLimits(shape.steps, max(Counter(map(len, shape.tree)).values()), shape.nodes - 1)


def looked_up(shape: StaticTreeShape) -> Mapping[str, int]:
    """Return the rows of the draft vocabulary that a draft reads: one a candidate."""
    return {names.DRAFT_VOCABULARY: shape.steps * shape.width}


def describe(shape: StaticTreeShape) -> str:
    """Return the shape in words."""
    return f"{shape.steps} heads, static tree of {shape.nodes - 1} nodes{describe_vocabulary(shape)}"
