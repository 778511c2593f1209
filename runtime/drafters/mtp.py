"""Multi-token prediction in the runtime: a chain of tokens by one engine call."""

from __future__ import annotations

from redraft.methods.mtp import METHOD
from redraft.runtime.drafters.hidden_states import HiddenStateDrafter


class MtpDrafter(HiddenStateDrafter):
    """See the module."""

    method = METHOD


DRAFTER = MtpDrafter
