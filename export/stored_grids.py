"""Weights that a checkpoint stores as codes on a grid. A quantized product uses these codes without loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from redraft.export.quantize import Grid

Coded: TypeAlias = tuple[NDArray[np.uint8], Grid]


@dataclass(frozen=True)
class StoredGrid:
    """A weight [out, in] whose numbers all equal (code - zero) * scale + offset.

    bits: of a code.   block: numbers of a row that share scale, zero point and offset.
    symmetric: True if every zero point is the operator's own (`quantize.SYMMETRIC`) and there are no offsets.
    slabs: codes uint8 [outputs, in], one a byte, and their grids, a few outputs at a time.
    """

    bits: int
    block: int
    symmetric: bool
    slabs: Callable[[], Iterator[Coded]]
