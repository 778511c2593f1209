"""Rows of the verifier's hidden states that wait for a drafter, as a `redraft.runtime.verifier.FeatureReader`.

The verifier gathers the rows of accepted tokens in the drafter's buffers, after those that wait already.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Several
from functools import cached_property
from typing import Any

import numpy as np

from redraft import names
from redraft.engines.device import Buffer, Device, Program, slots_of
from redraft.errors import UsageError
from redraft.runtime.bound_step import gathered
from redraft.runtime.drafters.engine import CATCH_UP, EngineDrafter
from redraft.runtime.recent import Recent
from redraft.runtime.sequence import Sequence


class FeatureBuffers(EngineDrafter):
    """A drafter with buffers of the verifier's hidden states."""

    @cached_property
    def _hidden_states(self) -> tuple[str, ...]:
        return self.method.states_of(self.shape)

    def pending_features(self, slots: range) -> Mapping[str, Buffer]:
        """Return the buffers [B, W, n] of these slots, by hidden state."""
        return {
            state: slots_of(self._state[names.of_state(names.PENDING_FEATURES, place)], slots)
            for place, state in enumerate(self._hidden_states)
        }

    def _state_of(self, seq: Sequence) -> Any:
        """Return the state of `seq`; None if another method drafts for it."""
        return seq.drafting.get(self)

    @property
    def _gather(self) -> Program:
        return self._step_programs[names.STEP_GATHER_FEATURES]


class PendingFeatures(FeatureBuffers):
    """A drafter that reads all rows. The state of a sequence has `pending`, the number of its rows that wait."""

    @cached_property
    def _shifts(self) -> Recent[int, Shift]:
        return Recent(self._most_calls, self._device.wait)

    def pending(self, batch: Several[Sequence], rows: int, slots: range) -> list[int] | None:
        """Return how many rows of each sequence are pending. Raises UsageError without space for `rows` more."""
        space = space_before(rows)
        found, reads = [], False
        for slot, seq in zip(slots, batch, strict=True):
            state = self._state_of(seq)
            while state and state.pending > space:
                self._make_space(seq, slot)
            found.append(state.pending if state else 0)
            reads = reads or state is not None
        return found if reads else None

    @abstractmethod
    def _make_space(self, seq: Sequence, slot: int) -> None:
        """Use CATCH_UP rows of a sequence that has more, and drop them."""

    def _drop(self, slot: int) -> None:
        """Move the rows of a slot after the first CATCH_UP ones to the front."""
        pending = tuple(self.pending_features(range(slot, slot + 1)).values())
        shift = self._shifts.get(slot) or self._shifts.add(slot, Shift(self._device, self._gather, pending))
        shift()


def space_before(rows: int) -> int:
    """Return the pending rows that a buffer can have before `rows` more.

    Raises UsageError if these are too many for a call that catches up.
    """
    space = names.MAX_PENDING_FEATURES - rows
    if space < CATCH_UP:
        raise UsageError(
            f"a tree of {rows} nodes is too large, at most {rows + space - CATCH_UP} can be",
            "lower the budget's nodes",
        )
    return space


class Shift:
    """Moves the pending rows of a slot to the front after a call has used the first CATCH_UP ones."""

    def __init__(self, device: Device, gather: Program, pending: Several[Buffer]) -> None:
        space = pending[0].shape[1] - CATCH_UP
        path, start = device.empty("int64", 1, space), device.empty("int64", 1)
        path.write(np.arange(CATCH_UP, CATCH_UP + space)[None])
        self._run = device.chain([gathered(gather, rows, path, rows, start) for rows in pending])

    def __call__(self) -> None:
        self._run()
