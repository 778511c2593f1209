"""Drafters by method name: `none`, a method without engines, the id of a drafter of the bundle, or `LOOKUP+ID`.

`LOOKUP+ID` is a lookup and a drafter that draft together.

A method's drafter is `DRAFTER` of the module here that its row names, which is imported on first use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

from redraft.engines.bundle import Bundle
from redraft.errors import UsageError
from redraft.methods import LOOKUPS, NGRAM, NONE, ROWS, UNBUILT
from redraft.runtime.drafters.base import Drafter as Drafter
from redraft.runtime.steps.verifier import Verifier

PAIR = "+"
"""Joins a lookup and a drafter that draft together."""


def pair(drafter: str, lookup: str = NGRAM) -> str:
    """Return the name of a lookup together with a drafter."""
    return f"{lookup}{PAIR}{drafter}"


def split_pair(word: str) -> tuple[str, str | None]:
    """Return the drafter in a name, and the lookup that drafts with it."""
    lookup, joined, drafter = word.partition(PAIR)
    return (drafter, lookup) if joined and lookup in LOOKUPS else (word, None)


def method_words(drafters: Iterable[str]) -> tuple[str, ...]:
    """Return all method names for a bundle with these drafters."""
    own = tuple(drafters)
    return (NONE, *UNBUILT, *own, *(pair(drafter, lookup) for lookup in LOOKUPS for drafter in own))


def default_word(drafters: Iterable[str]) -> str:
    """Return the default method: lookup with the bundle's first drafter, or lookup alone."""
    first = next(iter(drafters), None)
    return NGRAM if first is None else pair(first)


def load_drafter(
    drafter: str, verifier: Verifier, options: Mapping[str, Any] | None = None, bundle: Bundle | None = None
) -> Drafter:
    """Return `none`, the drafter of a method without engines, or the bundle's drafter with this id, with its options.

    Raises UsageError for an id that the bundle lacks, and for an unknown option.
    """
    built = bundle.manifest.drafters if bundle else {}
    if drafter in built:
        method = built[drafter].method
    elif drafter in (NONE, *UNBUILT):
        method = drafter
    else:
        problem = f"this bundle has no drafter {drafter!r}"
        hint = "" if built else ", or build it with `redraft build MODEL --drafter ID=DIR`"
        raise UsageError(problem, f"choose one of {', '.join(method_words(built))}{hint}")
    row = ROWS[method]
    kind: type[Drafter] = import_module(f"{__name__}.{row.runtime or row.family}").DRAFTER
    return kind.create(verifier, options or {}, bundle, drafter)
