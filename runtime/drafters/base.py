"""What every drafting method is to the runtime: begin, draft, accept, resample."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Several
from typing import Any, Self

from redraft.errors import UsageError
from redraft.runtime.sequence import Sequence
from redraft.runtime.verifier import Features, Verifier
from redraft.types import Budget, DraftTree, Outcome


class Drafter(ABC):
    """A drafting method, opened once for all requests.

    What it keeps for a request lies in `seq.drafting`; what it learns from all of them, in itself. Methods that read
    the verifier's hidden states get the rows of each call, as views to copy from.
    """

    def __init__(self, verifier: Verifier) -> None:
        self.verifier = verifier

    @classmethod
    def create(cls, verifier: Verifier, options: Mapping[str, Any]) -> Self:
        """The drafter with these options; none are known unless a method says so. Raises UsageError."""
        if options:
            raise UsageError(f"this method has no option {', '.join(options)}", "leave it out")
        return cls(verifier)

    def begin(self, seq: Sequence) -> None:  # noqa: B027 (only some methods need it)
        """`seq` is admitted: its prompt is known, nothing is computed yet."""

    def prefilled(self, seq: Sequence, start: int, features: Features) -> None:  # noqa: B027 (as above)
        """A chunk of the prompt of `seq` from position `start` on was computed."""

    @abstractmethod
    def draft(self, batch: Several[Sequence], budgets: Several[Budget]) -> list[DraftTree]:
        """A tree for each sequence within its budget, rooted at its last token; every budget has nodes."""

    def resample(self, batch: Several[Sequence], budgets: Several[Budget]) -> list[DraftTree | None]:
        """A tree for each sequence from what its last draft left over; None where that is not worth it."""
        return [None] * len(batch)

    def accept(  # noqa: B027 (as above)
        self, seq: Sequence, tree: DraftTree, outcome: Outcome, features: Features
    ) -> None:
        """`tree` was verified and `outcome` committed, also in plain steps. Row i of `features` is node i's."""
