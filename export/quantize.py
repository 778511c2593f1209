"""Weight-only blockwise quantization in the layout of ONNX Runtime's `MatMulNBits`.

Each row of a weight [out, in] is cut into blocks of 32. A block has its own scale and zero point:

    w ≈ (q - zero) * scale, q in 0 .. 2^bits - 1

An 8-bit grid spans the block's range. A 4-bit grid may be narrower, since few numbers are near the ends. Quantization
tries five widths, each with its scale by least squares, and takes the one with the least squared error.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from redraft.cpus import default_threads
from redraft.names import QUANTIZATION_BLOCK

BLOCK = QUANTIZATION_BLOCK
WIDTHS = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Candidate widths of a 4-bit grid, as shares of its block's range."""
_PIECE = 1 << 16
"""Numbers to process at once. Temporaries then stay in a core's cache, which is three times as fast."""


@dataclass(frozen=True)
class Grid:
    """Scales, float32, and zero points, uint8, of a weight [out, in], both [out, blocks]."""

    scales: NDArray[np.float32]
    zeros: NDArray[np.uint8]


def blocks_of(columns: int) -> int:
    """Return the number of blocks in a row of `columns` inputs. The last one may be padded."""
    return -(-columns // BLOCK)


def fit(weight: NDArray[np.float32], bits: int) -> Grid:
    """Return grids for the blocks of [out, in], of 4 or 8 bits. Zero is always exact, so padding stays zero."""
    blocks = _blocks(weight)
    step = max(1, _PIECE // max(1, blocks[0].size))
    pieces = [blocks[row : row + step] for row in range(0, len(blocks), step)]
    with ThreadPoolExecutor(default_threads().count) as pool:
        grids = list(pool.map(partial(_fitted, bits=bits), pieces))
    return Grid(np.concatenate([grid.scales for grid in grids]), np.concatenate([grid.zeros for grid in grids]))


def _fitted(blocks: NDArray[np.float32], bits: int) -> Grid:
    """Return the grids of [out, blocks, BLOCK]."""
    levels = (1 << bits) - 1
    low, high = np.minimum(blocks.min(-1), 0), np.maximum(blocks.max(-1), 0)
    widest = np.where(high > low, (high - low) / levels, 1).astype(np.float32)
    if bits == 8:
        return Grid(widest, np.clip(np.rint(-low / widest), 0, levels).astype(np.uint8))
    scales, zeros, best = widest, np.zeros_like(widest), np.full_like(widest, -1)
    for width in WIDTHS:
        scale = widest * np.float32(width)
        zero = np.clip(np.rint(levels / 2 - (low + high) / (2 * scale)), 0, levels)
        steps = np.rint(blocks / scale[..., None])
        np.clip(steps, -zero[..., None], levels - zero[..., None], out=steps)
        product, square = _inner(steps, blocks), _inner(steps, steps)
        gain = product * product / np.maximum(square, 1)  # the squared error is that of zeros minus this
        better = gain > best
        fitted = np.where(square > 0, product / np.maximum(square, 1), scale)
        scales, zeros = np.where(better, fitted, scales), np.where(better, zero, zeros)
        best = np.where(better, gain, best)
    return Grid(scales.astype(np.float32), zeros.astype(np.uint8))


def _inner(left: NDArray[np.float32], right: NDArray[np.float32]) -> NDArray[np.float32]:
    products: NDArray[np.float32] = np.einsum("rbi,rbi->rb", left, right)
    return products


def codes_of(weight: NDArray[np.float32], grid: Grid, bits: int) -> NDArray[np.uint8]:
    """Return the nearest codes, [out, blocks, BLOCK * bits / 8]."""
    codes = np.rint(_blocks(weight) / grid.scales[..., None])
    codes += grid.zeros[..., None]
    return packed(np.clip(codes, 0, (1 << bits) - 1, out=codes).astype(np.uint8), bits)


def packed(values: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Return values in stored form: for 4 bits, two a byte along the last axis, the first one low."""
    if bits == 8:
        return values
    if values.shape[-1] % 2:
        values = np.concatenate([values, np.zeros_like(values[..., :1])], axis=-1)
    nibbles: NDArray[np.uint8] = values[..., 0::2] | values[..., 1::2] << np.uint8(4)
    return nibbles


def _blocks(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the weight as [out, blocks, BLOCK], padded with zeros."""
    rows, columns = weight.shape
    padding = blocks_of(columns) * BLOCK - columns
    return (np.pad(weight, ((0, 0), (0, padding))) if padding else weight).reshape(rows, -1, BLOCK)
