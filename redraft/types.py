"""The values that pass between drafting, verification and control. All frozen; all of one sequence."""

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
    """How much may be drafted: `nodes` to verify besides the root, at most `depth` deep and `width` wide a level.

    `nodes = 0` means: do not speculate now. On a device, a drafter's trees are copied to the host and cut there if
    `depth` or `width` is smaller than what it makes, which makes a step slower; `nodes` alone needs no copy.
    """

    nodes: int
    depth: int
    width: int

    def __post_init__(self) -> None:
        for name, value in (("nodes", self.nodes), ("depth", self.depth), ("width", self.width)):
            if not isinstance(value, int) or value < 0:
                raise UsageError(f"a budget's {name} must be a whole number from 0, not {value!r}")


NO_SPECULATION = Budget(nodes=0, depth=0, width=0)


@dataclass(frozen=True)
class Costs:
    """Milliseconds of one call: a fresh draft, and a resampled one. A drafter without engines costs nothing."""

    fresh_ms: float = 0.0
    resample_ms: float = 0.0


class OfferKind(StrEnum):
    """How a drafter makes a tree.

    NONE: no tree, plain decoding.   LOOKUP: known text, the sequence's own or a prediction.   RESAMPLE: hidden states
    that the last draft left over.   FRESH: a new draft. Trees of the last two are merged with the lookup's, unless they
    stay on a device.
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
        """The parent of each node, int64[n]: -1 for the root; a parent comes before its children."""

    @property
    def log_probs(self) -> FloatArray:
        """Joint log probability under the drafter, float32[n]: its estimate if it has no model; 0 for the root."""

    @property
    def on_device(self) -> bool:
        """True if the fields lie on a device, where the nodes come likeliest first. Asking for a field copies it."""

    def __len__(self) -> int:
        """n."""

    def first(self, nodes: int) -> Tree:
        """The root and the `nodes` nodes after it."""


@dataclass(frozen=True)
class DraftTree:
    """A tree on the host. See `Tree` for its fields."""

    tokens: IntArray
    parents: IntArray
    log_probs: FloatArray

    on_device: ClassVar[bool] = False

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, nodes: int) -> DraftTree:
        """See `Tree.first`."""
        end = nodes + 1
        return DraftTree(self.tokens[:end], self.parents[:end], self.log_probs[:end])


@dataclass(frozen=True)
class Choice:
    """What a step's tree was chosen from, where it was weighed.

    rate:   tokens that a millisecond must bring.
    gains:  tokens expected of each kind of offer beyond what it costs; the first of the largest is taken.
    tried:  a fresh draft is taken whatever is expected of it, to learn what it brings now, or since the batch has one.
    found:  what the lookup had.   whole: all that could be verified, of which `rate` decides how much is.
    shares: of a tree that stayed on a device, how often the nodes after the root are kept, by which that was decided.
    table_ms: what verifying so many nodes was believed to cost.
    probed: nodes are verified that do not seem to pay, to learn what they cost.
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
    """What one verification said of one tree.

    target_token_ids: the verifier's token after every node, n of them.
    path:        nodes accepted, in order, root excluded: rows of the KV and feature buffers of this call.
    bonus:       the verifier's own token after the last accepted node; its KV is not computed yet.
    tokens:      accepted tokens, then the bonus: what this step adds to the sequence.
    """

    target_token_ids: Sequence[int]
    path: tuple[int, ...]
    bonus: int
    tokens: tuple[int, ...] = ()

    @property
    def accepted(self) -> int:
        """Number of drafted tokens kept."""
        return len(self.path)
