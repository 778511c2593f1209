"""Draft trees that a drafter made on the device, and that need not come back to be verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from redraft.engines.base import Array
from redraft.engines.device import Buffer
from redraft.types import DraftTree

_FIELDS = ("tokens", "parents", "log_probs")


@dataclass(eq=False)
class DeviceTrees:
    """The trees of one call for B sequences: buffers [B, width], the nodes that exist first.

    Good until the drafter's next call writes over them.
    """

    tokens: Buffer
    parents: Buffer
    log_probs: Buffer
    _read: dict[str, Array] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Nodes that the call has room for, root included."""
        return self.tokens.shape[1]

    def tree(self, slot: int, nodes: int) -> DeviceTree:
        """The tree of one sequence, of which `nodes` nodes exist."""
        return DeviceTree(self, slot, nodes)

    def read(self, name: str) -> Array:
        """A field of all trees on the host, copied once."""
        if name not in self._read:
            self._read[name] = getattr(self, name).read()
        return self._read[name]


class DeviceTree(DraftTree):
    """A tree whose length is known and whose fields are copied from the device when somebody asks."""

    def __init__(self, source: DeviceTrees, slot: int, nodes: int) -> None:
        # The class is frozen, and its own fields must stay unset for __getattr__ to be asked.
        object.__setattr__(self, "source", source)
        object.__setattr__(self, "slot", slot)
        object.__setattr__(self, "nodes", nodes)

    def __len__(self) -> int:
        nodes: int = self.__dict__["nodes"]
        return nodes

    def __getattr__(self, name: str) -> Any:
        if name not in _FIELDS:
            raise AttributeError(name)
        held = self.__dict__
        values = held["source"].read(name)[held["slot"], : held["nodes"]]
        object.__setattr__(self, name, values)
        return values


def same_trees(trees: Sequence[DraftTree]) -> DeviceTrees | None:
    """What made all of `trees`, slot by slot, if one call on the device did and they are whole."""
    first = trees[0]
    if not isinstance(first, DeviceTree):
        return None
    source: DeviceTrees = first.__dict__["source"]
    for slot, tree in enumerate(trees):
        if not isinstance(tree, DeviceTree) or tree.__dict__["source"] is not source or tree.__dict__["slot"] != slot:
            return None
    return source if len(trees) == source.tokens.shape[0] else None
