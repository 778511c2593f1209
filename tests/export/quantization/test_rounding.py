"""Blockwise quantization: bounds on the error, exact zeros, and the layout that ONNX Runtime reads."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from redraft.export.checkpoint.stored_grid import Grid
from redraft.export.quantization import rounding
from redraft.export.quantization.product_forms import Form, stored_arrays
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


FORMS = [
    (Form(8), 64, 0.02),
    (Form(8), 172, 0.02),
    (Form(4, zeros=True), 172, 0.2),
    (Form(4, zeros=True, offsets=True), 64, 0.15),
    (Form(8, 16, zeros=True, offsets=True), 96, 0.02),
]


@pytest.mark.parametrize(("form", "columns", "error"), FORMS)
def test_onnx_runtime_reads_the_layout(form, columns, error):
    """The product equals the one over the dequantized weight, up to the int8 activations of accuracy level 4."""
    generator = np.random.default_rng(0)
    weight = generator.standard_normal((24, columns)).astype(np.float32)
    x = generator.standard_normal((3, columns)).astype(np.float32)
    grid = fit(weight, form.bits, form.offsets)
    codes = codes_of(weight, grid, form.bits)
    rounded = values_of(codes, grid)[:, :columns]
    codes, grid = codes.reshape(24, -1, form.block), grid.cut(BLOCK // form.block)
    stored = stored_arrays(codes, grid, form)
    parts = dict(zip(("codes", "scales", "zeros")[: 3 if form.zeros else 2], stored, strict=False))
    if form.offsets:
        sums = x.reshape(3, -1, form.block).sum(-1)
        x = np.concatenate([x, sums], 1)
    assert parts["codes"].shape[1] == form.blocks(columns)
    assert x.shape[1] == form.columns(columns)
    node = helper.make_node(
        "MatMulNBits", ["x", *parts], ["y"], domain="com.microsoft",
        K=x.shape[1], N=24, bits=form.bits, block_size=form.block, accuracy_level=4,
    )  # fmt: skip
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 24])],
        [numpy_helper.from_array(v, k) for k, v in parts.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    (y,) = onnxruntime.InferenceSession(onnx.ModelProto.SerializeToString(model)).run(None, {"x": x})
    expected = x[:, :columns] @ rounded.T
    assert np.abs(y - expected).max() < 0.02 * np.abs(expected).max()
    assert np.abs(y - x[:, :columns] @ weight.T).max() < error * np.abs(expected).max()
