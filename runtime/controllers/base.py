"""Controllers decide how much to speculate. The simplest one has a fixed budget."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from redraft.methods.base import resampled_nodes
from redraft.runtime.trees.offers import NO_TREE, Offer, Plan, StepLimits
from redraft.runtime.trees.tree import join, merge, prune, root_only
from redraft.types import Budget, Choice, OfferKind, Outcome, Tree

if TYPE_CHECKING:
    from redraft.runtime.requests.request import Request

Call = tuple[str, OfferKind]
"""A kind of drafter call: the drafter's id, and the kind of tree that it makes."""


class Controller(Protocol):
    """Limits the offers for a step's sequences, selects among them, and selects the part to verify.

    Each method takes the sequences of a batch that this controller serves, in one order.
    """

    weighs: bool
    """True if costs decide its tree sizes. It then cuts after the other controllers."""

    def begin(self, sequences: int, methods: str) -> None:
        """Begin a step.

        sequences: those of other controllers included.   methods: names of all their methods.
        """

    @abstractmethod
    def budget(self, seq: Request) -> Budget:
        """Return the budget of a draft now; nodes = 0 means no speculation."""

    def plan(
        self, batch: Sequence[Request], offers: Sequence[Sequence[Offer]], limits: Sequence[StepLimits]
    ) -> list[Plan]:
        """Return the offers to use for each sequence."""

    def cut(
        self, batch: Sequence[Request], plans: Sequence[Plan], made: Sequence[Tree | None], widest: int = 1
    ) -> list[Tree]:
        """Return the part worth verifying of the ready trees and of those in `made`.

        It cuts all trees together, since the largest one determines a call's cost. Without an offer, a tree is a root.
        widest: nodes of the largest tree that other controllers bring, root included.
        """

    def explain(self, seq: Request) -> Choice | None:
        """Return the inputs of this step's choice of a tree; None if the controller compares no costs."""

    def timed(self, offers_ms: float, made_ms: Mapping[Call, float], nodes: int) -> None:
        """Record the milliseconds of this step's offers and drafter calls, for the whole batch.

        nodes: of the largest verified tree, its root included.
        """

    def observe(self, seq: Request, plan: Plan, tree: Tree, outcome: Outcome) -> None:
        """Record the outcome of verifying `tree`. Called after plain steps too."""

    def ended(self, speculated: bool, host_ms: float) -> None:
        """End the step. host_ms: its time without the calls of verifier and drafters."""


class BudgetController(Controller):
    """Drafts within a budget at every step, and compares no costs. It prefers resampling to a fresh draft.

    A subclass defines `budget`.

    Nodes of a resampled tree are at most `resampled_nodes` of the budget's.
    """

    weighs = False

    def begin(self, sequences: int, methods: str) -> None:
        """Do nothing: budgets do not depend on the batch."""

    def plan(
        self, batch: Sequence[Request], offers: Sequence[Sequence[Offer]], limits: Sequence[StepLimits]
    ) -> list[Plan]:
        """Select resampling if it is possible, else a fresh draft, together with the ready trees."""
        return [self._plan(*each) for each in zip(batch, offers, limits, strict=True)]

    def _plan(self, seq: Request, offers: Sequence[Offer], limits: StepLimits) -> Plan:
        if limits is NO_TREE:
            return Plan(limits, root_only(seq.tokens[-1]))
        found = merged_ready(seq, offers)
        for kind in (OfferKind.RESAMPLE, OfferKind.FRESH):
            for offer in offers:
                if offer.key.kind is kind:
                    return Plan(limits, found, kind, offer)
        return Plan(limits, found, OfferKind.LOOKUP)

    def cut(
        self, batch: Sequence[Request], plans: Sequence[Plan], made: Sequence[Tree | None], widest: int = 1
    ) -> list[Tree]:
        """Merge each plan's trees, and cut them to the budget."""
        return [
            self._cut(plan, tree, self.budget(seq)) if plan.speculates else plan.found
            for seq, plan, tree in zip(batch, plans, made, strict=True)
        ]

    def _cut(self, plan: Plan, made: Tree | None, budget: Budget) -> Tree:
        """Return the part to verify. Of a resampled tree, only as many nodes stay as a resampled tree may have."""
        if made is not None and plan.kind is OfferKind.RESAMPLE:
            made = prune(made, resampled_nodes(budget.nodes))
        return join(plan.found, made, plan.limits, budget.nodes)

    def explain(self, seq: Request) -> None:
        """Return None: no costs are compared."""

    def timed(self, offers_ms: float, made_ms: Mapping[Call, float], nodes: int) -> None:
        """Ignore the times."""

    def observe(self, seq: Request, plan: Plan, tree: Tree, outcome: Outcome) -> None:
        """Ignore the outcome."""

    def ended(self, speculated: bool, host_ms: float) -> None:
        """Do nothing."""


class FixedBudget(BudgetController):
    """The same budget at every step; NO_SPECULATION is plain decoding."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def budget(self, seq: Request) -> Budget:
        """Return the fixed budget."""
        return self._budget


def merged_ready(seq: Request, offers: Sequence[Offer]) -> Tree:
    """Merge the ready trees; the root alone if no tree is ready."""
    found: Tree | None = None
    for offer in offers:
        if offer.tree is not None:
            found = offer.tree if found is None else merge(found, offer.tree)
    return root_only(seq.tokens[-1]) if found is None else found
