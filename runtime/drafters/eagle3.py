"""The runtime's part of the method: one engine call drafts a tree."""

from __future__ import annotations

from redraft.methods.eagle3 import METHOD
from redraft.runtime.drafters.feature_tree import drafter_of

DRAFTER = drafter_of(METHOD)
