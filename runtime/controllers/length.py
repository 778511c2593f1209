"""The controller of draft lengths: a rule chooses each draft's length from the acceptance of earlier ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from redraft.runtime.controllers.base import BudgetController
from redraft.runtime.controllers.rules import LengthRule
from redraft.runtime.trees.tree import depths_of
from redraft.types import Budget, OfferKind, Tree

if TYPE_CHECKING:
    from redraft.runtime.requests.batch import Batch, RequestStep
    from redraft.runtime.requests.request import Request


class LengthController(BudgetController):
    """Drafts as long as a rule says. The state of a sequence is the rule's average length.

    A budget has γ levels of at most the rule's width, so chains of γ tokens by default, and γ times the width nodes in
    all. Its confidence is the rule's, so that a drafter which can stop inside a call stops where the rule would, and
    nowhere else.

    Every request starts with the rule's first length. Fresh drafts and looked-up trees change it. Resampled trees alone
    do not, since their depth is what the last draft left unused.
    """

    def __init__(self, rule: LengthRule) -> None:
        self._rule = rule

    def budget(self, request: Request) -> Budget:
        rule, length = self._rule, self.length(request)
        return Budget(length * rule.width, length, rule.width, rule.confidence)

    def length(self, request: Request) -> int:
        """Return γ, the length of the next draft of `request`."""
        return self._rule.length(self._average(request))

    def _average(self, request: Request) -> float:
        return float(self._rule.gamma) if request.control is None else request.control

    def _stopped(self, made: Tree) -> Tree:
        """Return the new tree up to where the rule ends it. Of drawn nodes, probabilities are unknown."""
        return made if made.draws else self._rule.stop(made)

    def observe(self, batch: Batch) -> None:
        """Update the average lengths."""
        for step in batch.steps:
            if step.outcome is not None and step.outcome.error is None:
                self._learn(step, step.outcome.accepted)

    def _learn(self, step: RequestStep, accepted: int) -> None:
        request, tree = step.request, step.tree
        if step.plan.kind in (OfferKind.FRESH, OfferKind.UNION, OfferKind.LOOKUP) and len(tree) > 1:
            levels = max(depths_of(tree.parents.tolist()))
            limit = step.plan.limits.budget
            room = min(limit.depth, limit.nodes)
            request.control = self._rule.update(self._average(request), levels, accepted, room)
