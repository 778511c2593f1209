"""Drafters that read the verifier's hidden states with a KV of their own. Their methods share this code.

Each row of the KV is a pair of the verifier's feature at a position and the next token. Rows of tokens that were
committed since the last draft are pending. The next draft computes them, in several chunks if necessary.

On a device a call computes all slots of a batch (`engine`). Chains of idle slots, which it would overwrite, are saved
before and restored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from redraft import names
from redraft.engines.device import Array, Buffer, Device, slots_of
from redraft.engines.drafters import BuiltDrafter
from redraft.names import DRAFT, RESAMPLE
from redraft.runtime.drafters.base import PREFIX_BLOCK
from redraft.runtime.drafters.engine import CATCH_UP, PendingFeatures
from redraft.runtime.drafters.one_call import CallShape, Drafting, OneCallDrafter, TreeCall
from redraft.runtime.requests.request import Request
from redraft.runtime.steps.verifier import WARM_SLOTS, Verifier
from redraft.types import Budget, Outcome, Tree

_CATCH_UP_CALL = "catch_up"
"""A call of the draft graph that computes pending rows and drafts nothing."""


class HiddenStateDrafter(PendingFeatures, OneCallDrafter):
    """Drafts a tree or a chain in one engine call. The method's shape has `steps` and `nodes` of a draft."""

    def __init__(self, verifier: Verifier, built: BuiltDrafter, tables: Mapping[str, Array], options: Any) -> None:
        """Load its programs. Raises as `OneCallDrafter`."""
        idle = verifier.device.step_graphs and verifier.max_num_seqs > 1
        several = range(verifier.max_num_seqs) if idle else range(0)
        chains = (names.CHAIN_LOGITS,) if several and RESAMPLE in built.method.roles(built.shape) else ()
        self._lost_chain: Buffer | None = None
        super().__init__(verifier, built, tables, options, chains)
        self._chains = [
            _Backup(self._device, slots_of(self._state[chain], range(slot, slot + 1)))
            for chain in chains
            for slot in several
        ]

    def prefilled(self, seq: Request, slot: int, start: int, tokens: int) -> None:
        """Compute the pending rows that may not wait. The token of the last row is not known yet."""
        seq.drafting[self].pending += tokens
        self._catch_up(seq, slot, self._most_waiting)

    def waiting(self, seq: Request) -> int:
        pending: int = seq.drafting[self].pending
        return pending - CATCH_UP

    def catch_up(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> None:
        for slot, (seq, budget) in enumerate(zip(batch, budgets, strict=True)):
            if budget.nodes:
                self._catch_up(seq, slot, CATCH_UP)

    def resume(self, seq: Request, earlier: Request, rows: int) -> int:
        """Take over the rows that are pairs of tokens in common, and the hidden states that still wait for a token.

        If a row has used the last hidden state in common, the verifier computes a block again to give it once more.
        """
        state: Drafting | None = earlier.drafting.get(self)
        if state is None:
            return super().resume(seq, earlier, rows)
        if rows <= state.cache_len:
            rows -= PREFIX_BLOCK
            seq.drafting[self] = Drafting(self.shape.steps, cache_len=rows)
        else:
            seq.drafting[self] = Drafting(self.shape.steps, state.cache_len, rows - state.cache_len)
        return rows

    def accept(self, seq: Request, tree: Tree, outcome: Outcome) -> None:
        """Update the counts of pending rows. The verifier has gathered the rows already."""
        drafting: Drafting = seq.drafting[self]
        drafting.pending += 1 + len(outcome.path)
        drafting.used += 1 + len(outcome.path)

    def _ready(self, seq: Request, slot: int) -> int:
        """Return how many rows of a sequence are pending, after computing all but the last CATCH_UP."""
        drafting: Drafting = seq.drafting[self]
        if not drafting.pending:
            raise ValueError("nothing was committed since the last draft of a sequence")
        self._catch_up(seq, slot, CATCH_UP)
        return drafting.pending

    def _catch_up(self, seq: Request, slot: int, most: int) -> None:
        """Compute rows of a sequence until at most `most` are pending."""
        drafting: Drafting = seq.drafting[self]
        while drafting.pending > most:
            self._make_space(seq, slot)

    def _run_draft(self, call: TreeCall, batch: Sequence[Request], rows: Sequence[int]) -> None:
        """Run a draft, and keep the chains of sequences without rows."""
        backups = self._chain_backups(batch, rows)
        for backup in backups:
            backup.save()
        super()._run_draft(call, batch, rows)
        for backup in backups:
            backup.restore()

    def _warm_calls(self) -> list[CallShape]:
        """Return the calls that catch up, and those of `OneCallDrafter`."""
        slots = range(min(self.verifier.max_num_seqs, WARM_SLOTS))
        catching_up: list[CallShape] = [(_CATCH_UP_CALL, range(slot, slot + 1), CATCH_UP) for slot in slots]
        return catching_up + super()._warm_calls()

    def _bound(self, kind: str, slots: range, width: int) -> TreeCall:
        """Return a call over the slots' state, bound to buffers. A call that catches up stores nothing else."""
        if kind != _CATCH_UP_CALL:
            return super()._bound(kind, slots, width)
        others = dict(self._noise.without)
        if names.CHAIN_LOGITS in self._state:
            chain = slots_of(self._state[names.CHAIN_LOGITS], slots)
            others[names.CHAIN_LOGITS] = self._lost_chain = self._lost_chain or _like(self._device, chain)
        return self._over(DRAFT, slots, width, others, None)

    def _make_space(self, seq: Request, slot: int) -> None:
        """Compute CATCH_UP rows of a sequence that has more, and move the rest to the front. Overwrites its chain."""
        drafting: Drafting = seq.drafting[self]
        call = self._call(_CATCH_UP_CALL, range(slot, slot + 1), self._width(CATCH_UP))
        self._fill(call, [seq], [CATCH_UP])
        self._run(DRAFT, call.work)
        drafting.used = self.shape.steps
        self._drop(slot)

    def _fill(self, call: TreeCall, batch: Sequence[Request], rows: Sequence[int]) -> None:
        """Set the next run's inputs: the first rows[i] pending rows of sequence i. No rows mean no draft."""
        cache_len = [state.cache_len if (state := self._state_of(seq)) else 0 for seq in batch]
        tokens = self._fill_rows(call, rows, cache_len)
        for place, (seq, start, count) in enumerate(zip(batch, cache_len, rows, strict=True)):
            if count:
                tokens[place, :count] = seq.tokens[start + 1 : start + 1 + count]
                drafting: Drafting = seq.drafting[self]
                drafting.cache_len += count
                drafting.pending -= count

    def _fill_rows(self, call: TreeCall, rows: Sequence[int], cache_len: Sequence[int]) -> Array:
        """Set the position and number of the next draft's rows. Returns their tokens [B, M] for the caller to fill."""
        values = call.host_inputs.open()
        positions, pending, lengths = values[names.POSITIONS], values[names.NUM_PENDING], values[names.CACHE_LEN]
        width = call.width
        for place, start in enumerate(cache_len):
            positions[place] = self._positions[start : start + width]
            pending[place] = rows[place] or 1
            lengths[place] = start
        values[names.KV_LEN][0] = max(cache_len) + width
        if call.stores:
            values[names.DRAFTED][:] = rows
        return values[names.TOKENS]

    def _chain_backups(self, batch: Sequence[Request], rows: Sequence[int]) -> list[_Backup]:
        """Return copies of the chains that a draft overwrites although it computes no row of their sequences."""
        if 0 not in rows or not self._chains:
            return []
        return [
            self._chains[slot]
            for slot, (seq, count) in enumerate(zip(batch, rows, strict=True))
            if not count and (state := self._state_of(seq)) and state.used < self.shape.steps
        ]


class _Backup:
    """A copy of a buffer, which restores the buffer after a call has overwritten it."""

    def __init__(self, device: Device, buffer: Buffer) -> None:
        copy = _like(device, buffer)
        self.save, self.restore = device.copy(copy, buffer), device.copy(buffer, copy)


def _like(device: Device, buffer: Buffer) -> Buffer:
    """Return a new buffer of the same type and shape."""
    return device.empty(buffer.dtype, *buffer.shape)


DRAFTER = HiddenStateDrafter
