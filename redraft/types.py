"""The frozen values that pass between drafting, verification and control, each for one sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from redraft.errors import RedraftError, UsageError

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class Budget:
    """Limits of a tree: at most `nodes` nodes without the root, `depth` levels, and `width` nodes a level.

    `nodes = 0` turns speculation off. If `depth` or `width` is below the drafter's, a device's trees are copied to the
    host and cut there, which makes a step slower. Limiting only `nodes` needs no copy.

    confidence: a draft ends after a node whose probability, given its parent, is below this. The controller drops what
                follows such a node, so a drafter that stops there saves its time. 0 never ends a draft, None leaves the
                end to the drafter.
    share:      a drafter that can stop ends a draft after a node whose joint probability is below this, since a later
                node would cost more than it promises. The controller still decides how much of the draft is verified.
    """

    nodes: int
    depth: int
    width: int
    confidence: float | None = None
    share: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("nodes", self.nodes), ("depth", self.depth), ("width", self.width)):
            if not isinstance(value, int) or value < 0:
                raise UsageError(f"a budget's {name} must be a whole number from 0, not {value!r}")
        if self.confidence is not None and not 0 <= self.confidence <= 1:
            raise UsageError(f"a budget's confidence must be a probability from 0 to 1, not {self.confidence!r}")


NO_SPECULATION = Budget(nodes=0, depth=0, width=0)


@dataclass(frozen=True)
class Costs:
    """Milliseconds of one call: a fresh draft, and a resampled one. A drafter without engines costs nothing."""

    fresh_ms: float = 0.0
    resample_ms: float = 0.0


class OfferKind(StrEnum):
    """The way in which a drafter makes a tree.

    NONE: no tree, plain decoding.   LOOKUP: known text, the sequence's own or a prediction.   RESAMPLE: unused hidden
    states of the last draft.   FRESH: a new draft. Trees of the last two are merged with the lookup's, unless they stay
    on a device.   UNION: a resampled tree and a new draft of one step, merged.
    """

    NONE = "none"
    LOOKUP = "lookup"
    RESAMPLE = "resample"
    FRESH = "fresh"
    UNION = "union"


class Proposal(Protocol):
    """The distributions q that a tree's candidates were drawn from, the first child first.

    A node's children were drawn from softmax(logits(depth, token)) for the node's own depth and token; the root's depth
    is 0. Valid until the next draft for the slot.
    """

    @property
    def tokens(self) -> IntArray | None:
        """Token of each of the H columns, ascending; None if column t is token t."""

    def logits(self, depth: int, token: int) -> FloatArray:
        """Return new logits, float32[H]."""


class Tree(Protocol):
    """A tree of n candidate continuations of one sequence. Node 0 is the root, the last committed token."""

    @property
    def tokens(self) -> IntArray:
        """Full-vocabulary ids, int64[n]."""

    @property
    def parents(self) -> IntArray:
        """The parent of each node, int64[n], before its children. -1 for the root."""

    @property
    def log_probs(self) -> FloatArray:
        """Joint log probability under the drafter, float32[n]; 0 for the root. An estimate if it has no model."""

    @property
    def on_device(self) -> bool:
        """True if the fields are on a device, with nodes in order of probability. Reading a field copies it."""

    @property
    def draws(self) -> Draws | None:
        """The random draws of nodes; None if all were chosen."""

    @property
    def cut_at_end(self) -> bool:
        """True if a cut may only drop the last nodes: the tree is on a device, or its nodes were drawn (`Draws`)."""

    @property
    def pinned(self) -> BoolArray | None:
        """True for nodes that are verified for their target tokens, likely or not, bool[n]; None without such nodes.

        The root is not pinned, and all other ancestors of a pinned node are. A cut keeps all pinned nodes. If not all
        of them fit, the part that is left has none. Only ready trees pin nodes.
        """

    def __len__(self) -> int:
        """Number of nodes, n."""

    def first(self, nodes: int) -> Tree:
        """Return the root and the `nodes` nodes after it."""


@dataclass(frozen=True, eq=False)
class Draws:
    """The random draws of a tree's nodes, for rejection sampling.

    proposal: the distributions of the draws.
    order:    place of each node among all draws, int64[n]; -1 if it was not drawn.
    chosen:   bool[n], true if the node was chosen without a random number. A node may be both, from two drafters.
    repeats:  true if siblings are independent draws, which may be equal. Otherwise they are draws without replacement.

    Rejection sampling is correct only if dropping a node does not depend on its token or on any other token that is
    dropped. So neither a drafter's stop nor a cut may read them: it may read submitted tokens, and numbers that were
    known before the draw. Draws come in their order in a drafter's tree, so the first k nodes are such a cut for each k
    that is chosen so.
    """

    proposal: Proposal
    order: IntArray
    chosen: BoolArray
    repeats: bool = False

    @classmethod
    def of(cls, proposal: Proposal | None, nodes: int) -> Draws | None:
        """Return the draws of a drafter's tree of `nodes` nodes; None if nothing was drawn."""
        order = np.arange(-1, nodes - 1)
        return None if proposal is None else cls(proposal, order, order < 0)

    def part(self, parents: IntArray, keep: Sequence[int] | slice) -> Draws:
        """Return the draws of some nodes of a tree with these parents.

        Raises ValueError if the part drops a node and keeps one that was drawn after it from the same parent.
        """
        kept = np.zeros(len(self.order), np.bool_)
        kept[keep] = True
        ended = set()
        for node in np.argsort(self.order).tolist():
            parent = int(parents[node])
            if self.order[node] >= 0 and not kept[node]:
                ended.add(parent)
            elif self.order[node] >= 0 and parent in ended:
                raise ValueError(f"a cut keeps node {node} and drops one that was drawn before it from node {parent}")
        return Draws(self.proposal, self.order[keep], self.chosen[keep], self.repeats)


