"""The distributions that a drafter's candidates were drawn from, as rejection sampling needs them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several

import numpy as np

from redraft.engines.device import Array, Buffer
from redraft.types import FloatArray, IntArray

AddedLogits = Callable[[int], FloatArray]
"""Returns the numbers that a token adds to the next token's logits, [H]."""


class ChainProposal:
    """A `redraft.types.Proposal` over the logits of a chain. A row is computed when it is asked for.

    chain:  the slot's logits [1, N, H], before noise.   first_step: steps of them that earlier trees used.
    scale:  factor on logits.   tokens: of the columns.   added: for methods whose logits depend on the last token too.
    """

    def __init__(
        self, chain: Buffer, first_step: int, scale: float, tokens: IntArray | None, added: AddedLogits | None
    ) -> None:
        self.tokens = tokens
        self._chain = chain
        self._first_step = first_step
        self._scale = np.float32(scale)
        self._added = added
        self._read: Array | None = None

    def logits(self, depth: int, token: int) -> FloatArray:
        """Return the logits of the children of a node with this depth and token, float32[H]."""
        if self._read is None:
            self._read = self._chain.read() if self._chain.host is None else self._chain.host
        row: FloatArray = self._read[0, self._first_step + depth]
        if self._added is not None:
            row = row + self._added(token)
        return row * self._scale


class RowsProposal:
    """A `redraft.types.Proposal` of a chain over rows that the host has.

    rows: the logits after each node of the chain, before noise.   scale: factor on logits.   tokens: of the columns.
    """

    def __init__(self, rows: Several[FloatArray], scale: float, tokens: IntArray | None) -> None:
        self.tokens = tokens
        self._rows = rows
        self._scale = np.float32(scale)

    def logits(self, depth: int, token: int) -> FloatArray:
        """Return the logits after the node at this depth, float32[H]."""
        row: FloatArray = self._rows[depth] * self._scale
        return row
