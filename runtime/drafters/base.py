"""The interface of drafting methods: begin, offer, accept. Methods that make trees also draft and resample."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Self

from redraft.engines.bundle import Bundle
from redraft.errors import UsageError
from redraft.runtime.requests.request import Request
from redraft.runtime.steps.verifier import Verifier
from redraft.runtime.trees.offers import Offer, OfferKey
from redraft.types import Budget, OfferKind, Outcome, Tree

PREFIX_BLOCK = 16
"""Requests share rows of equal prefixes in blocks of this many."""


class Drafter(ABC):
    """A drafting method, opened once for all requests.

    Its state of a request is `seq.drafting[self]`; the drafter itself holds data that all requests share. A method that
    reads hidden states is a `redraft.runtime.steps.verifier.FeatureReader` that attaches itself to the verifier.
    """

    has_engines: bool = False
    """True if it runs engines of its own."""
    branches: bool = False
    """True if it needs trees that branch, even if the verifier then opens another engine. A budget may forbid them."""
    name: str = ""
    """The drafter's id in the bundle, or its method's id."""
    closed: bool = False
    """True if another drafter has taken its place, and requests can no longer begin with it."""

    def __init__(self, verifier: Verifier) -> None:
        self.verifier = verifier

    @classmethod
    def create(
        cls, verifier: Verifier, options: Mapping[str, Any], bundle: Bundle | None = None, drafter: str = ""
    ) -> Self:
        """Return the drafter with these options. Raises UsageError for an option that the method lacks.

        bundle, drafter: a method with engines uses the bundle's drafter with this id.
        """
        if options:
            raise UsageError(f"this method has no option {', '.join(options)}", "leave it out")
        return cls(verifier)

    @property
    def parts(self) -> tuple[Drafter, ...]:
        """The drafters that draft together here: itself, or those of a pair."""
        return (self,)

    def close(self) -> None:
        """Let the verifier read nothing for it any more. No request may be drafting with it."""
        self.closed = True

    def begin(self, seq: Request) -> None:  # noqa: B027 (only some methods need it)
        """Begin the admitted request `seq`. Its tokens are known, but none is computed yet."""

    def resume(self, seq: Request, earlier: Request, rows: int) -> int:
        """Begin `seq`, whose first `rows` tokens are those of `earlier`, a request that has left its slot.

        Takes the state of these rows over; `move` copies it if `seq` has another slot. Returns the number of rows that
        the verifier need not compute again, a multiple of PREFIX_BLOCK as `rows` is.
        """
        self.begin(seq)
        return rows

    def prefilled(self, seq: Request, slot: int, start: int, tokens: int) -> None:  # noqa: B027 (as above)
        """Note a computed chunk of `seq` in this slot: `tokens` tokens from position `start` on."""

    @abstractmethod
    def offers(self, seq: Request, budget: Budget) -> Sequence[Offer]:
        """Return the ready trees for `seq` within a budget, and those that the drafter could make now."""

    def move(self, seq: Request, source: int, target: int) -> None:  # noqa: B027 (only some methods need it)
        """Move the state of `seq` from one slot to another."""

    def accept(self, seq: Request, tree: Tree, outcome: Outcome) -> None:  # noqa: B027 (as above)
        """Learn that `tree` was verified and `outcome` committed, also in plain steps."""

    def finish(self, seq: Request) -> None:  # noqa: B027 (as above)
        """Keep data of `seq` that later requests may use. Its last token was committed."""

    def check_tenant(self) -> None:
        """Raise UsageError if the method keeps no earlier outputs that requests of one tenant could share."""
        raise UsageError(
            f"{self.name or 'this method'} keeps no earlier outputs, so a tenant would change nothing",
            "leave the tenant out, or choose a method that keeps them",
        )

    def forget(self, tenant: str) -> None:  # noqa: B027 (as above)
        """Drop the earlier outputs of a tenant."""


class TreeMaker(Drafter):
    """A drafter that makes trees for a batch in one call. Some methods also resample from their last draft.

    Request i of a batch has slot i. If its budget has no nodes, it may belong to another drafter: the call does not
    change its state, and its tree has no meaning.
    """

    step_ms: float = 0.0
    """Recent value of `Offer.step_ms` for fresh drafts."""

    def __init__(self, verifier: Verifier) -> None:
        super().__init__(verifier)
        self._resampling: dict[int, OfferKey] = {}

    def offers(self, seq: Request, budget: Budget) -> Sequence[Offer]:
        """Return a fresh draft, and resampling if steps of the last draft remain."""
        if not self.ready(seq):
            return ()
        fresh = Offer(self._fresh, maker=self, step_ms=self.step_ms, waiting=max(self.waiting(seq), 0))
        steps = self.remaining(seq)
        if not steps:
            return (fresh,)
        key = self._resampling.get(steps)
        if key is None:
            key = self._resampling[steps] = OfferKey(self.name, OfferKind.RESAMPLE, steps)
        return Offer(key, maker=self, joins=self.joins(seq)), fresh

    @cached_property
    def _fresh(self) -> OfferKey:
        return OfferKey(self.name, OfferKind.FRESH)

    @abstractmethod
    def draft(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> Sequence[Tree]:
        """Return a tree for each sequence within its budget, rooted at its last token."""

    def catch_up(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> None:
        """Compute rows that fresh drafts within these budgets need, but those of the draft's own call."""

    def waiting(self, seq: Request) -> int:
        """Return how many rows of `seq` `catch_up` would compute; 0 or less for none."""
        return 0

    def ready(self, seq: Request) -> bool:
        """True if it could draft for `seq` now."""
        return True

    def remaining(self, seq: Request) -> int:
        """Return how many steps of the last draft of `seq` `resample` could still use."""
        return 0

    def joins(self, seq: Request) -> bool:
        """True if a step of `seq` may resample and draft anew, and verify both trees as one (`Offer.joins`)."""
        return False

    def resample(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> Sequence[Tree]:
        """Return trees as `draft` does, from the unused steps of the last drafts if the method has such."""
        return self.draft(batch, budgets)


class Pair(Drafter):
    """Offers the trees of both drafters. An offer names the drafter that makes its tree."""

    def __init__(self, first: Drafter, second: Drafter) -> None:
        super().__init__(first.verifier)
        self.first = first
        self.second = second
        self.has_engines = first.has_engines or second.has_engines

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return (*self.first.parts, *self.second.parts)

    def begin(self, seq: Request) -> None:
        self.first.begin(seq)
        self.second.begin(seq)

    def resume(self, seq: Request, earlier: Request, rows: int) -> int:
        """Resume both. At most one of them has rows of its own, so the other takes as many as that."""
        return min(self.first.resume(seq, earlier, rows), self.second.resume(seq, earlier, rows))

    def prefilled(self, seq: Request, slot: int, start: int, tokens: int) -> None:
        self.first.prefilled(seq, slot, start, tokens)
        self.second.prefilled(seq, slot, start, tokens)

    def offers(self, seq: Request, budget: Budget) -> Sequence[Offer]:
        return (*self.first.offers(seq, budget), *self.second.offers(seq, budget))

    def move(self, seq: Request, source: int, target: int) -> None:
        self.first.move(seq, source, target)
        self.second.move(seq, source, target)

    def accept(self, seq: Request, tree: Tree, outcome: Outcome) -> None:
        self.first.accept(seq, tree, outcome)
        self.second.accept(seq, tree, outcome)

    def finish(self, seq: Request) -> None:
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
        self.first.forget(tenant)
        self.second.forget(tenant)