@dataclass(frozen=True)
class DraftTree:
    """A tree on the host, with the fields of `Tree`."""

    tokens: IntArray
    parents: IntArray
    log_probs: FloatArray
    draws: Draws | None = None
    pinned: BoolArray | None = None

    on_device: ClassVar[bool] = False

    @property
    def cut_at_end(self) -> bool:
        """True if nodes were drawn."""
        return self.draws is not None

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, nodes: int) -> DraftTree:
        """Return the root and the `nodes` nodes after it."""
        return self.part(slice(nodes + 1), self.parents[: nodes + 1])

    def part(self, keep: Sequence[int] | slice, parents: IntArray) -> DraftTree:
        """Return nodes of this tree, root first, with their new parents. Raises ValueError as `Draws.part`."""
        draws = self.draws and self.draws.part(self.parents, keep)
        pinned = None if self.pinned is None else self.pinned[keep]
        if pinned is not None and pinned.sum() < self.pinned.sum():  # type: ignore[union-attr]
            pinned = None
        return DraftTree(self.tokens[keep], parents, self.log_probs[keep], draws, pinned)


@dataclass(frozen=True, eq=False)
class Together:
    """The estimates from which a controller chose the sizes of a batch's trees.

    rate:   tokens that a millisecond of the batch's call must bring.
    packed: True if a call computes the nodes of all trees; False if it pads them to the size of the largest.
    shares: probability of each node to be accepted, in the order in which nodes are added to the call. Padded calls add
            the n-th node of all trees at once, whose tokens are their sum.
    least:  how many are verified whatever they bring: all pinned nodes, or those of the tree with most.
    """

    rate: float
    packed: bool
    shares: Sequence[float]
    least: int


@dataclass(frozen=True)
class Choice:
    """The estimates from which the controller chose a step's tree.

    rate:   tokens that a millisecond must bring.
    gains:  expected tokens of each kind of offer minus its cost. The controller takes the first of the largest.
    tried:  True if it takes a fresh draft whatever its gain, to learn the gain.
    found:  the lookup's tree.   whole: the largest tree that could be verified; `rate` decides how much of it is.
    shares: acceptance rate of each node after the root, from which a tree on a device was cut.
    table_ms: estimated time of the call; entry 1 + k is that with k drafted nodes, of all trees if they are packed.
    probed: True if it verifies nodes that do not seem to pay, to learn their cost.
    together: in a batch, the estimates of all its trees.
    least:  nodes that are verified whatever they bring: the pinned ones.
    """

    rate: float
    gains: Mapping[OfferKind, float]
    tried: bool
    found: Tree
    whole: Tree
    shares: Sequence[float] | None = None
    table_ms: Sequence[float] = ()
    probed: bool = False
    together: Together | None = None
    least: int = 0


NOT_REACHED = -1
"""The target token of nodes that a sampler did not reach."""


class Outcome(NamedTuple):
    """The outcome of verifying one tree.

    target_token_ids: the verifier's token after each of the n nodes, or NOT_REACHED. After a pinned node it is known,
                 but if the node was not accepted, it may ignore logits processors.
    path:        accepted nodes in order, without the root: rows of the KV and feature buffers of this call.
    bonus:       the verifier's own token after the last accepted node; its KV is not computed yet.
    tokens:      tokens that this step adds to the sequence: the accepted ones, then the bonus.
    error:       why no token can follow `tokens`, which then have no bonus. The request ends with it, unless it ended
                 with one of these tokens.
    """

    target_token_ids: Sequence[int]
    path: tuple[int, ...]
    bonus: int
    tokens: tuple[int, ...] = ()
    error: RedraftError | None = None

    @property
    def accepted(self) -> int:
        """Number of drafted tokens kept."""
        return len(self.path)
