"""Codes, scales, zero points and offsets of GGUF's quantized types, whose numbers are code * scale + minimum."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import gguf
import numpy as np
from numpy.typing import NDArray

from redraft.export.checkpoint.stored_grid import SYMMETRIC, Coded, Grid, StoredGrid

SYMMETRIC_TYPES = ("Q4_0", "Q5_0", "Q8_0", "Q6_K")
"""Types without a minimum."""
MINIMA = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
"""Types whose blocks have a minimum."""
_ONE = np.frombuffer(np.float16(1).tobytes(), np.uint8)
_UNIT_SCALES = np.array([1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1], np.uint8)
"""Packed 6-bit scales and minima of a K type: eight scales of one, eight minima of zero."""


def stored_grid(kind: str, packed: Callable[[], Iterable[NDArray[np.uint8]]]) -> StoredGrid | None:
    """Return the grid of a matrix of a type, None for numbers. `packed` gives its bytes, some rows at a time."""
    if kind not in (*SYMMETRIC_TYPES, *MINIMA):
        return None
    slabs = lambda: (decode(part, kind) for part in packed())  # noqa: E731
    return StoredGrid(_bits(kind), 16 if kind == "Q6_K" else 32, kind in SYMMETRIC_TYPES, slabs)


def _bits(kind: str) -> int:
    """Return the bits of the operator's codes that hold a type's codes."""
    return 4 if kind.startswith("Q4_") else 8


def decode(packed: NDArray[np.uint8], kind: str) -> Coded:
    """Return codes [rows, columns] and grids of uint8 [rows, bytes]. The library unpacks blocks of scale one.

    Codes of types without a minimum are moved so that zero is the operator's own zero point.
    """
    number = gguf.GGMLQuantizationType[kind]
    blocks = packed.reshape(-1, gguf.GGML_QUANT_SIZES[number][1]).copy()
    scales, minima = _unit_blocks(blocks, kind)
    values = gguf.dequantize(blocks.reshape(packed.shape), number)
    scales, bits = scales.reshape(len(packed), -1), _bits(kind)
    if minima is not None:
        grid = Grid.from_minima(scales, minima.reshape(scales.shape), bits)
    else:
        values += SYMMETRIC[bits]
        grid = Grid(scales, np.full(scales.shape, SYMMETRIC[bits], np.uint8))
    return values.astype(np.uint8).reshape(len(packed), -1), grid


def _unit_blocks(blocks: NDArray[np.uint8], kind: str) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    """Return scales and minima of the blocks, and let the blocks have scales of one and minima of zero."""
    if kind == "Q6_K":  # 16 scales of one byte, times the block's scale
        scales = _floats(blocks[:, 208:210]) * blocks[:, 192:208].view(np.int8).astype(np.float32)
        blocks[:, 208:210], blocks[:, 192:208] = _ONE, 1
        return scales, None
    scales = _floats(blocks[:, :2])
    blocks[:, :2] = _ONE
    if kind not in MINIMA:
        return scales, None
    minima = _floats(blocks[:, 2:4])
    blocks[:, 2:4] = 0
    if kind.endswith("_K"):  # eight scales and minima of six bits, times the block's
        of_scale, of_minimum = gguf.quants.Q4_K.get_scale_min(blocks[:, 4:16])
        scales, minima = scales * of_scale.astype(np.float32), -minima * of_minimum.astype(np.float32)
        blocks[:, 4:16] = _UNIT_SCALES
    return scales, minima


def _floats(halves: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.ascontiguousarray(halves).view(np.float16).astype(np.float32)
