"""The controller of draft lengths: a rule chooses each draft's length from the acceptance of earlier ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from redraft.runtime.controllers.base import BudgetController
from redraft.runtime.controllers.rules import LengthRule
from redraft.runtime.trees.offers import Plan
from redraft.runtime.trees.tree import depths_of
from redraft.types import Budget, OfferKind, Outcome, Tree

if TYPE_CHECKING:
    from redraft.runtime.requests.request import Request


class LengthController(BudgetController):
    """Drafts as long as a rule says. The state of a sequence is the rule's average length.

    A budget has γ levels of at most the rule's width, so chains of γ tokens by default, and γ times the width nodes in
    all. Its confidence is the rule's, so that a drafter which can stop inside a call stops where the rule would, and
    nowhere else.

    Every request starts with the rule's first length. Fresh drafts and looked-up trees change it. Resampled trees do
    not, since their depth is what the last draft left unused.
    """

    def __init__(self, rule: LengthRule) -> None:
        self._rule = rule

    def budget(self, seq: Request) -> Budget:
        rule, length = self._rule, self.length(seq)
        return Budget(length * rule.width, length, rule.width, rule.confidence)

    def length(self, seq: Request) -> int:
        """Return γ, the length of the next draft of `seq`."""
        return self._rule.length(self._average(seq))

    def _average(self, seq: Request) -> float:
        return float(self._rule.gamma) if seq.control is None else seq.control

    def _cut(self, plan: Plan, made: Tree | None, budget: Budget) -> Tree:
        """Return the part to verify, up to where the rule ends a draft. Of drawn nodes, probabilities are unknown."""
        return super()._cut(plan, made if made is None or made.draws else self._rule.stop(made), budget)

    def observe(self, seq: Request, plan: Plan, tree: Tree, outcome: Outcome) -> None:
        """Update the sequence's average length."""
        if plan.kind in (OfferKind.FRESH, OfferKind.LOOKUP) and len(tree) > 1:
            seq.control = self._rule.update(self._average(seq), max(depths_of(tree.parents.tolist())), outcome.accepted)
