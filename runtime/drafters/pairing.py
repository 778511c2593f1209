"""Two drafters as one: a lookup, and a drafter with engines. The controller merges their trees."""

from __future__ import annotations

from collections.abc import Sequence as Several

from redraft.errors import UsageError
from redraft.runtime.drafters.base import Drafter
from redraft.runtime.offers import Offer
from redraft.runtime.sequence import Sequence
from redraft.types import Budget, Outcome, Tree


class Pair(Drafter):
    """Offers the trees of both drafters. An offer names the drafter that makes its tree."""

    def __init__(self, first: Drafter, second: Drafter) -> None:
        super().__init__(first.verifier)
        self.first = first
        self.second = second
        self.has_engines = first.has_engines or second.has_engines

    def begin(self, seq: Sequence) -> None:
        """Begin the request in both drafters."""
        self.first.begin(seq)
        self.second.begin(seq)

    def prefilled(self, seq: Sequence, slot: int, start: int, tokens: int) -> None:
        """Report the chunk to both drafters."""
        self.first.prefilled(seq, slot, start, tokens)
        self.second.prefilled(seq, slot, start, tokens)

    def offers(self, seq: Sequence, budget: Budget) -> Several[Offer]:
        """Return the offers of both drafters."""
        return (*self.first.offers(seq, budget), *self.second.offers(seq, budget))

    def move(self, seq: Sequence, source: int, target: int) -> None:
        """Move the request in both drafters."""
        self.first.move(seq, source, target)
        self.second.move(seq, source, target)

    def accept(self, seq: Sequence, tree: Tree, outcome: Outcome) -> None:
        """Report the outcome to both drafters."""
        self.first.accept(seq, tree, outcome)
        self.second.accept(seq, tree, outcome)

    def finish(self, seq: Sequence) -> None:
        """Finish the request in both drafters."""
        self.first.finish(seq)
        self.second.finish(seq)

    def check_tenant(self) -> None:
        """Accept the tenant if one of the two keeps earlier outputs. Otherwise raise the first one's error."""
        try:
            self.first.check_tenant()
        except UsageError as error:
            try:
                self.second.check_tenant()
            except UsageError:
                raise error from None

    def forget(self, tenant: str) -> None:
        """See `Drafter.forget`."""
        self.first.forget(tenant)
        self.second.forget(tenant)
