"""Draft trees that a drafter made on the device, and that need not come back to be verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from redraft.engines.device import Array, Buffer, Work
from redraft.types import DraftTree

_FIELDS = ("tokens", "parents", "log_probs")


@dataclass(eq=False)
class DeviceTrees:
    """The trees of one call for B sequences: buffers [B, width], the nodes that exist first, likeliest first.

    tokens, parents: int64, -1 is the root's parent.   log_probs: float32, joint, natural.
    Good until the drafter's next call writes over them. `work` made them, in the stage `stage` of the step.
    """

    tokens: Buffer
    parents: Buffer
    log_probs: Buffer
    work: Work
    stage: str
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

    on_device = True

    def __init__(self, source: DeviceTrees, slot: int, nodes: int) -> None:
        held = self.__dict__  # the class is frozen, and its own fields must stay unset for __getattr__ to be asked
        held["source"], held["slot"], held["nodes"] = source, slot, nodes

    def __len__(self) -> int:
        nodes: int = self.__dict__["nodes"]
        return nodes

    def __getattr__(self, name: str) -> Any:
        if name not in _FIELDS:
            raise AttributeError(name)
        held = self.__dict__
        held[name] = values = held["source"].read(name)[held["slot"], : held["nodes"]]
        return values

    def first(self, nodes: int) -> DeviceTree:
        """See `DraftTree.first`; nothing is copied."""
        held = self.__dict__
        return DeviceTree(held["source"], held["slot"], min(nodes + 1, held["nodes"]))


def one_source(trees: Sequence[DraftTree]) -> DeviceTrees | None:
    """The call on a device that made trees of the batch, slot by slot, if all that were not made by the host are its.

    Raises ValueError where two calls made them: the fields of one must be asked for first.
    """
    source: DeviceTrees | None = None
    for slot, tree in enumerate(trees):
        if isinstance(tree, DeviceTree):
            held = tree.__dict__
            source = source or held["source"]
            if held["source"] is not source or held["slot"] != slot or len(trees) != source.tokens.shape[0]:
                raise ValueError("trees of a batch were made on the device by two calls, or for other slots")
    return source
