"""A steered draft model in the runtime: each of its rows has a bias from the verifier's hidden states.

Row q, the token at position q, is steered by the hidden states of an earlier position p = q - δ:

- A draft's rows all have those of the node whose logits gave the last returned token. This token is the root, at
  position t, so p = t - 1: the root's row has δ = 1, and the row of the i-th drafted token δ = i + 1.
- Rows that catch up have δ = 1: those of the prompt, of tokens of plain steps or of other drafters, and of a
  draft's last token if it was accepted. Position 0 has no earlier one, so its row has no bias.
- Rows of accepted drafted tokens are kept, with keys and values as they were made.

So hidden states of all committed tokens wait until a row has used them, or was kept without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from redraft import names
from redraft.engines.device import Array, Buffer, Device, Program, Run
from redraft.lru import LruCache
from redraft.names import STEER
from redraft.runtime.drafters.decoder import DecoderDrafter, Drafting
from redraft.runtime.drafters.engine import CATCH_UP, EngineDrafter, PendingFeatures
from redraft.runtime.requests.request import Request
from redraft.runtime.steps.bound_step import gathered
from redraft.types import Outcome, Tree


@dataclass(slots=True)
class SteeredDrafting(Drafting):
    """State of one sequence.   pending: positions whose hidden states wait.   first: the first of these positions."""

    first: int = 0
    pending: int = 0


class SteeredDrafter(PendingFeatures, DecoderDrafter):
    """Drafts chains with a decoder that the verifier's hidden states steer."""

    step_graphs = (names.STEP_GATHER_FEATURES,)

    def _open(self) -> None:
        """Let the verifier gather hidden states, and prepare memory for biases."""
        slots, size = self.verifier.max_num_seqs, self.shape.steering
        # Of one call. A catch-up, of any slot, has its biases in the same place: no draft is then in progress.
        self._biases = self._device.empty(self.shape.dtype, slots, CATCH_UP, size)
        self._last = self._device.empty(self.shape.dtype, slots, 1, size)
        self._steers: LruCache[tuple[range, int], SteerCall] = LruCache(self._most_calls, self._device.wait)
        self.verifier.attach(self)
        super()._open()

    def begin(self, seq: Request) -> None:
        """Create the state of `seq`."""
        seq.drafting[self] = SteeredDrafting()

    def ready(self, seq: Request) -> bool:
        """True if a hidden state comes before the root, which steers a draft."""
        return len(seq.tokens) > 1

    def resume(self, seq: Request, earlier: Request, rows: int) -> int:
        """Begin `seq` without rows of the earlier request, since it does not know which hidden state steered each."""
        return EngineDrafter.resume(self, seq, earlier, rows)

    def prefilled(self, seq: Request, slot: int, start: int, tokens: int) -> None:
        """Compute the rows of the prompt so far that may not wait."""
        seq.drafting[self].pending += tokens
        super().prefilled(seq, slot, start, tokens)

    def accept(self, seq: Request, tree: Tree, outcome: Outcome) -> None:
        """Count the hidden states of root and path. The verifier has gathered them already."""
        seq.drafting[self].pending += 1 + len(outcome.path)

    def _make_space(self, seq: Request, slot: int) -> None:
        state: SteeredDrafting = seq.drafting[self]
        state.commit(seq.tokens)
        if state.cache_len - 1 - state.first < CATCH_UP:
            self._compute(seq, slot)
        else:
            self._forget(state, slot, state.cache_len)

    def _prepare(
        self,
        slots: range,
        starts: Sequence[int],
        pending: Sequence[Sequence[int]],
        batch: Sequence[Request] = (),
    ) -> None:
        """Compute the biases of the next call's rows, and those of a draft: of the last row of each slot."""
        width = self._width(max(map(len, pending)))
        call = self._steers.get((slots, width), lambda: self._steer_call(slots, width))
        places = [0] * len(slots)
        for place, seq in enumerate(batch):
            if pending[place]:
                places[place] = starts[place] - 1 - seq.drafting[self].first
        call.fill(self._positions, starts, [len(rows) for rows in pending], places)
        self._run(STEER, call.work)
        for slot, seq, start, rows in zip(slots, batch, starts, pending, strict=False):
            if rows:
                self._forget(seq.drafting[self], slot, start + len(rows))

    def _forget(self, state: SteeredDrafting, slot: int, rows: int) -> None:
        """Drop the hidden states that the first `rows` rows used, all or a multiple of CATCH_UP."""
        if (used := rows - 1 - state.first) >= state.pending:
            state.first, state.pending = state.first + state.pending, 0
            return
        for _ in range(used // CATCH_UP):
            self._drop(slot)
            state.first += CATCH_UP
            state.pending -= CATCH_UP

    def _read(self, slots: range, width: int) -> Mapping[str, Buffer]:
        """Return the biases of a run's rows. Runs of one row have the bias of the draft."""
        if width == 1:
            return {names.STEERING: self._last.part(len(slots), 1, self.shape.steering)}
        return {names.STEERING: self._biases.part(len(slots), width, self.shape.steering)}

    def _steer_call(self, slots: range, width: int) -> SteerCall:
        pending, sequences, size = list(self.pending_features(slots).values()), len(slots), self.shape.steering
        outputs = self._biases.part(sequences, width, size), self._last.part(sequences, 1, size)
        read = self._read_rows(sequences, width)
        return SteerCall(self._device, self._programs[STEER], self._gather, pending, read, *outputs)


class SteerCall:
    """Copies hidden states of some positions, and runs the graph `steer` over them.

    pending: the sources [B, W, n], by hidden state.   read: their copies [B, T, n], by the graph's input.
    biases, last: the outputs, [B, T, S] and [B, 1, S].
    """

    def __init__(  # noqa: PLR0913 - the buffers of one call
        self, device: Device, program: Program, gather: Program, pending: Sequence[Buffer], read: Mapping[str, Buffer],
        biases: Buffer, last: Buffer,
    ) -> None:  # fmt: skip
        sequences, self._width = biases.shape[:2]
        rows = sequences, self._width
        fields = {names.POSITIONS: rows, names.PATH: rows, names.OUTPUT_ROWS: (sequences, 1)}
        self._host_inputs = device.host_inputs(**fields)
        self._last_place = pending[0].shape[1] - 1
        inputs, start = self._host_inputs.buffers, device.empty("int64", sequences)
        known = {**read, names.STEERING: biases, names.STEERING_LAST: last}
        known |= {name: inputs[name] for name in (names.POSITIONS, names.OUTPUT_ROWS)}
        runs: list[Run] = []
        for source, features in zip(pending, read.values(), strict=True):
            runs.append(gathered(gather, source, inputs[names.PATH], features, start))
        self.work = device.chain([self._host_inputs.send, *runs, program.bind(known)])

    def fill(self, positions: Array, starts: Sequence[int], rows: Sequence[int], places: Sequence[int]) -> None:
        """Set the next run's rows: rows[b] ones from starts[b] on, whose hidden states begin at places[b]."""
        values = self._host_inputs.open()
        for slot, (start, count, place) in enumerate(zip(starts, rows, places, strict=True)):
            values[names.POSITIONS][slot] = positions[start : start + self._width]
            values[names.OUTPUT_ROWS][slot] = max(count - 1, 0)
            values[names.PATH][slot] = np.clip(np.arange(place, place + self._width), 0, self._last_place)


DRAFTER = SteeredDrafter
