"""Plain decoding: every tree is its root."""

from __future__ import annotations

from collections.abc import Sequence as Several

from redraft.runtime.drafters.base import Drafter
from redraft.runtime.sequence import Sequence
from redraft.runtime.tree import root_only
from redraft.types import Budget, Tree


class NoDrafter(Drafter):
    """Drafts nothing."""

    drafts = False

    def draft(self, batch: Several[Sequence], budgets: Several[Budget]) -> list[Tree]:
        """See `Drafter.draft`."""
        return [root_only(seq.tokens[-1]) for seq in batch]


DRAFTER = NoDrafter
