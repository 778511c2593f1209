"""Weight-only blockwise quantization in the layout of ONNX Runtime's `MatMulNBits`.

Each row of a weight [out, in] is cut into blocks of 32; block j has its own scale and zero point (round to nearest,
asymmetric): w ≈ (q - zero) * scale with q in 0 .. 2^bits - 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK = 32


@dataclass(frozen=True)
class Quantized:
    """Codes uint8 [out, blocks, BLOCK*bits/8], low nibble first; scales float32 and zeros uint8, a row an output."""

    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zeros: NDArray[np.uint8]


def blocks_of(columns: int) -> int:
    """Blocks a row of `columns` inputs is cut into; the last one may be padded."""
    return -(-columns // BLOCK)


def zero_bytes(columns: int, bits: int) -> int:
    """Bytes of zero points a row."""
    return -(-blocks_of(columns) * bits // 8)


def quantize(weight: NDArray[np.float32], bits: int) -> Quantized:
    """Quantize [out, in] to 4 or 8 bits. Zero is always exact, so padding stays zero."""
    rows, columns = weight.shape
    count, levels = blocks_of(columns), (1 << bits) - 1
    padded = np.zeros((rows, count * BLOCK), np.float32)
    padded[:, :columns] = weight
    blocks = padded.reshape(rows, count, BLOCK)
    low = np.minimum(blocks.min(-1), 0)
    high = np.maximum(blocks.max(-1), 0)
    scales = np.where(high > low, (high - low) / levels, 1).astype(np.float32)
    zeros = np.clip(np.rint(-low / scales), 0, levels).astype(np.uint8)
    codes = np.clip(np.rint(blocks / scales[..., None]) + zeros[..., None], 0, levels).astype(np.uint8)
    if bits == 4:
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
        even = np.zeros((rows, 2 * zero_bytes(columns, bits)), np.uint8)
        even[:, :count] = zeros
        zeros = even[:, 0::2] | even[:, 1::2] << 4
    return Quantized(codes, scales, zeros)
