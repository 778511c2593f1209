"""Controllers decide how much to speculate. The simplest one has a fixed budget."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from redraft.methods.base import resampled_nodes
from redraft.runtime.trees.offers import NO_TREE, Offer, Plan, StepLimits
from redraft.runtime.trees.tree import join, merge, prune, root_only
from redraft.types import Budget, Choice, OfferKind, Tree

if TYPE_CHECKING:
    from redraft.runtime.requests.batch import Batch, RequestStep
    from redraft.runtime.requests.request import Request


class Controller(ABC):
    """Selects among the offers for the requests of a batch, selects the parts of their trees to verify, and learns.

    `batch.steps` has the requests that this controller serves.
    """

    weighs = False
    """True if costs decide its tree sizes. It then cuts after the other controllers."""

    @abstractmethod
    def plan(self, batch: Batch) -> None:
        """Ask for offers within a budget (`Batch.ask`), and set each step's plan and its ready tree."""

    @abstractmethod
    def cut(self, batch: Batch) -> None:
        """Set each step's tree: the part of its plan's ready trees and of its made tree that is worth verifying.

        Without an offer, a tree is a root. It is called if any request in the call asked for offers.
        """

    def observe(self, batch: Batch) -> None:  # noqa: B027 (only some controllers learn)
        """Learn from outcomes and times. Called after the tokens are committed, after plain steps too.

        A step without outcome, or with an error, teaches nothing.
        """

    def explain(self, request: Request) -> Choice | None:
        """Return the inputs of this step's choice of a tree, for traces; None if the controller compares no costs."""
        return None


class BudgetController(Controller):
    """Drafts within a budget at every step, and compares no costs. A subclass defines `budget`.

    It prefers resampling to a fresh draft, and takes both if they may be joined. Nodes of a resampled tree are at most
    `resampled_nodes` of the budget's, and those of both trees at most the budget's.
    """

    @abstractmethod
    def budget(self, request: Request) -> Budget:
        """Return the budget of a draft now; nodes = 0 means no speculation."""

    def plan(self, batch: Batch) -> None:
        """Select resampling if it is possible, else a fresh draft, or both, together with the ready trees."""
        for step in batch.steps:
            limits, offers = batch.ask(step, self.budget(step.request))
            if limits is not NO_TREE:
                step.use(self._plan(step.request, offers, limits))

    def _plan(self, request: Request, offers: Sequence[Offer], limits: StepLimits) -> Plan:
        first = {offer.key.kind: offer for offer in reversed(offers)}
        make = tuple([first[kind] for kind in (OfferKind.RESAMPLE, OfferKind.FRESH) if kind in first])
        return Plan(limits, merged_ready(request, offers), make if make and make[0].joins else make[:1])

    def cut(self, batch: Batch) -> None:
        """Merge each plan's trees, and cut them to the budget."""
        for step in batch.steps:
            if step.plan.speculates:
                step.tree = self._cut(step)

    def _cut(self, step: RequestStep) -> Tree:
        """Return the part to verify. Of a resampled tree, only as many nodes stay as a resampled tree may have."""
        plan, nodes = step.plan, self.budget(step.request).nodes
        made: Tree | None = None
        for offer, whole in step.made:
            tree = self._stopped(whole)
            if offer.key.kind is OfferKind.RESAMPLE:
                tree = prune(tree, resampled_nodes(nodes))
            made = tree if made is None else merge(made, tree)
        return join(plan.found, made, plan.limits, nodes)

    def _stopped(self, made: Tree) -> Tree:
        """Return the part of a new tree that comes before the controller would have ended it: here all of it."""
        return made


class FixedBudget(BudgetController):
    """The same budget at every step; NO_SPECULATION is plain decoding."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def budget(self, request: Request) -> Budget:
        """Return the fixed budget."""
        return self._budget


def merged_ready(request: Request, offers: Sequence[Offer]) -> Tree:
    """Merge the ready trees; the root alone if no tree is ready."""
    found: Tree | None = None
    for offer in offers:
        if offer.tree is not None:
            found = offer.tree if found is None else merge(found, offer.tree)
    return root_only(request.tokens[-1]) if found is None else found
