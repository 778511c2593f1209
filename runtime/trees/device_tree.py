"""Draft trees on the device, which verification reads without a copy to the host.

A drafter's call writes its trees to buffers of its own. It also copies the trees of its slots to the verifier's
`TreeStore`. So one verification can read trees of several calls and of several drafters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from redraft.engines.device import Array, Buffer, Device, Work, slots_of
from redraft.types import DraftTree, Draws, FloatArray, IntArray, Proposal

Field = Literal["tokens", "parents", "log_probs"]


class TreeStore:
    """One tree a slot on the device, for the next verification.

    tokens, parents: buffers [slots, S] of int64.   nodes: S, the size of the largest tree, root included.
    """

    def __init__(self, device: Device, slots: int, nodes: int) -> None:
        self.tokens, self.parents = (device.empty("int64", slots, nodes) for _ in range(2))
        self.nodes = nodes

    def first(self, nodes: int) -> tuple[Buffer, Buffer]:
        """Return tokens and parents [1, nodes] of the first slot. Raises ValueError if a tree has fewer nodes."""
        if nodes > self.nodes:
            raise ValueError(f"a tree of {nodes} nodes does not fit in the store, which takes {self.nodes}")
        return self.tokens.part(1, nodes), self.parents.part(1, nodes)

    def of(self, sequences: int) -> tuple[Buffer, Buffer]:
        """Return tokens and parents [B, S] of the first slots."""
        slots = range(sequences)
        return slots_of(self.tokens, slots), slots_of(self.parents, slots)


@dataclass(eq=False, slots=True)
class DeviceDrafts:
    """The trees of one drafter call for B sequences: buffers [B, K], the likeliest nodes first.

    tokens, parents: int64, -1 is the root's parent.   log_probs: float32, joint, natural.
    nodes:           how many nodes of each tree exist, root included.
    proposals:       the distributions of each tree's candidates, if some were drawn.
    work:            the work that made the trees, in the stage `stage` of a step.
    The buffers are valid until the next call for the same slots.
    """

    tokens: Buffer
    parents: Buffer
    log_probs: Buffer
    nodes: Sequence[int]
    work: Work
    stage: str
    proposals: Sequence[Proposal | None] = ()
    _read: dict[Field, Array] = field(default_factory=dict)

    def tree(self, slot: int, nodes: int) -> DeviceTree:
        """Return the root and at most `nodes` nodes after it of one sequence's tree."""
        return DeviceTree(self, slot, min(nodes + 1, self.nodes[slot]))

    def copied(self, slot: int, nodes: int) -> DraftTree:
        """Return the first nodes of a tree on the host."""
        tokens, parents, log_probs = (self.read(name)[slot, :nodes] for name in ("tokens", "parents", "log_probs"))
        return DraftTree(tokens, parents, log_probs, Draws.of(self.proposal(slot), nodes))

    def proposal(self, slot: int) -> Proposal | None:
        """Return the distributions of a slot's candidates, if they were drawn."""
        return self.proposals[slot] if self.proposals else None

    def read(self, name: Field) -> Array:
        """Return a field of all trees on the host, copied once."""
        if name not in self._read:
            buffer: Buffer = getattr(self, name)
            self._read[name] = buffer.read()
        return self._read[name]


class DeviceTree:
    """The first nodes of a slot's tree, as a `redraft.types.Tree`. A field is copied from the device on first use."""

    __slots__ = ("_nodes", "drafts", "slot")

    on_device = cut_at_end = True
    pinned = None

    def __init__(self, drafts: DeviceDrafts, slot: int, nodes: int) -> None:
        self.drafts = drafts
        self.slot = slot
        self._nodes = nodes

    def __len__(self) -> int:
        return self._nodes

    @property
    def tokens(self) -> IntArray:
        """Token of each node, int64[n]."""
        return self.drafts.read("tokens")[self.slot, : self._nodes]

    @property
    def parents(self) -> IntArray:
        """Parent of each node, int64[n]; -1 for the root."""
        return self.drafts.read("parents")[self.slot, : self._nodes]

    @property
    def draws(self) -> Draws | None:
        """The random draws of nodes; None if they were chosen."""
        return Draws.of(self.drafts.proposal(self.slot), self._nodes)

    @property
    def log_probs(self) -> FloatArray:
        """Joint natural logarithm of each node's probability, float32[n]."""
        return self.drafts.read("log_probs")[self.slot, : self._nodes]

    def first(self, nodes: int) -> DeviceTree:
        """Return the tree of the first nodes, without a copy."""
        return DeviceTree(self.drafts, self.slot, min(nodes + 1, self._nodes))


def calls_of(trees: Iterable[object]) -> list[DeviceDrafts]:
    """Return the device calls that made the trees of a batch, each once."""
    found: list[DeviceDrafts] = []
    for tree in trees:
        if type(tree) is DeviceTree and tree.drafts not in found:
            found.append(tree.drafts)
    return found
