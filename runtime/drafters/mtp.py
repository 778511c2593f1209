"""Multi-token prediction in the runtime: one engine call drafts a chain of tokens."""

from __future__ import annotations

from redraft.methods.mtp import METHOD
from redraft.runtime.drafters.hidden_states import HiddenStateDrafter


class MtpDrafter(HiddenStateDrafter):
    """Drafts a chain of tokens in one engine call."""

    method = METHOD


DRAFTER = MtpDrafter
