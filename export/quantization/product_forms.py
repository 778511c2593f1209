"""The stored form of each product's weight, and the plan that a build makes of them: bits and smoothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from redraft.config import Precision
from redraft.export.checkpoint.sources import AnySource
from redraft.export.checkpoint.stored_grid import SYMMETRIC, Coded, Grid, StoredGrid
from redraft.export.quantization import rounding
from redraft.export.quantization.product_weights import ProductWeight
from redraft.export.quantization.rounding import BLOCK

UNROUNDED = 32
"""Bits of a product that keeps fp32 weights."""


@dataclass(frozen=True)
class Form:
    """The form in which a `MatMulNBits` stores its weight.

    bits:   4, 8, or UNROUNDED for a MatMul in fp32.   block: inputs that share a scale.
    zeros:  True if zero points are stored.   offsets: True if blocks have offsets, which multiply the block's sum.
    stored: True if codes, scales and minima are the checkpoint's own.
    """

    bits: int
    block: int = BLOCK
    zeros: bool = False
    offsets: bool = False
    stored: bool = False

    def blocks(self, inputs: int) -> int:
        """Return the number of blocks in a row of `inputs` numbers, those of the offsets included."""
        own = -(-inputs // self.block)
        return own + (-(-own // self.block) if self.offsets else 0)

    def columns(self, inputs: int) -> int:
        """Return the number of the product's inputs: `inputs`, and with offsets a sum for each block of them."""
        return inputs + (-(-inputs // self.block) if self.offsets else 0)


EIGHT_BITS = Form(8)


@dataclass(frozen=True)
class ProductPlan:
    """The choices of a build for its products. Parameters that are not named have the precision's own bits.

    bits:      4, 8 or UNROUNDED by the name of a weight's parameter.
    smoothing: by the first parameter of a product: positive factors [in] of the weight's inputs. The product's input is
               divided by them, so that the product is the same in exact arithmetic (SmoothQuant, arXiv 2211.10438).
    fixed:     parameters whose bits the user chose.
    """

    precision: Precision
    bits: Mapping[str, int] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()
    smoothing: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)

    def form(self, part: ProductWeight, source: AnySource, smoothed: bool, eight_bits: bool) -> Form:
        """Return the form of one parameter. eight_bits: a weight has 8 bits unless the checkpoint has fewer."""
        (name,) = part.parameters
        bits = self.bits.get(name, 8 if self.precision == "int8" or eight_bits else 4)
        grid = None if part.turned or smoothed or bits == UNROUNDED else source.grid(name)
        if bits == UNROUNDED:
            return Form(UNROUNDED)
        if grid is not None and keeps(grid, bits, name in self.bits or eight_bits, self.precision):
            offsets = not grid.symmetric and part.shape(source)[1] % grid.block == 0
            if grid.symmetric or offsets:
                stored_bits = 8 if self.precision == "int8" else grid.bits
                return Form(stored_bits, grid.block, not grid.symmetric, offsets, stored=True)
        if bits == 8:
            return EIGHT_BITS
        return Form(bits, zeros=True, offsets=part.shape(source)[1] % BLOCK == 0)


def keeps(grid: StoredGrid, bits: int, raised: bool, precision: Precision) -> bool:
    """Return True if a product keeps the checkpoint's codes.

    int4 keeps every grid, those of 5, 6 and 8 bits in 8 bits. int8 keeps symmetric grids with blocks of `BLOCK`, since
    smaller blocks cost a third of the speed. It rounds others after smoothing.
    """
    if precision == "int4":
        return grid.bits <= bits or (grid.bits == 8 and not raised)
    return grid.symmetric and grid.block == BLOCK and grid.bits <= bits


def coded(part: ProductWeight, source: AnySource, form: Form, factors: NDArray[np.float32] | None) -> Coded:
    """Return codes [outputs, blocks, block], one a byte, and the grid of one parameter in its form.

    factors: of the inputs, which multiply the weight before it is rounded.
    """
    codes, grids = [], []
    grid = source.grid(part.parameters[0]) if form.stored else None
    if grid is not None:
        moved = np.uint8(SYMMETRIC[form.bits] - SYMMETRIC[grid.bits] if grid.symmetric else 0)
        for values, fitted in grid.slabs():
            codes.append((values + moved).reshape(len(values), -1, form.block))
            grids.append(Grid(fitted.scales, fitted.zeros + moved, fitted.offsets))
    else:
        for slab in part.slabs(source):
            scaled = slab if factors is None else slab * factors
            fitted = rounding.fit(scaled, form.bits, form.offsets)
            codes.append(rounding.codes_of(scaled, fitted, form.bits))
            grids.append(fitted)
    return np.concatenate(codes), Grid.joined(grids)


def stored_arrays(
    codes: NDArray[np.uint8], grid: Grid, form: Form
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.uint8]]:
    """Return codes, scales and zero points as `MatMulNBits` stores them, the offsets as further blocks of a row.

    The offsets [outputs, blocks] are rounded like a weight of `blocks` inputs, each the sum of a block's inputs.
    """
    scales, zeros = grid.scales, grid.zeros
    if form.offsets:
        offsets = grid.offsets if grid.offsets is not None else np.zeros_like(scales)
        rows, blocks = offsets.shape
        padded = np.pad(offsets, ((0, 0), (0, -blocks % BLOCK)))
        fitted = rounding.fit(padded, form.bits)
        last_blocks = slice(None), slice(form.blocks(blocks * form.block) - blocks)
        further = fitted.cut(BLOCK // form.block)[last_blocks]
        more = rounding.codes_of(padded, fitted, form.bits).reshape(rows, -1, form.block)[last_blocks]
        codes = np.concatenate([codes, more], 1)
        scales, zeros = np.concatenate([scales, further.scales], 1), np.concatenate([zeros, further.zeros], 1)
    return rounding.packed(codes, form.bits), scales, rounding.packed(zeros, form.bits)
