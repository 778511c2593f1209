"""Weight-only quantization by DequantizeLinear: codes within half a step, and equal results in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest

from redraft import names, signatures
from redraft.config import BuildConfig, Precision
from redraft.engines.tensorrt import operators
from redraft.engines.tensorrt.prepare import prepare
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.quantization.dequantize import LARGEST, Kind, block_of, codes_of, pack, scales_of
from redraft.export.verifier import VerifierExport, export_verifier
from tests.export.models import write_checkpoint

pytestmark = pytest.mark.usefixtures("traced_once")

KINDS: tuple[Kind, ...] = ("int8", "int4", "fp8")
WEIGHT = np.random.default_rng(0).standard_normal((6, 128)).astype(np.float32)
WEIGHT[0] = 0
Exports = Callable[[Precision], tuple[VerifierExport, Path]]


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
    tensor = onnx.helper.make_tensor("t", onnx.TensorProto.INT4, codes.shape, pack(codes).tobytes(), raw=True)
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor).astype(np.int8), codes)


def test_blocks_fit_the_inputs() -> None:
    assert [block_of("int4", n, 2) for n in (256, 192, 96)] == [128, 64, None]
    assert block_of("int4", 128, 3) is None
    assert block_of("int8", 96, 3) == 0


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    """A small Llama for TensorRT in a precision, exported once, and its folder."""
    root = tmp_path_factory.mktemp("exports")
    write_checkpoint(root / "checkpoint", "llama", hidden_size=64, intermediate_size=128)
    checkpoint = Checkpoint.open(root / "checkpoint")

    @cache
    def export(precision: Precision) -> tuple[VerifierExport, Path]:
        config = BuildConfig(precision=precision, backend="tensorrt")
        return export_verifier(checkpoint, root / precision, config), root / precision

    return export


def logits(exported: VerifierExport, folder: Path) -> np.ndarray:
    half = {"float16": np.float16, "float32": np.float32}[exported.shape.dtype]
    rows = np.arange(5)
    feeds = {
        names.TOKEN_IDS: rows[None] + 3, names.POSITIONS: rows[None], names.TREE_MASK: np.tri(5, dtype=bool)[None],
        names.CACHE_LEN: np.zeros(1, np.int64), names.KV_LEN: np.array([5]), names.OUTPUT_ROWS: rows[None],
    }  # fmt: skip
    cache = (1, exported.shape.kv_heads, 16, exported.shape.head_dim)
    feeds |= {name: np.zeros(cache, half) for name in signatures.caches(exported.shape)}
    session = ort.InferenceSession(folder / exported.graph, providers=["CPUExecutionProvider"])
    return np.asarray(session.run([names.LOGITS], feeds)[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_graph_runs_with_dequantized_weights(kind: Kind, exports: Exports) -> None:
    exported, folder = exports(kind)
    assert exported.shape.dtype == "float16"
    model = onnx.load(folder / exported.graph, load_external_data=False)
    assert "MatMulNBits" not in {node.op_type for node in model.graph.node}
    products = sum(node.op_type == "MatMul" for node in model.graph.node)
    assert sum(node.op_type == "DequantizeLinear" for node in model.graph.node) == products - 1  # all but the logits
    onnx.checker.check_model(folder / exported.graph, full_check=True)
    expected, found = logits(*exports("fp32")), logits(exported, folder)
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert 1e-4 < error < {"int8": 0.1, "int4": 0.6, "fp8": 0.3}[kind]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "bf16", *KINDS])
def test_the_parser_takes_every_precision(precision: Precision, exports: Exports) -> None:
    exported, folder = exports(precision)
    for release in ((10, 9), (10, 15)):
        prepared = prepare(folder, exported.graph, names.VERIFIER, release, "plugin")
        assert list(operators.problems(prepared, release)) == []
