"""Drafting methods: one file a method, each with its specification `METHOD`, imported on first use.

A method called x also has `export/drafters/x_graphs.py`, `train/objectives/x_method.py` and `runtime/drafters/x.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from redraft.errors import UsageError
from redraft.methods.base import GraphSpec, Method, TreeLimits

LOOKUPS = (
    "ngram",
    "suffix",
)
"""Methods that look drafts up in texts, alone or together with a drafter of the bundle."""
UNBUILT = (
    *LOOKUPS,
    "lookahead",
)
"""Methods that need no engine, so every bundle has them."""
METHODS = (
    "none",
    *UNBUILT,
    "lyanna",
    "mtp",
    "draft_model",
    "steered",
    "eagle",
    "eagle2",
    "eagle3",
    "hass",
    "fspad",
    "griffin",
    "medusa",
    "multi_head",
)
"""One line for each method."""
NONE, NGRAM = METHODS[0], LOOKUPS[0]
"""Plain decoding, and the default lookup."""


def find_method(name: str) -> Method[Any]:
    """Return the specification of the method `name`. Raises UsageError for an unknown one."""
    if name not in METHODS:
        raise UsageError(f"unknown drafting method {name!r}", f"the methods are {', '.join(METHODS)}")
    method: Method[Any] = import_module(f"redraft.methods.{name}").METHOD
    return method


def built_methods() -> tuple[str, ...]:
    """Return the methods that need a drafter in the bundle."""
    return tuple(name for name in METHODS if find_method(name).is_built)


def checkpoint_method() -> str:
    """Return the method of a drafter that is a plain checkpoint of a decoder."""
    return next(name for name in METHODS if find_method(name).takes_checkpoints)


def native_method() -> str:
    """Return the method of a drafter inside of the verifier's own checkpoint."""
    return next(name for name in METHODS if find_method(name).native)


__all__ = [
    "LOOKUPS",
    "METHODS",
    "NGRAM",
    "NONE",
    "UNBUILT",
    "GraphSpec",
    "Method",
    "TreeLimits",
    "built_methods",
    "checkpoint_method",
    "find_method",
    "native_method",
]
