"""Losses of drafting methods, a few modules for each family. The loop names no method.

Importing this package needs no torch. `find_training` imports the module of a method's family; its TRAINING describes
how to train a drafter.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from redraft.errors import CheckpointError
from redraft.methods import ROWS, find_method, trained_methods

if TYPE_CHECKING:
    from redraft.train.training import Training

METHODS = trained_methods()
"""The methods that can be trained."""
COMMANDS = {find_method(name).command: name for name in METHODS}
"""The methods that can be trained, by the names of their commands."""


@cache
def find_training(name: str) -> Training:
    """Return how to train a method's drafters. Raises CheckpointError for an unknown one, as of another version."""
    if name not in METHODS:
        raise CheckpointError(f"unknown drafting method {name!r}", f"the methods are {', '.join(METHODS)}")
    row = ROWS[name]
    training: Training = import_module(f"{__name__}.{row.family}").TRAINING(find_method(name), row)
    return training
