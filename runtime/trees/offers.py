"""The trees that drafters offer for a sequence in a step, and the offers that the step uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from redraft.types import NO_SPECULATION, Budget, OfferKind, Tree

if TYPE_CHECKING:
    from redraft.runtime.controllers.base import Controller
    from redraft.runtime.drafters.base import Drafter, TreeMaker


class OfferKey(NamedTuple):
    """Key of offers whose trees are equally good: drafter, kind, and the steps that remain to resample."""

    drafter: str
    kind: OfferKind
    steps: int = 0


@dataclass(slots=True, eq=False)
class Offer:
    """A tree that a drafter has for a sequence, or could make now.

    tree:    the ready tree; None if `maker` has to make it, in a call whose cost the controller knows.
    step_ms: milliseconds of one more level, if the maker stops where a budget says so; 0 if all levels cost the same.
    joins:   of a resampled tree: true if the same step may draft anew too, and verify both trees as one.
    waiting: of a fresh draft: rows that the maker has put off, and computes first.
    """

    key: OfferKey
    tree: Tree | None = None
    maker: TreeMaker | None = None
    step_ms: float = 0.0
    joins: bool = False
    waiting: int = 0


class StepLimits(NamedTuple):
    """Limits of a sequence's tree in a step, and the position of its rows.

    budget:     nodes, depth and width.
    cache_len:  rows in the KV buffers; node i is row cache_len + i.
    branches:   False if the verifier takes chains only.
    block_rows: rows in a block of the verifier's sums; None if its sums have no blocks.
    """

    budget: Budget
    cache_len: int = 0
    branches: bool = True
    block_rows: int | None = None


NO_TREE = StepLimits(NO_SPECULATION)
"""Limits of a sequence that does not speculate in a step."""


@dataclass(slots=True, eq=False)
class Plan:
    """The offers that a step uses for one sequence.

    found:  the ready trees, merged; the root alone if no tree is ready.
    make:   the offers whose trees are to be made: none if the ready trees are enough, at most one of each kind.
    """

    limits: StepLimits
    found: Tree
    make: tuple[Offer, ...] = ()

    @property
    def speculates(self) -> bool:
        """True if the step asked for offers."""
        return self.limits is not NO_TREE

    @property
    def kind(self) -> OfferKind:
        """The kind of the trees to make; LOOKUP for none, NONE if the sequence does not speculate."""
        if self.make:
            return self.make[0].key.kind if len(self.make) == 1 else OfferKind.UNION
        return OfferKind.LOOKUP if self.speculates else OfferKind.NONE

    def offer_of(self, maker: TreeMaker, kind: OfferKind) -> Offer | None:
        """Return the offer whose tree this drafter has to make in a call of this kind."""
        return next((offer for offer in self.make if offer.maker is maker and offer.key.kind is kind), None)


@dataclass(frozen=True, slots=True, eq=False)
class Speculation:
    """A request's drafter, controller and limits.

    method: a name that requests share if they learn from each other: the drafter's, and the settings that matter.
    most:   the largest budget of its trees.
    """

    drafter: Drafter
    controller: Controller
    method: str = ""
    most: Budget | None = None
