"""Heads on the verifier's trunk in the runtime: one engine call drafts a static tree, and appends the accepted rows."""

from __future__ import annotations

from redraft.methods.multi_head import METHOD
from redraft.runtime.drafters.hidden_states import HiddenStateDrafter


class MultiHeadDrafter(HiddenStateDrafter):
    """Drafts a static tree in one engine call."""

    method = METHOD


DRAFTER = MultiHeadDrafter
