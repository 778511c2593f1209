"""The frozen values that pass between drafting, verification and control, each for one sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from redraft.errors import UsageError

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
    """

    nodes: int
    depth: int
    width: int
    confidence: float | None = None

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
    """How a drafter makes a tree.

    NONE: no tree, plain decoding.   LOOKUP: known text, the sequence's own or a prediction.   RESAMPLE: unused hidden
    states of the last draft.   FRESH: a new draft. Trees of the last two are merged with the lookup's, unless they stay
    on a device.
    """

    NONE = "none"
    LOOKUP = "lookup"
    RESAMPLE = "resample"
    FRESH = "fresh"


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

    def __len__(self) -> int:
        """Number of nodes, n."""

    def first(self, nodes: int) -> Tree:
        """Return the root and the `nodes` nodes after it."""


@dataclass(frozen=True)
class DraftTree:
    """A tree on the host, with the fields of `Tree`."""

    tokens: IntArray
    parents: IntArray
    log_probs: FloatArray

    on_device: ClassVar[bool] = False

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, nodes: int) -> DraftTree:
        """Return the root and the `nodes` nodes after it."""
        end = nodes + 1
        return DraftTree(self.tokens[:end], self.parents[:end], self.log_probs[:end])


@dataclass(frozen=True)
class Choice:
    """The estimates from which the controller chose a step's tree.

    rate:   tokens that a millisecond must bring.
    gains:  expected tokens of each kind of offer minus its cost. The controller takes the first of the largest.
    tried:  True if it takes a fresh draft whatever its gain, to learn the gain, or since the batch drafts anyway.
    found:  the lookup's tree.   whole: the largest tree that could be verified; `rate` decides how much of it is.
    shares: acceptance rate of each node after the root, from which a tree on a device was cut.
    table_ms: estimated time of verifying n nodes.
    probed: True if it verifies nodes that do not seem to pay, to learn their cost.
    together: in a batch, the rate of all its sequences, and the tokens that the n-th node of all their trees brings.
    """

    rate: float
    gains: Mapping[OfferKind, float]
    tried: bool
    found: Tree
    whole: Tree
    shares: Sequence[float] | None = None
    table_ms: Sequence[float] = ()
    probed: bool = False
    together: tuple[float, Sequence[float]] | None = None


class Outcome(NamedTuple):
    """The outcome of verifying one tree.

    target_token_ids: the verifier's token after each of the n nodes.
    path:        accepted nodes in order, without the root: rows of the KV and feature buffers of this call.
    bonus:       the verifier's own token after the last accepted node; its KV is not computed yet.
    tokens:      tokens that this step adds to the sequence: the accepted ones, then the bonus.
    """

    target_token_ids: Sequence[int]
    path: tuple[int, ...]
    bonus: int
    tokens: tuple[int, ...] = ()

    @property
    def accepted(self) -> int:
        """Number of drafted tokens kept."""
        return len(self.path)
