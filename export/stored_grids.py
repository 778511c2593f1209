"""Weights that a checkpoint stores as codes on a grid. A quantized product uses these codes without loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from redraft.export import quantize
from redraft.export.quantize import Grid

if TYPE_CHECKING:
    from redraft.export.product_weights import ProductWeight
    from redraft.export.sources import AnySource

Coded: TypeAlias = tuple[NDArray[np.uint8], Grid]


@dataclass(frozen=True)
class StoredGrid:
    """A weight [out, in] whose numbers all equal (code - zero) * scale.

    bits: of a code.   block: numbers of a row that share scale and zero point.
    slabs: codes uint8 [outputs, in], one a byte, and their grids, a few outputs at a time.
    """

    bits: int
    block: int
    slabs: Callable[[], Iterator[Coded]]


def fits(weight: ProductWeight, source: AnySource, bits: int) -> bool:
    """Return True if `bits` hold every part of a weight exactly."""
    return all(grid is not None for grid in _grids(weight, source, bits))


def block_of(weight: ProductWeight, source: AnySource, bits: int) -> int:
    """Return the block size that fits all parts of a weight: the least of its stored grids."""
    return min((grid.block for grid in _grids(weight, source, bits) if grid), default=quantize.BLOCK)


def coded(weight: ProductWeight, source: AnySource, bits: int, block: int) -> Iterator[Coded]:
    """Yield MatMulNBits codes, [outputs, blocks, block * bits / 8], and their grids, a few outputs at a time.

    A part with a stored grid keeps it. Other parts are quantized.
    """
    grids = _grids(weight, source, bits)
    if not any(grids):
        yield from (_fitted(slab, bits, block) for slab in weight.slabs(source))
        return
    for name, grid in zip(weight.parameters, grids, strict=True):
        if grid is None:
            yield from (_fitted(slab, bits, block) for slab in source.slabs(name))
        else:
            for codes, found in grid.slabs():
                blocks = codes.reshape(len(codes), -1, grid.block)
                yield _cut(quantize.packed(blocks, bits), found, grid.block // block)


def _grids(weight: ProductWeight, source: AnySource, bits: int) -> list[StoredGrid | None]:
    """Return the stored grid of each part, or None if `bits` cannot hold it."""
    if weight.turned:
        return [None]
    found = [source.grid(name) for name in weight.parameters]
    return [grid if grid is not None and grid.bits <= bits else None for grid in found]


def _fitted(slab: NDArray[np.float32], bits: int, block: int) -> Coded:
    grid = quantize.fit(slab, bits)
    return _cut(quantize.codes_of(slab, grid, bits), grid, quantize.BLOCK // block)


def _cut(codes: NDArray[np.uint8], grid: Grid, pieces: int) -> Coded:
    """Return the grid with every block cut into smaller ones, which keep its scale and zero point."""
    rows, blocks, size = codes.shape
    finer = Grid(np.repeat(grid.scales, pieces, -1), np.repeat(grid.zeros, pieces, -1))
    return codes.reshape(rows, blocks * pieces, size // pieces), finer
