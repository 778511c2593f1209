"""What the runtime asks of a verifier, on the host or on a device.

A slot is a row of the batch. Active sequences occupy slots 0, 1, … without a gap, so that a call over B sequences
reads the first B slots of each buffer.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from redraft.engines.device import Device
from redraft.runtime.metrics import Clock
from redraft.runtime.ranges import Ranges
from redraft.runtime.sequence import Sequence as Request
from redraft.signatures import VerifierShape
from redraft.types import DraftTree, FloatArray, IntArray, Outcome

PREFILL_CHUNK = 128
"""Prompt tokens computed in one call."""
PREFILL_STEP = 16

Features = Mapping[str, FloatArray]
"""Feature rows by hidden state, float32[n, hidden] each: views that the next call overwrites."""


class Verifier(ABC):
    """Runs the verifier's graph over trees and prompts, and keeps the KV rows of every slot.

    `max_model_len` is the number of rows of a slot, `max_num_seqs` the largest batch, `vocabulary` the number of
    token ids.
    `ranges` are those of all that works with this verifier, `clock` is theirs.
    """

    device: Device | None = None
    """Where its buffers are, if the host cannot read them."""
    largest_tree: int = sys.maxsize
    """Nodes of a tree that a call takes at most, root included; what `max_model_len` leaves is another limit."""
    block_rows: int | None = None
    """A tree that branches must not cross a multiple of this row, for its numbers to be those of a chain to the bit."""
    fewest_rows: int = 1
    """Rows of a call at least, padding included, if kernels round fewer otherwise (`redraft.runtime.exactness`)."""
    branches: bool = True
    """Whether it takes trees that branch."""
    prefers_chains: bool = False
    """Whether trees that branch take another engine, so that a method without engines of its own drafts chains."""

    def __init__(
        self, shape: VerifierShape, max_model_len: int, max_num_seqs: int, hidden_states: tuple[str, ...]
    ) -> None:
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.vocabulary = shape.vocabulary
        self.clock = Clock()
        self.ranges = Ranges(self.clock)
        self._hidden_states = hidden_states

    def close(self) -> None:  # noqa: B027 (only a device keeps what goes round in circles)
        """Let go of what holds memory. Nothing else may be asked for afterwards."""

    def warm(self) -> None:  # noqa: B027 (as above)
        """Run each shape of a call until no request has to wait for it to be made. Overwrites KV rows: only while no
        request runs.
        """

    def take_branches(self) -> None:  # noqa: B027 (most take them anyway)
        """Make ready for trees that branch, if it can. Raises BackendError where memory does not allow it."""

    @abstractmethod
    def verify(self, batch: Sequence[Request], trees: Sequence[DraftTree]) -> list[Outcome]:
        """What the verifier says of every sequence's tree: one engine call. Rows of accepted paths are made contiguous.

        Sequence i sits in slot i; cache_len + the largest tree must fit in `max_model_len`.
        """

    def prefill(self, seq: Request) -> Iterator[tuple[int, Features]]:
        """Compute the prompt of `seq` in slot 0, chunk by chunk.

        Yields each chunk's first position and feature rows; `first_outcome` then judges the prompt's last position.
        """
        prompt = np.array(seq.tokens[: seq.prompt_length], dtype=np.int64)
        for start in range(0, len(prompt), PREFILL_CHUNK):
            chunk = prompt[start : start + PREFILL_CHUNK]
            width = min(-(-len(chunk) // PREFILL_STEP) * PREFILL_STEP, self.max_model_len - start)
            yield start, self.prefill_chunk(seq, chunk, start, width)

    @abstractmethod
    def prefill_chunk(self, seq: Request, tokens: IntArray, start: int, width: int) -> Features:
        """Compute a part of the prompt, from position `start` on, in a call of `width` tokens; its feature rows."""

    @abstractmethod
    def first_outcome(self, seq: Request) -> Outcome:
        """What the verifier says after the prompt that was just computed."""

    @abstractmethod
    def features(self, slot: int, nodes: int) -> Features:
        """Feature rows of the latest call's tree in `slot`, one a node."""

    @abstractmethod
    def move(self, source: int, target: int, rows: int) -> None:
        """Copy the first `rows` rows of slot `source` to slot `target`."""

    @abstractmethod
    def measure_ms(self, sequences: int, nodes: int, kv_len: int) -> float:
        """Time of one call over `sequences` chains of `nodes` nodes after `kv_len` rows; overwrites later rows."""
