"""Weight-only quantization by DequantizeLinear: codes within half a step, and equal results in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import onnx
import pytest

from redraft import names
from redraft.engines.tensorrt import operators
from redraft.engines.tensorrt.prepare import prepare
from redraft.export.quantization.dequantize import LARGEST, Kind, block_of, codes_of, scales_of
from redraft.export.quantization.rounding import packed
from tests.export.models import Exported

KINDS: tuple[Kind, ...] = ("int8", "int4", "fp8")
WEIGHT = np.random.default_rng(0).standard_normal((6, 128)).astype(np.float32)
WEIGHT[0] = 0
SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2)


@pytest.mark.parametrize("kind", KINDS)
def test_codes_times_scales_are_within_half_a_step(kind: Kind) -> None:
    block = block_of(kind, 128, 6)
    assert block is not None
    scales = scales_of(WEIGHT, kind, np.float16, block)
    codes = codes_of(WEIGHT, scales, kind, block)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) if kind == "fp8" else codes.astype(np.float32)
    wide = scales.astype(np.float32)
    spread = np.repeat(wide, block, axis=1) if block else wide[:, None]
    step = np.maximum(np.abs(WEIGHT) / 16, spread / 512) if kind == "fp8" else spread / 2
    assert (np.abs(values * spread - WEIGHT) <= step * 1.01).all()
    assert np.abs(values).max() <= LARGEST[kind]
    assert (scales > 0).all()


def test_small_weights_keep_positive_scales() -> None:
    tiny = np.full((2, 128), 1e-9, np.float32)
    for kind in KINDS:
        assert (scales_of(tiny, kind, np.float16, block_of(kind, 128, 2) or 0) > 0).all()


def test_four_bits_are_packed_as_onnx_reads_them() -> None:
    codes = np.array([[-7, 7, 0, -1], [3, -4, 5, 6]], np.int8)
    stored = packed(codes.view(np.uint8) & np.uint8(15), 4)
    tensor = onnx.helper.make_tensor("t", onnx.TensorProto.INT4, codes.shape, stored.tobytes(), raw=True)
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor).astype(np.int8), codes)


def test_blocks_fit_the_inputs() -> None:
    assert [block_of("int4", n, 2) for n in (256, 192, 96)] == [128, 64, None]
    assert block_of("int4", 128, 3) is None
    assert block_of("int8", 96, 3) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_graph_runs_and_the_parser_takes_it(kind: Kind, exports: Callable[..., Exported]) -> None:
    exported = exports("llama", kind, "tensorrt", **SIZES)
    assert exported.verifier.shape.dtype == "float16"
    count = exported.operators()
    assert "MatMulNBits" not in count
    assert count["DequantizeLinear"] == count["MatMul"] - 1  # all but the logits
    onnx.checker.check_model(exported.folder / exported.verifier.graph, full_check=True)
    unrounded = exports("llama", "fp16", "tensorrt", **SIZES)
    assert 1e-4 < exported.error(unrounded) < {"int8": 0.1, "int4": 0.6, "fp8": 0.3}[kind]
    for release in ((10, 9), (10, 15)):
        prepared = prepare(exported.folder, exported.verifier.graph, names.VERIFIER, release, "plugin")
        assert list(operators.problems(prepared, release)) == []
