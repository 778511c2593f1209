"""Losses of drafting methods, one file a method, and where to find them; the loop knows none.

Importing this needs no torch: a method's module is imported when it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from redraft.errors import CheckpointError
from redraft.names import LYANNA

if TYPE_CHECKING:
    from redraft.train.method import Method

METHODS = {LYANNA: "Train a Lyanna drafter: a chain of predicted hidden states with token information."}
"""Names, each of a module `<name>_method` here whose METHOD says how to train it, and the command line's help."""


def find_method(name: str) -> Method:
    """The method of that name. Raises CheckpointError where there is none, as a drafter of another version may say."""
    if name not in METHODS:
        raise CheckpointError(f"no drafting method {name!r}", f"the methods are {', '.join(METHODS)}")
    method: Method = import_module(f"redraft.train.objectives.{name}_method").METHOD
    return method
