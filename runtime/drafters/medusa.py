"""Medusa in the runtime: one engine call drafts a static tree from the last hidden state.

The heads keep no state. So each call of the verifier overwrites the rows of the call before, and a draft reads the last
one.
"""

from __future__ import annotations

from collections.abc import Sequence

from redraft import names
from redraft.engines.device import Array
from redraft.runtime.drafters.base import PREFIX_BLOCK
from redraft.runtime.drafters.engine import space_before
from redraft.runtime.drafters.one_call import OneCallDrafter, TreeCall
from redraft.runtime.requests.request import Request
from redraft.types import Outcome, Tree


class MedusaDrafter(OneCallDrafter):
    """Drafts from the hidden state that gave a sequence's last token."""

    def pending(self, batch: Sequence[Request], rows: int, slots: range) -> list[int] | None:
        """Return 0 for each sequence: no row is kept. Raises UsageError without space for `rows` rows."""
        if not any([self._state_of(seq) is not None for seq in batch]):
            return None
        space_before(rows)
        return [0] * len(batch)

    def prefilled(self, seq: Request, slot: int, start: int, tokens: int) -> None:
        """Note the rows of a chunk."""
        seq.drafting[self].pending = tokens

    def resume(self, seq: Request, earlier: Request, rows: int) -> int:
        """Begin `seq`. A row at least is computed again, for its hidden state."""
        self.begin(seq)
        return rows if rows < len(seq.tokens) - 1 else rows - PREFIX_BLOCK

    def accept(self, seq: Request, tree: Tree, outcome: Outcome) -> None:
        """Note the rows of the accepted path, the root's included."""
        seq.drafting[self].pending = 1 + len(outcome.path)

    @property
    def _widths(self) -> tuple[int, ...]:
        return (1,)

    def _width(self, rows: int) -> int:
        """Return 1: a draft reads one row."""
        return 1

    def _ready(self, seq: Request, slot: int) -> int:
        """Return the number of the row to read, from 1."""
        number: int = seq.drafting[self].pending
        return number

    def _fill(self, call: TreeCall, batch: Sequence[Request], rows: Sequence[int]) -> None:
        """Set the row that each sequence reads, and its last token."""
        self._fill_rows(call, rows, [])[:] = [seq.tokens[-1] for seq in batch]

    def _fill_rows(self, call: TreeCall, rows: Sequence[int], cache_len: Sequence[int]) -> Array:
        """Set the row that each sequence reads. Returns their tokens [B] for the caller to fill."""
        values = call.host_inputs.open()
        values[names.NUM_PENDING][:] = [row or 1 for row in rows]
        if call.stores:
            values[names.DRAFTED][:] = rows
        return values[names.TOKENS]


DRAFTER = MedusaDrafter
