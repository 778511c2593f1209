"""Plain decoding: a step verifies the root alone."""

from __future__ import annotations

from redraft.methods.base import Method

METHOD: Method[None] = Method("none", "Plain decoding, without speculation.")
