"""A draft model: a small decoder with the verifier's vocabulary, which drafts from tokens alone."""

from __future__ import annotations

from redraft.methods.base import Method

METHOD: Method[None] = Method(
    id="draft_model",
    summary="Draft model: a small model with the verifier's vocabulary.",
    training="student",
)
