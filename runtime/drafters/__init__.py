"""Drafting methods by name, imported when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from redraft import names
from redraft.engines.bundle import Bundle
from redraft.errors import UsageError
from redraft.runtime.drafters.base import Drafter
from redraft.runtime.verifier import Verifier

DRAFTERS: Mapping[str, str] = {
    "none": "redraft.runtime.drafters.none:NoDrafter",
    "ngram": "redraft.runtime.drafters.ngram:NgramDrafter",
    names.LYANNA: "redraft.runtime.drafters.lyanna:LyannaDrafter",
}


def load_drafter(
    method: str, verifier: Verifier, options: Mapping[str, Any] | None = None, bundle: Bundle | None = None
) -> Drafter:
    """The drafter called `method`, with its options, of this bundle.

    Raises UsageError on an unknown method or option, and where the bundle was built without the method's drafter.
    """
    if method not in DRAFTERS:
        raise UsageError(f"unknown method {method!r}", f"choose one of {', '.join(DRAFTERS)}")
    module, _, name = DRAFTERS[method].partition(":")
    drafter: Drafter = getattr(import_module(module), name).create(verifier, options or {}, bundle)
    return drafter


__all__ = ["DRAFTERS", "Drafter", "load_drafter"]
