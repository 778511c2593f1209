"""Drafting methods by name, imported when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from redraft import names
from redraft.errors import UsageError
from redraft.runtime.drafters.base import Drafter, OpenEngine
from redraft.runtime.verifier import Verifier

DRAFTERS: Mapping[str, str] = {
    "none": "redraft.runtime.drafters.none:NoDrafter",
    "ngram": "redraft.runtime.drafters.ngram:NgramDrafter",
    names.LYANNA: "redraft.runtime.drafters.lyanna:LyannaDrafter",
}

ON_DEVICE: Mapping[str, str] = {"lyanna": "redraft.runtime.drafters.lyanna_device:DeviceLyanna"}
"""Methods that are another class where the verifier's buffers are a device's."""


def load_drafter(
    method: str, verifier: Verifier, options: Mapping[str, Any] | None = None, engines: OpenEngine | None = None
) -> Drafter:
    """The drafter called `method`, with its options and its way to open graphs of its own.

    Raises UsageError on an unknown method or option, and where the bundle was built without the method's drafter.
    """
    if method not in DRAFTERS:
        raise UsageError(f"unknown method {method!r}", f"choose one of {', '.join(DRAFTERS)}")
    known = {**DRAFTERS, **ON_DEVICE} if verifier.device else DRAFTERS
    module, _, name = known[method].partition(":")
    drafter: Drafter = getattr(import_module(module), name).create(verifier, options or {}, engines)
    return drafter


__all__ = ["DRAFTERS", "Drafter", "OpenEngine", "load_drafter"]
