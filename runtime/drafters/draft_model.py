"""An independent draft model in the runtime."""

from __future__ import annotations

from redraft.methods.draft_model import METHOD
from redraft.runtime.drafters.decoder import DecoderDrafter


class DraftModelDrafter(DecoderDrafter):
    """Drafts with a smaller model, from tokens alone."""

    method = METHOD


DRAFTER = DraftModelDrafter
