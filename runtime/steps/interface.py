"""The steps of a verifier on one device: calls over trees and over chunks of a prompt, each with buffers of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from redraft.engines.device import Array, Buffer
from redraft.lru import LruCache
from redraft.runtime.requests.request import Request
from redraft.runtime.trees.device_tree import TreeStore
from redraft.types import FloatArray, IntArray, Outcome, Tree

Pending = Sequence[Sequence[int] | None]
"""Rows that are already pending, by reader and sequence; None if a reader reads nothing."""


class Limits(NamedTuple):
    """Slots, most sequences of a call and tokens of one, most nodes, root included, of a tree and of a drafted one."""

    slots: int
    max_num_seqs: int
    max_model_len: int
    largest_tree: int
    drafted_tree: int


class FeatureReader(Protocol):
    """A drafter that reads hidden states. The verifier gathers rows of accepted tokens in the drafter's buffers."""

    def pending_features(self, slots: range) -> Mapping[str, Buffer]:
        """Return buffers [B, W, n] of these slots, by hidden state."""

    def pending(self, batch: Sequence[Request], rows: int, slots: range) -> list[int] | None:
        """Return how many rows of each sequence in these slots are pending, or None if it reads nothing now.

        The count is 0 for a sequence of another drafter. Raises UsageError without space for `rows` more.
        """


class ChunkRows(NamedTuple):
    """Tokens of a prompt to compute in a slot, from position `start` on, and pending rows by reader."""

    slot: int
    start: int
    tokens: IntArray
    pending: Sequence[list[int] | None]


class TreeStep(Protocol):
    """A step over trees of one set of sizes, with its own buffers."""

    def fill(
        self, cache_len: Sequence[int], trees: Sequence[Tree], pending: Pending, batch: Sequence[Request] = ()
    ) -> None:
        """Set the inputs of the next run: cached rows of the sequences, their trees, and pending rows by reader.

        batch: the sequences whose samplers choose; without them tokens are the likeliest.
        Raises ValueError for a tree on the device that was drafted for another slot.
        """

    def run(self, whole: bool) -> None:
        """Prepare the engine's inputs and run the engine.

        whole: a device that has programs for all parts of the step runs all of them. They must serve every sampler.
        """

    def outcomes(self, batch: Sequence[Request], trees: Sequence[Tree]) -> list[Outcome]:
        """Return the outcomes, and do the parts that `run` did not. Call it after waiting for the device."""

    def seconds(self) -> float:
        """Return the seconds of the latest run on an asynchronous device, after waiting for it; otherwise 0."""

    def tree_logits(self, trees: Sequence[Tree]) -> list[FloatArray]:
        """Return logits [nodes, V] of each tree of the latest call on the host, where the next call overwrites them."""


class PrefillStep(Protocol):
    """A chunk of a prompt in one slot, of one width. It computes the logits of the chunk's last token."""

    def fill(self, tokens: IntArray, start: int, pending: Pending) -> None:
        """Set the inputs of the next run: tokens from position `start` on, and pending rows by reader."""

    def run(self) -> None:
        """Run the engine and gather features."""

    @property
    def logits(self) -> Buffer:
        """Logits [1, R, V], with the same row R times."""


class Steps(ABC):
    """The steps of a device. Each is created for one set of sizes on first use, and reused.

    fewest_rows:    least rows of a call, padding included, if kernels round fewer rows differently
                    (`redraft.runtime.steps.exactness`).
    branches:       True if the steps accept trees that branch.
    prefers_chains: True if branching trees need another engine. A method without engines of its own then drafts chains.
    packed:         True if a call computes the nodes of all trees; False if it pads them to the size of the largest.
    takes_chunks:   True if a call over trees may also compute chunks of prompts, in other slots.
    store:          drafted trees on the device; None if drafters copy their trees to the host.
    """

    fewest_rows = 1
    branches = True
    prefers_chains = False
    packed = False
    takes_chunks = False
    store: TreeStore | None = None

    def __init__(self, most_trees: int, most_prefills: int, before_drop: Callable[[], None] = lambda: None) -> None:
        self.readers: list[FeatureReader] = []
        self._trees: LruCache[Any, Any] = LruCache(most_trees, before_drop)
        self._prefills: LruCache[Any, Any] = LruCache(most_prefills, before_drop)

    @abstractmethod
    def tree(
        self, trees: Sequence[Tree], cache_len: Sequence[int], chunks: Sequence[ChunkRows] = ()
    ) -> TreeStep:  # fmt: skip
        """Return the step for such trees, from any drafter. It is valid until the next call.

        chunks: rows that its next run computes too, if it `takes_chunks`.
        """

    @abstractmethod
    def prefill(self, width: int, slot: int) -> PrefillStep:
        """Return the step for chunks of `width` tokens in a slot. It is valid until the next call."""

    @abstractmethod
    def move(self, source: int, target: int, rows: int) -> None:
        """Copy at least the first `rows` rows of slot `source` to slot `target`."""

    def release(self, slot: int) -> None:  # noqa: B027 (only some devices can)
        """Give the memory of a slot's rows back, if the device can."""

    @abstractmethod
    def host_kv(self) -> list[Array]:
        """Return the keys and values of every layer, each [slots, H_kv, C, D], if the device is the host."""

    def take_branches(self) -> None:  # noqa: B027 (only some devices need it)
        """Prepare for trees that branch, if the device can. Raises BackendError if memory does not allow it."""

    def attach(self, reader: FeatureReader) -> None:
        """Gather features for a reader from now on. Existing steps are dropped."""
        self.readers.append(reader)
        self.forget()

    def detach(self, reader: FeatureReader) -> None:
        """Gather nothing for a reader from now on. Existing steps are dropped."""
        self.readers.remove(reader)
        self.forget()

    def forget(self) -> None:
        """Drop all steps, with their buffers."""
        self._trees.clear()
        self._prefills.clear()

    def close(self) -> None:
        """Drop all steps, and release the readers."""
        self.forget()
        self.readers.clear()
