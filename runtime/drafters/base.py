"""What every drafting method is to the runtime: begin, draft, accept, resample."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Several
from typing import Any, ClassVar, Self

from redraft.engines.bundle import Bundle
from redraft.errors import UsageError
from redraft.runtime.sequence import Sequence
from redraft.runtime.verifier import Verifier
from redraft.types import Budget, Outcome, Tree


class Drafter(ABC):
    """A drafting method, opened once for all requests.

    What it keeps for a request lies in `seq.drafting`; what it learns from all of them, in itself. A method that reads
    hidden states is a `redraft.runtime.verifier.FeatureReader` that attaches itself to the verifier.
    """

    drafts: ClassVar[bool] = True
    """Whether `draft` ever gives more than a root."""
    has_engines: ClassVar[bool] = False
    """Whether drafting runs engines of its own, whose time `measure_ms` tells."""

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
    def draft(self, batch: Several[Sequence], budgets: Several[Budget]) -> list[Tree]:
        """A tree for each sequence within its budget, rooted at its last token.

        Sequence i sits in slot i. If its budget has no nodes, it is not drafted for: its tree is the root alone, and
        what is kept for it stays as it is. It may then be a sequence that another method drafts for.
        """

    def remaining(self, seq: Sequence) -> int:
        """Steps of the last draft of `seq` that `resample` could still use."""
        return 0

    def resample(self, batch: Several[Sequence], budgets: Several[Budget]) -> list[Tree]:
        """As `draft`, from what the last drafts left over; only sequences with remaining steps have nodes wanted."""
        raise NotImplementedError

    def measure_ms(self, rows: int, kv_len: int) -> tuple[float, float]:
        """Milliseconds of one draft with `rows` rows to catch up on after `kv_len` ones, and of one resampling.

        Only while no request runs.
        """
        raise NotImplementedError

    def move(self, seq: Sequence, source: int, target: int) -> None:  # noqa: B027 (only some methods need it)
        """`seq` moves from one slot to another."""

    def accept(self, seq: Sequence, tree: Tree, outcome: Outcome) -> None:  # noqa: B027 (as above)
        """`tree` was verified and `outcome` committed, also in plain steps."""
