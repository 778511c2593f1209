"""What drafters can do for a sequence in a step, and what the step takes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from redraft.types import NO_SPECULATION, Budget, OfferKind, Tree

if TYPE_CHECKING:
    from redraft.runtime.controller import Controller
    from redraft.runtime.drafters.base import Drafter, TreeMaker


class OfferKey(NamedTuple):
    """What offers have in common whose trees are equally good: drafter, kind, and steps that are left to resample."""

    drafter: str
    kind: OfferKind
    steps: int = 0


@dataclass(slots=True, eq=False)
class Offer:
    """A tree that a drafter has for a sequence, or could make now.

    tree: the tree at hand; else `maker` makes it, in a call whose cost the controller knows.
    """

    key: OfferKey
    tree: Tree | None = None
    maker: TreeMaker | None = None


class StepLimits(NamedTuple):
    """How large the tree of a sequence may be in a step, and how its rows lie.

    budget:     nodes, depth and width.
    cache_len:  rows in the KV buffers; node i is row cache_len + i.
    branches:   False if the verifier takes chains only.
    block_rows: rows in a block of the verifier's sums; None if they have no blocks.
    """

    budget: Budget
    cache_len: int = 0
    branches: bool = True
    block_rows: int | None = None


NO_TREE = StepLimits(NO_SPECULATION)
"""Limits of a sequence that does not speculate in a step."""


@dataclass(slots=True, eq=False)
class Plan:
    """What a step takes of a sequence's offers.

    found:  the trees at hand, merged; the root alone if there are none.
    kind:   of the offer that is taken, LOOKUP if no tree is to be made; NONE if the sequence does not speculate.
    make:   the offer whose tree is to be made; None if the trees at hand are enough.
    """

    limits: StepLimits
    found: Tree
    kind: OfferKind = OfferKind.NONE
    make: Offer | None = None

    @property
    def speculates(self) -> bool:
        """True if offers were asked for."""
        return self.kind is not OfferKind.NONE


@dataclass(frozen=True, slots=True, eq=False)
class Speculation:
    """How a request speculates.

    method: a word for all requests that learn from each other: the drafter's, with what else tells them apart.
    most:   the largest budget of its trees.
    """

    drafter: Drafter
    controller: Controller
    method: str = ""
    most: Budget | None = None
