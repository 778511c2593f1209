"""Plain decoding without drafts."""

from __future__ import annotations

from collections import abc

from redraft.runtime.drafters.base import Drafter
from redraft.runtime.offers import Offer
from redraft.runtime.sequence import Sequence
from redraft.types import Budget


class NoDrafter(Drafter):
    """Offers nothing."""

    def offers(self, seq: Sequence, budget: Budget) -> abc.Sequence[Offer]:
        return ()


DRAFTER = NoDrafter
