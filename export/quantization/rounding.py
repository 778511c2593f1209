"""Weight-only blockwise quantization in the layout of ONNX Runtime's `MatMulNBits`.

Each row of a weight [out, in] is cut into blocks of 32. A block has its own scale, zero point and offset:

    w ≈ (q - zero) * scale + offset, q in 0 .. 2^bits - 1

An 8-bit grid is symmetric: its zero is 128 and its offset 0. A 4-bit grid begins at the block's least number, or may be
narrower, since few numbers are near the ends. The operator's zero points are integers, so that the offset is the part
of the least number that a zero point cannot hold, at most half a step. `products` multiplies it by the block's sum.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray

from redraft.cpus import default_threads
from redraft.export.checkpoint.stored_grid import SYMMETRIC, Grid
from redraft.names import QUANTIZATION_BLOCK

BLOCK = QUANTIZATION_BLOCK
WIDTHS = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Candidate widths of a 4-bit grid, as shares of its block's range."""
_PIECE = 1 << 16
"""Numbers to process at once. Temporaries then stay in a core's cache, which is three times as fast."""


def blocks_of(columns: int) -> int:
    """Return the number of blocks in a row of `columns` inputs. The last one may be padded."""
    return -(-columns // BLOCK)


def fit(weight: NDArray[np.float32], bits: int, offsets: bool = False) -> Grid:
    """Return grids for the blocks of [out, in], of 4 or 8 bits. Padding stays zero.

    offsets: let 4-bit grids begin at the exact least number of a block; without, zero is exact.
    """
    blocks = _blocks(weight)
    step = max(1, _PIECE // max(1, blocks[0].size))
    pieces = [blocks[row : row + step] for row in range(0, len(blocks), step)]
    with ThreadPoolExecutor(default_threads().count) as pool:
        return Grid.joined(list(pool.map(partial(_fitted, bits=bits, offsets=offsets), pieces)))


def _fitted(blocks: NDArray[np.float32], bits: int, offsets: bool) -> Grid:
    """Return the grids of [out, blocks, BLOCK]."""
    levels = (1 << bits) - 1
    if bits == 8:
        scales = np.abs(blocks).max(-1) / np.float32(SYMMETRIC[bits] - 1)
        return Grid(
            np.where(scales > 0, scales, 1).astype(np.float32), np.full(scales.shape, SYMMETRIC[bits], np.uint8)
        )
    return _with_offsets(blocks, levels, bits) if offsets else _with_zeros(blocks, levels)


def _with_offsets(blocks: NDArray[np.float32], levels: int, bits: int) -> Grid:
    """Return grids code * scale + minimum. Tries widths, each with both numbers by least squares."""
    low, high = blocks.min(-1), blocks.max(-1)
    widest = np.where(high > low, (high - low) / levels, 1).astype(np.float32)
    middle = (low + high) / 2
    mean = blocks.mean(-1)
    scales, minima, best = widest, low, np.full_like(widest, np.inf)
    for width in WIDTHS:
        scale = widest * np.float32(width)
        start = middle - scale * np.float32(levels / 2) if width != 1 else low
        codes = np.clip(np.rint((blocks - start[..., None]) / scale[..., None]), 0, levels)
        centre = codes.mean(-1)
        centred = codes - centre[..., None]
        square = _inner(centred, centred)
        fitted = np.where(square > 0, _inner(centred, blocks) / np.maximum(square, 1e-9), scale).astype(np.float32)
        if width == 1:  # a checkpoint that was rounded to such a grid before stays on it
            exact = np.abs(codes * scale[..., None] + start[..., None] - blocks).max(-1) <= 1e-5 * np.abs(blocks).max(
                -1
            )
            fitted = np.where(exact, scale, fitted)
            least = np.where(exact, start, mean - fitted * centre)
        else:
            least = mean - fitted * centre
        error = codes * fitted[..., None] + least[..., None] - blocks
        loss = _inner(error, error)
        better = loss < best
        scales, minima = np.where(better, fitted, scales), np.where(better, least, minima)
        best = np.where(better, loss, best)
    return Grid.from_minima(scales.astype(np.float32), minima.astype(np.float32), bits)


def _with_zeros(blocks: NDArray[np.float32], levels: int) -> Grid:
    """Return grids whose zero is exact. Tries widths, each with its scale by least squares."""
    low, high = np.minimum(blocks.min(-1), 0), np.maximum(blocks.max(-1), 0)
    widest = np.where(high > low, (high - low) / levels, 1).astype(np.float32)
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
    """Return the nearest codes, [out, blocks, BLOCK], one a byte."""
    blocks = _blocks(weight)
    if grid.offsets is not None:
        blocks = blocks - grid.offsets[..., None]
    codes = blocks / grid.scales[..., None]
    np.rint(codes, out=codes)
    codes += grid.zeros[..., None]
    return np.clip(codes, 0, (1 << bits) - 1, out=codes).astype(np.uint8)


def values_of(codes: NDArray[np.uint8], grid: Grid) -> NDArray[np.float32]:
    """Return the numbers of codes [out, blocks, block], one a byte: [out, blocks * block]."""
    values = (codes.astype(np.float32) - grid.zeros[..., None]) * grid.scales[..., None]
    if grid.offsets is not None:
        values += grid.offsets[..., None]
    return values.reshape(len(codes), -1)


def packed(values: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Return codes or zero points as stored: for 4 bits, two a byte along the last axis, the first one low."""
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
