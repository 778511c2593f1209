"""Codes, scales, zero points and offsets of GGUF's quantized types, whose numbers are code * scale + minimum."""

from __future__ import annotations

import gguf
import numpy as np
from numpy.typing import NDArray

from redraft.export.quantization.rounding import SYMMETRIC, Coded, Grid

ZEROS = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128, "Q6_K": 32}
"""The code of the number zero, of types without a minimum."""
MINIMA = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
"""Types whose blocks have a minimum."""
BITS = {"Q4_0": 4, "Q4_1": 4, "Q4_K": 4}
"""Bits that the codes need; 8 for other types."""
BLOCKS = {"Q6_K": 16}
"""Numbers that share a scale; 32 for other types."""
_ONE = np.frombuffer(np.float16(1).tobytes(), np.uint8)
_UNIT_SCALES = np.array([1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1], np.uint8)
"""Packed 6-bit scales and minima of a K type: eight scales of one, eight minima of zero."""


def decode(packed: NDArray[np.uint8], kind: str) -> Coded:
    """Return codes [rows, columns] and grids of uint8 [rows, bytes]. The library unpacks blocks of scale one.

    Codes of types without a minimum are moved so that zero is the operator's own zero point.
    """
    number = gguf.GGMLQuantizationType[kind]
    blocks = packed.reshape(-1, gguf.GGML_QUANT_SIZES[number][1]).copy()
    scales, minima = _unit_blocks(blocks, kind)
    values = gguf.dequantize(blocks.reshape(packed.shape), number)
    scales, bits = scales.reshape(len(packed), -1), BITS.get(kind, 8)
    if minima is not None:
        return values.astype(np.uint8).reshape(len(packed), -1), Grid.from_minima(
            scales, minima.reshape(scales.shape), bits
        )
    values += SYMMETRIC[bits]
    zeros = np.full(scales.shape, SYMMETRIC[bits], np.uint8)
    return values.astype(np.uint8).reshape(len(packed), -1), Grid(scales, zeros)


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
