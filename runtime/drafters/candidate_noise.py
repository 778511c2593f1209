"""The noise under which a drafter's candidates are drawn, and their distributions, as rejection sampling needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np

from redraft import names
from redraft.engines.device import Array, Buffer, Device, slots_of
from redraft.runtime.requests.request import Request
from redraft.runtime.sampling.noise import NO_NOISE, DraftNoise
from redraft.types import FloatArray, IntArray


class SlotNoise:
    """Factors on logits and noise of all slots, on the device. They are written when they change.

    draft_logit_scale: the drafter's own factor, which was measured for greedy verifiers.
    """

    def __init__(self, device: Device, slots: int, draft_logit_scale: float) -> None:
        self._own = draft_logit_scale
        self._noises = [NO_NOISE] * slots
        self._buffers = self._filled(device, slots)
        self._silent = self._filled(device, 1)

    def buffers(self, slots: range) -> Mapping[str, Buffer]:
        """Return the buffers [B] of these slots."""
        return {name: slots_of(buffer, slots) for name, buffer in self._buffers.items()}

    @property
    def without(self) -> Mapping[str, Buffer]:
        """Buffers [1] for calls of one sequence whose tree nobody reads."""
        return self._silent

    def set(
        self, batch: Sequence[Request], values: Mapping[str, Array], first_slot: int = 0, first_level: int = 0
    ) -> None:
        """Set the inputs of the next call, over the slots of `batch` from `first_slot` on.

        values: arrays of the call's integers.   first_level: levels of the draft that earlier calls made.
        """
        keys, drawn = values[names.NOISE_KEYS], values[names.DRAWN]
        for place, seq in enumerate(batch):
            noise = seq.noise
            drawn[place] = noise.drawn
            if noise.temperature > 0:
                keys[place] = noise.keys(len(seq.tokens), first_level + keys.shape[1])[first_level:]
        self._write([seq.noise for seq in batch], first_slot)

    def clear(self) -> None:
        """Remove the noise of all slots."""
        self._write([NO_NOISE] * len(self._noises))

    def _write(self, noises: list[DraftNoise], first: int = 0) -> None:
        slots = slice(first, first + len(noises))
        if noises == self._noises[slots]:
            return
        self._noises[slots] = noises
        for name, values in self._factors(self._noises).items():
            self._buffers[name].write(values)

    def _filled(self, device: Device, slots: int) -> dict[str, Buffer]:
        """Return buffers for slots without noise."""
        buffers: dict[str, Buffer] = {}
        for name, values in self._factors([NO_NOISE] * slots).items():
            buffers[name] = device.empty("float32", slots)
            buffers[name].write(values)
        return buffers

    def _factors(self, noises: Sequence[DraftNoise]) -> dict[str, Array]:
        return {
            names.DRAFT_LOGIT_SCALE: np.array([noise.logit_scale(self._own) for noise in noises], np.float32),
            names.NOISE_SCALE: np.array([noise.temperature for noise in noises], np.float32),
        }


AddedLogits = Callable[[int], FloatArray]
"""Returns the numbers that a token adds to the next token's logits, [H]."""


class ChainProposal:
    """A `redraft.types.Proposal` over the logits of a chain.

    rows:   returns the logits [N, H] after the chain's nodes, before noise. It is called when a row is asked for.
    scale:  factor on logits.   tokens: of the columns.   added: for methods whose logits depend on the last token too.
    """

    def __init__(
        self, rows: Callable[[], Sequence[FloatArray] | Array], scale: float, tokens: IntArray | None,
        added: AddedLogits | None = None,
    ) -> None:  # fmt: skip
        self.tokens = tokens
        self._rows = cache(rows)
        self._scale = np.float32(scale)
        self._added = added

    def logits(self, depth: int, token: int) -> FloatArray:
        """Return the logits of the children of a node with this depth and token, float32[H]."""
        row: FloatArray = self._rows()[depth]
        if self._added is not None:
            row = row + self._added(token)
        return row * self._scale
