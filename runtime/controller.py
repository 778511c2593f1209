"""Who decides how much to speculate, and the decision that never changes: a fixed budget."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Several
from typing import Protocol

from redraft.runtime.offers import NO_TREE, Offer, Plan, StepLimits
from redraft.runtime.sequence import Sequence
from redraft.runtime.tree import cut, merge, root_only
from redraft.types import Budget, Choice, OfferKind, Outcome, Tree

Call = tuple[str, OfferKind]
"""A kind of call of a drafter: its id, and the kind of tree that it makes."""


class Controller(Protocol):
    """Decides for the sequences of a step what may be offered, which offers are taken, and what of it is verified.

    Each method takes the sequences of a batch that this controller serves, in one order.
    """

    weighs: bool
    """True if it chooses sizes by what they cost: then it cuts after the others."""

    def begin(self, sequences: int, methods: str) -> None:
        """A step over so many sequences begins, other controllers' too. methods: the words for all their drafters."""

    def budget(self, seq: Sequence) -> Budget:
        """Return what may be drafted now; nodes = 0 means: do not speculate."""

    def plan(
        self, batch: Several[Sequence], offers: Several[Several[Offer]], limits: Several[StepLimits]
    ) -> list[Plan]:
        """Return what to take of each sequence's offers."""

    def cut(
        self, batch: Several[Sequence], plans: Several[Plan], made: Several[Tree | None], widest: int = 1
    ) -> list[Tree]:
        """Return the part worth verifying of the trees at hand and of those that were made to plan.

        All together, since a call costs what its widest tree does. A sequence without an offer gets its root.
        widest: nodes of the largest tree that other controllers bring, root included.
        """

    def explain(self, seq: Sequence) -> Choice | None:
        """Return what the tree of this step was chosen from; None if nothing was weighed."""

    def timed(self, offers_ms: float, made_ms: Mapping[Call, float], nodes: int) -> None:
        """Tell how long this step's offers and calls of drafters took, for the whole batch.

        nodes: of the largest tree that was verified, its root included.
        """

    def observe(self, seq: Sequence, plan: Plan, tree: Tree, outcome: Outcome) -> None:
        """Tell that `tree` was verified with this outcome. Called after plain steps too."""

    def ended(self, speculated: bool, host_ms: float) -> None:
        """Tell that the step has ended. host_ms: what it took besides the calls of verifier and drafters."""


class FixedBudget:
    """The same budget at every step, resampling if possible; with NO_SPECULATION, plain decoding."""

    weighs = False

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def begin(self, sequences: int, methods: str) -> None:
        """See `Controller.begin`."""

    def budget(self, seq: Sequence) -> Budget:
        """See `Controller.budget`."""
        return self._budget

    def plan(
        self, batch: Several[Sequence], offers: Several[Several[Offer]], limits: Several[StepLimits]
    ) -> list[Plan]:
        """See `Controller.plan`: what can be resampled, else a fresh draft, with the trees at hand."""
        return [self._plan(*each) for each in zip(batch, offers, limits, strict=True)]

    def _plan(self, seq: Sequence, offers: Several[Offer], limits: StepLimits) -> Plan:
        if limits is NO_TREE:
            return Plan(limits, root_only(seq.tokens[-1]))
        found = at_hand(seq, offers)
        for kind in (OfferKind.RESAMPLE, OfferKind.FRESH):
            for offer in offers:
                if offer.key.kind is kind:
                    return Plan(limits, found, kind, offer)
        return Plan(limits, found, OfferKind.LOOKUP)

    def cut(
        self, batch: Several[Sequence], plans: Several[Plan], made: Several[Tree | None], widest: int = 1
    ) -> list[Tree]:
        """See `Controller.cut`."""
        return [
            cut(_joined(plan.found, tree), plan.limits, self._budget.nodes) if plan.speculates else plan.found
            for plan, tree in zip(plans, made, strict=True)
        ]

    def explain(self, seq: Sequence) -> None:
        """See `Controller.explain`."""

    def timed(self, offers_ms: float, made_ms: Mapping[Call, float], nodes: int) -> None:
        """See `Controller.timed`."""

    def observe(self, seq: Sequence, plan: Plan, tree: Tree, outcome: Outcome) -> None:
        """See `Controller.observe`."""

    def ended(self, speculated: bool, host_ms: float) -> None:
        """See `Controller.ended`."""


def at_hand(seq: Sequence, offers: Several[Offer]) -> Tree:
    """The trees that need not be made, merged; the root alone if there are none."""
    found: Tree | None = None
    for offer in offers:
        if offer.tree is not None:
            found = offer.tree if found is None else merge(found, offer.tree)
    return root_only(seq.tokens[-1]) if found is None else found


def _joined(found: Tree, made: Tree | None) -> Tree:
    """Two trees as one. A tree that stays on a device is copied for that, but not to join a root alone."""
    if made is None:
        return found
    return made if len(found) == 1 else merge(found, made)
