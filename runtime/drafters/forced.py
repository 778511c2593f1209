"""Forced tokens: it drafts the tokens that a request's constraint leaves no choice about, such as names of JSON keys.

A constraint forces bytes, and the usual tokens for them are drafted. The model may still choose other tokens for the
same bytes, so the drafter learns how often it does.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass

from redraft.runtime.drafters.base import Drafter
from redraft.runtime.drafters.learning import LEAST_PROBABILITY, moved
from redraft.runtime.offers import Offer, OfferKey
from redraft.runtime.sampling.constraints import Constraint, GrammarState
from redraft.runtime.sequence import Sequence
from redraft.runtime.tree import make_tree
from redraft.runtime.verifier import Verifier
from redraft.types import Budget, OfferKind, Outcome, Tree

_LEARNING_RATE = 1 / 16
_ASSUMED = 0.98
"""Share of forced tokens that the model chooses, before anything is learned."""


@dataclass(slots=True)
class Forced:
    """A constraint's state after the first `seen` tokens of a sequence, and the latest draft after them.

    rate: share of forced tokens that the model chose.
    """

    constraint: Constraint
    state: GrammarState
    seen: int
    rate: float = _ASSUMED
    drafted: Several[int] = ()


class ForcedDrafter(Drafter):
    """Drafts forced tokens. A request needs its constraint before it begins."""

    name = "forced"

    def __init__(self, verifier: Verifier) -> None:
        super().__init__(verifier)
        self._key = OfferKey(self.name, OfferKind.LOOKUP)

    def constrain(self, seq: Sequence, constraint: Constraint) -> None:
        """Set the constraint of `seq`."""
        state = constraint.begin(seq.tokens)
        seq.drafting[self] = Forced(constraint, state, len(seq.tokens))

    def offers(self, seq: Sequence, budget: Budget) -> Several[Offer]:
        """Return a chain of the tokens that must follow, while they are likely enough."""
        found: Forced = seq.drafting[self]
        for token in seq.tokens[found.seen :]:
            found.state = found.constraint.advance(found.state, token)
        found.seen = len(seq.tokens)
        forced = found.constraint.forced(found.state)[: min(budget.depth, budget.nodes)]
        probs = [1.0]
        while len(probs) <= len(forced) and (prob := probs[-1] * found.rate) > LEAST_PROBABILITY:
            probs.append(prob)
        found.drafted = forced[: len(probs) - 1]
        if not found.drafted:
            return ()
        tree = make_tree([seq.tokens[-1], *found.drafted], list(range(-1, len(found.drafted))), probs)
        return (Offer(self._key, tree),)

    def accept(self, seq: Sequence, tree: Tree, outcome: Outcome) -> None:
        """Learn which forced tokens the model chose, verified or not."""
        found: Forced = seq.drafting[self]
        drafted, found.drafted = found.drafted, ()
        for token, chosen in zip(drafted, outcome.tokens, strict=False):
            found.rate = moved(found.rate, token == chosen, _LEARNING_RATE)
            if token != chosen:
                return
