"""Losses of drafting methods, one file for each method. The loop names no method.

Importing this package needs no torch. `find_method` imports the module `<method>_method`; its METHOD describes how to
train a drafter.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from redraft.errors import CheckpointError
from redraft.methods import METHODS as ALL
from redraft.methods import find_method as specification

if TYPE_CHECKING:
    from redraft.train.method import Method

METHODS = tuple(name for name in ALL if find_spec(f"{__name__}.{name}_method"))
"""The methods that can be trained."""
COMMANDS = {specification(name).command: name for name in METHODS}
"""The methods that can be trained, by the names of their commands."""


def find_method(name: str) -> Method:
    """Return a method's training. Raises CheckpointError for an unknown one, as in a drafter of another version."""
    if name not in METHODS:
        raise CheckpointError(f"unknown drafting method {name!r}", f"the methods are {', '.join(METHODS)}")
    method: Method = import_module(f"{__name__}.{name}_method").METHOD
    return method
