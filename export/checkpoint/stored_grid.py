"""Weights that are stored as codes, with a scale, a zero point and an offset for each block of a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

SYMMETRIC = {4: 8, 8: 128}
"""The operator's zero point by bits if a product has no tensor of zero points."""


@dataclass(frozen=True)
class Grid:
    """Scales, float32, zero points, uint8, and offsets, float32 or None for zeros, of a weight [out, in].

    All are [out, blocks].
    """

    scales: NDArray[np.float32]
    zeros: NDArray[np.uint8]
    offsets: NDArray[np.float32] | None = None

    @classmethod
    def from_minima(cls, scales: NDArray[np.float32], minima: NDArray[np.float32], bits: int) -> Grid:
        """Return the grid of code * scale + minimum."""
        steps = np.divide(-minima, scales, out=np.zeros_like(minima), where=scales != 0)
        zeros = np.clip(np.rint(steps), 0, (1 << bits) - 1)
        return cls(scales, zeros.astype(np.uint8), (minima + zeros * scales).astype(np.float32))

    def cut(self, pieces: int) -> Grid:
        """Return the grid of blocks that are `pieces` times smaller."""
        if pieces == 1:
            return self
        finer = [None if x is None else np.repeat(x, pieces, -1) for x in (self.scales, self.zeros, self.offsets)]
        return Grid(*finer)  # type: ignore[arg-type]

    def __getitem__(self, rows: Any) -> Grid:
        """Return the grid of some rows."""
        return Grid(self.scales[rows], self.zeros[rows], None if self.offsets is None else self.offsets[rows])

    @classmethod
    def joined(cls, grids: Sequence[Grid]) -> Grid:
        """Return the grids of parts of a weight, one after the other."""
        offsets = [g.offsets if g.offsets is not None else np.zeros_like(g.scales) for g in grids]
        any_offsets = any(g.offsets is not None for g in grids)
        scales, zeros = np.concatenate([g.scales for g in grids]), np.concatenate([g.zeros for g in grids])
        return cls(scales, zeros, np.concatenate(offsets) if any_offsets else None)


Coded: TypeAlias = tuple[NDArray[np.uint8], Grid]


@dataclass(frozen=True)
class StoredGrid:
    """A weight [out, in] that a checkpoint stores as codes, whose numbers all equal (code - zero) * scale + offset.

    bits: of a code.   block: numbers of a row that share scale, zero point and offset.
    symmetric: True if every zero point is the operator's own (`SYMMETRIC`) and there are no offsets.
    slabs: codes uint8 [outputs, in], one a byte, and their grids, a few outputs at a time.
    """

    bits: int
    block: int
    symmetric: bool
    slabs: Callable[[], Iterator[Coded]]
