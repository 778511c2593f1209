"""Blockwise quantization: bounds on the error, and exact zeros."""

from __future__ import annotations

import numpy as np
import pytest

from redraft.export.checkpoint.stored_grid import Grid
from redraft.export.quantization import rounding
from redraft.export.quantization.rounding import BLOCK, codes_of, fit, values_of


def dequantize(weight: np.ndarray, bits: int, offsets: bool = False) -> np.ndarray:
    """The numbers of the codes."""
    grid = fit(weight, bits, offsets)
    return values_of(codes_of(weight, grid, bits), grid)[:, : weight.shape[1]]


@pytest.mark.parametrize("columns", [32, 96, 172, 5])
def test_error_of_8_bits_is_at_most_half_a_step(columns):
    weight = np.random.default_rng(0).standard_normal((7, columns)).astype(np.float32)
    padded = np.zeros((7, -(-columns // BLOCK) * BLOCK), np.float32)
    padded[:, :columns] = weight
    steps = np.abs(padded.reshape(7, -1, BLOCK)).max(-1) / 127
    limit = np.repeat(steps, BLOCK, axis=1)[:, :columns] * 0.5001
    assert (np.abs(dequantize(weight, 8) - weight) <= limit).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_of_a_grid_with_minima_stay_as_they_are(bits):
    """A checkpoint that was rounded before, such as Q4_1, loses nothing more."""
    generator = np.random.default_rng(0)
    codes = generator.integers(0, 1 << bits, (40, 3, BLOCK)).astype(np.uint8)
    codes[..., 0], codes[..., 1] = 0, (1 << bits) - 1
    scales = generator.uniform(0.5, 2, (40, 3)).astype(np.float32)
    minima = generator.uniform(-20, 5, (40, 3)).astype(np.float32)
    grid = Grid.from_minima(scales, minima, bits)
    weight = values_of(codes, grid)
    np.testing.assert_allclose(weight, (codes * scales[..., None] + minima[..., None]).reshape(40, -1), rtol=1e-5)
    np.testing.assert_array_equal(codes_of(weight, grid, bits), codes)
    if bits == 4:
        np.testing.assert_allclose(dequantize(weight, 4, offsets=True), weight, atol=1e-4)


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("columns", [32, 172])
def test_4_bits_are_closer_than_a_grid_over_the_whole_range(columns, offsets, monkeypatch):
    """The search reduces the squared error, compared with only the whole range of a block."""
    weight = np.random.default_rng(0).standard_normal((64, columns)).astype(np.float32)
    searched = np.square(dequantize(weight, 4, offsets) - weight).sum()
    monkeypatch.setattr(rounding, "WIDTHS", (1.0,))
    assert searched < 0.99 * np.square(dequantize(weight, 4, offsets) - weight).sum()


def test_a_grid_does_not_depend_on_other_rows(monkeypatch):
    weight = np.random.default_rng(0).standard_normal((9, 96)).astype(np.float32)
    whole = fit(weight, 4, offsets=True)
    monkeypatch.setattr(rounding, "_PIECE", 200)
    pieces = fit(weight, 4, offsets=True)
    for one, other in ((whole.scales, pieces.scales), (whole.zeros, pieces.zeros), (whole.offsets, pieces.offsets)):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_rows_and_one_sided_blocks_are_exact_at_zero(bits):
    weight = np.zeros((3, 64), np.float32)
    weight[1] = np.linspace(5, 6, 64)
    weight[2, ::2] = -3
    found = dequantize(weight, bits)
    assert (found[0] == 0).all()
    assert (found[2, 1::2] == 0).all()
