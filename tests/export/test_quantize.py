"""Blockwise quantization: bounds on the error, exact zeros, and the layout that ONNX Runtime reads."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from redraft.export import quantize
from redraft.export.quantize import BLOCK, codes_of, fit, packed


def dequantize(weight: np.ndarray, bits: int) -> np.ndarray:
    """The numbers of the codes, by the definition in the module's docstring."""
    grid = fit(weight, bits)
    codes = codes_of(weight, grid, bits)
    if bits == 4:
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:2], BLOCK)
    values = (codes.astype(np.float32) - grid.zeros[..., None]) * grid.scales[..., None]
    return values.reshape(len(weight), -1)[:, : weight.shape[1]]


@pytest.mark.parametrize("columns", [32, 96, 172, 5])
def test_error_of_8_bits_is_at_most_half_a_step(columns):
    weight = np.random.default_rng(0).standard_normal((7, columns)).astype(np.float32)
    padded = np.zeros((7, -(-columns // BLOCK) * BLOCK), np.float32)
    padded[:, :columns] = weight
    blocks = padded.reshape(7, -1, BLOCK)
    step = (np.maximum(blocks.max(-1), 0) - np.minimum(blocks.min(-1), 0)) / 255
    limit = (
        np.repeat(step, BLOCK, axis=1)[:, :columns] * 1.01
    )  # zero points are rounded too: up to a whole step at the ends
    assert (np.abs(dequantize(weight, 8) - weight) <= limit).all()


@pytest.mark.parametrize("columns", [32, 172])
def test_4_bits_are_closer_than_a_grid_over_the_whole_range(columns, monkeypatch):
    """The search reduces the squared error, compared with only the whole range of a block."""
    weight = np.random.default_rng(0).standard_normal((64, columns)).astype(np.float32)
    searched = np.square(dequantize(weight, 4) - weight).sum()
    monkeypatch.setattr(quantize, "WIDTHS", (1.0,))
    assert searched < 0.99 * np.square(dequantize(weight, 4) - weight).sum()


def test_a_grid_does_not_depend_on_other_rows(monkeypatch):
    weight = np.random.default_rng(0).standard_normal((9, 96)).astype(np.float32)
    whole = fit(weight, 4)
    monkeypatch.setattr(quantize, "_PIECE", 200)
    pieces = fit(weight, 4)
    np.testing.assert_array_equal(whole.scales, pieces.scales)
    np.testing.assert_array_equal(whole.zeros, pieces.zeros)


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_rows_and_one_sided_blocks_are_exact_at_zero(bits):
    weight = np.zeros((3, 64), np.float32)
    weight[1] = np.linspace(5, 6, 64)
    weight[2, ::2] = -3
    found = dequantize(weight, bits)
    assert (found[0] == 0).all()
    assert (found[2, 1::2] == 0).all()


@pytest.mark.parametrize(("bits", "error"), [(8, 0.02), (4, 0.2)])
@pytest.mark.parametrize("columns", [64, 172])
def test_onnx_runtime_reads_the_layout(bits, error, columns):
    """The product equals the one over the dequantized weight, up to the int8 activations of accuracy level 4."""
    generator = np.random.default_rng(0)
    weight = generator.standard_normal((24, columns)).astype(np.float32)
    x = generator.standard_normal((3, columns)).astype(np.float32)
    grid = fit(weight, bits)
    parts = {"codes": codes_of(weight, grid, bits), "scales": grid.scales, "zeros": packed(grid.zeros, bits)}
    node = helper.make_node(
        "MatMulNBits", ["x", *parts], ["y"], domain="com.microsoft",
        K=columns, N=24, bits=bits, block_size=BLOCK, accuracy_level=4,
    )  # fmt: skip
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, columns])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 24])],
        [numpy_helper.from_array(v, k) for k, v in parts.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    (y,) = onnxruntime.InferenceSession(onnx.ModelProto.SerializeToString(model)).run(None, {"x": x})
    expected = x @ dequantize(weight, bits).T
    assert np.abs(y - expected).max() < 0.02 * np.abs(expected).max()
    assert np.abs(y - x @ weight.T).max() < error * np.abs(expected).max()
