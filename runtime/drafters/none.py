"""Plain decoding without drafts."""

from __future__ import annotations

from collections.abc import Sequence

from redraft.runtime.drafters.base import Drafter
from redraft.runtime.requests.request import Request
from redraft.runtime.trees.offers import Offer
from redraft.types import Budget


class NoDrafter(Drafter):
    """Offers nothing."""

    def offers(self, seq: Request, budget: Budget) -> Sequence[Offer]:
        return ()


DRAFTER = NoDrafter
