"""What every drafting method is to the runtime: begin, offer, accept; draft and resample if it makes trees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Several
from functools import cached_property
from typing import Any, Self

from redraft.engines.bundle import Bundle
from redraft.errors import UsageError
from redraft.runtime.offers import Offer, OfferKey
from redraft.runtime.sequence import Sequence
from redraft.runtime.verifier import Verifier
from redraft.types import Budget, OfferKind, Outcome, Tree


class Drafter(ABC):
    """A drafting method, opened once for all requests.

    Its state of a request is `seq.drafting[self]`; it keeps what it learns from all of them itself. A method that reads
    hidden states is a `redraft.runtime.verifier.FeatureReader` that attaches itself to the verifier.
    """

    has_engines: bool = False
    """True if it runs engines of its own."""
    name: str = ""
    """The drafter's id in the bundle, or its method's."""

    def __init__(self, verifier: Verifier) -> None:
        self.verifier = verifier

    @classmethod
    def create(
        cls, verifier: Verifier, options: Mapping[str, Any], bundle: Bundle | None = None, drafter: str = ""
    ) -> Self:
        """Return the drafter with these options, which only some methods know. Raises UsageError.

        bundle, drafter: where a method with engines finds its own: the bundle's drafter with this id.
        """
        if options:
            raise UsageError(f"this method has no option {', '.join(options)}", "leave it out")
        return cls(verifier)

    def begin(self, seq: Sequence) -> None:  # noqa: B027 (only some methods need it)
        """`seq` is admitted: its prompt is known, nothing is computed yet."""

    def prefilled(self, seq: Sequence, slot: int, start: int, tokens: int) -> None:  # noqa: B027 (as above)
        """A chunk of the prompt of `seq`, so many tokens from position `start` on, was computed in this slot."""

    @abstractmethod
    def offers(self, seq: Sequence, budget: Budget) -> Several[Offer]:
        """Return the trees that it has for `seq` within a budget, and those that it could make now."""

    def move(self, seq: Sequence, source: int, target: int) -> None:  # noqa: B027 (only some methods need it)
        """`seq` moves from one slot to another."""

    def accept(self, seq: Sequence, tree: Tree, outcome: Outcome) -> None:  # noqa: B027 (as above)
        """`tree` was verified and `outcome` committed, also in plain steps."""

    def finish(self, seq: Sequence) -> None:  # noqa: B027 (as above)
        """Keep what later requests may use of `seq`, whose last token was committed."""

    def check_tenant(self) -> None:
        """Raises UsageError if requests of one tenant share nothing: it keeps no earlier outputs."""
        raise UsageError(
            f"{self.name or 'this method'} keeps no earlier outputs, so a tenant would change nothing",
            "leave the tenant out, or choose a method that keeps them",
        )

    def forget(self, tenant: str) -> None:  # noqa: B027 (as above)
        """Drop the earlier outputs of a tenant."""


class TreeMaker(Drafter):
    """A drafter that makes trees for a batch in one call: fresh ones, and some methods from what their last draft left.

    Sequence i of a batch sits in slot i. A sequence whose budget has no nodes is not drafted for: what is kept for
    it stays as it is, and its tree is not looked at. It may be another drafter's.
    """

    def __init__(self, verifier: Verifier) -> None:
        super().__init__(verifier)
        self._resampling: dict[int, OfferKey] = {}

    def offers(self, seq: Sequence, budget: Budget) -> Several[Offer]:
        """Return a fresh draft, and resampling if steps of the last draft remain."""
        fresh = Offer(self._fresh, maker=self)
        steps = self.remaining(seq)
        if not steps:
            return (fresh,)
        key = self._resampling.get(steps)
        if key is None:
            key = self._resampling[steps] = OfferKey(self.name, OfferKind.RESAMPLE, steps)
        return Offer(key, maker=self), fresh

    @cached_property
    def _fresh(self) -> OfferKey:
        return OfferKey(self.name, OfferKind.FRESH)

    @abstractmethod
    def draft(self, batch: Several[Sequence], budgets: Several[Budget]) -> Several[Tree]:
        """Return a tree for each sequence within its budget, rooted at its last token."""

    def remaining(self, seq: Sequence) -> int:
        """Return how many steps of the last draft of `seq` `resample` could still use."""
        return 0

    def resample(self, batch: Several[Sequence], budgets: Several[Budget]) -> Several[Tree]:
        """As `draft`, from what the last drafts left over. Called only if steps remain."""
        raise NotImplementedError

    def measure_ms(self, rows: int, kv_len: int) -> tuple[float, float]:
        """Return milliseconds of a draft with `rows` pending rows after `kv_len` ones, and of a resampling.

        Only while no request runs, and only if it has engines.
        """
        raise NotImplementedError
