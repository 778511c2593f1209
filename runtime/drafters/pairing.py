"""Two drafters as one: a lookup and a drafter with engines, whose trees the controller merges."""

from __future__ import annotations

from collections.abc import Sequence as Several

from redraft.errors import UsageError
from redraft.runtime.drafters.base import Drafter
from redraft.runtime.offers import Offer
from redraft.runtime.sequence import Sequence
from redraft.types import Budget, Outcome, Tree


class Pair(Drafter):
    """Offers what each of the two offers. An offer names the drafter that makes its tree."""

    def __init__(self, first: Drafter, second: Drafter) -> None:
        super().__init__(first.verifier)
        self.first = first
        self.second = second
        self.has_engines = first.has_engines or second.has_engines

    def begin(self, seq: Sequence) -> None:
        """See `Drafter.begin`."""
        self.first.begin(seq)
        self.second.begin(seq)

    def prefilled(self, seq: Sequence, slot: int, start: int, tokens: int) -> None:
        """See `Drafter.prefilled`."""
        self.first.prefilled(seq, slot, start, tokens)
        self.second.prefilled(seq, slot, start, tokens)

    def offers(self, seq: Sequence, budget: Budget) -> Several[Offer]:
        """See `Drafter.offers`."""
        return (*self.first.offers(seq, budget), *self.second.offers(seq, budget))

    def move(self, seq: Sequence, source: int, target: int) -> None:
        """See `Drafter.move`."""
        self.first.move(seq, source, target)
        self.second.move(seq, source, target)

    def accept(self, seq: Sequence, tree: Tree, outcome: Outcome) -> None:
        """See `Drafter.accept`."""
        self.first.accept(seq, tree, outcome)
        self.second.accept(seq, tree, outcome)

    def finish(self, seq: Sequence) -> None:
        """See `Drafter.finish`."""
        self.first.finish(seq)
        self.second.finish(seq)

    def check_tenant(self) -> None:
        """See `Drafter.check_tenant`: one of the two keeps earlier outputs. Raises the first one's error."""
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
