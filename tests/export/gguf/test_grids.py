"""Quantized products of a GGUF file keep the file's own codes and scales if these are exact."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from redraft import names
from redraft.config import BuildConfig
from redraft.errors import CheckpointError
from redraft.export.checkpoint.sources import Source
from redraft.export.gguf.checkpoint import GgufCheckpoint
from redraft.export.gguf.grids import MINIMA, SYMMETRIC_TYPES, decode
from redraft.export.quantization.rounding import values_of
from tests.export.gguf_files import File, random_blocks, random_file
from tests.export.models import Graph, export_verifier

pytestmark = pytest.mark.usefixtures("traced_once")

PARTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def wide_file(types: dict[str, str]) -> File:
    """A Llama with rows of 256 numbers and random blocks of these types, by the names of tensors."""
    file = random_file("llama", "Q8_0", hidden_size=256, intermediate_size=256, head_dim=64)
    file.keys |= {"embedding_length": 256, "feed_forward_length": 256, "rope.dimension_count": 64}
    for name, values in file.tensors.items():
        kind = next((kind for part, kind in types.items() if part in name), None)
        if kind is not None and values.ndim > 1 and values.shape[-1] == 256:
            file.types[name] = kind
            packed = random_blocks(kind, values.shape).reshape(
                len(values), -1, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
            )
            scale = packed[..., 208:210] if kind == "Q6_K" else packed[..., :2]
            size = {"Q6_K": 1e-4, "Q4_0": -2e-3, "Q5_0": -2e-3}.get(kind, 2e-3)
            scale[:] = np.frombuffer(np.float16(size).tobytes(), np.uint8)
            if kind in MINIMA:  # of five to nine steps, as weights around zero have
                steps = np.random.default_rng(1).uniform(5, 9, packed.shape[:2]) * (1 if kind.endswith("_K") else -1)
                packed[..., 2:4] = (size * steps).astype(np.float16)[..., None].view(np.uint8)
            if kind.endswith("_K"):
                packed[..., 4:16] = 0xAA  # eight scales and minima of 42
            file.packed[name] = packed.reshape(len(values), -1)
    return file


@dataclass
class Product:
    """Values of a quantized weight, offsets included; bits, block size, and whether its blocks have offsets."""

    values: np.ndarray
    bits: int
    block: int
    offsets: bool


def products(folder: Path, graph: str, columns: int = 256) -> dict[str, Product]:
    """Every quantized weight of a graph by its stem. All have `columns` inputs."""
    model = onnx.load(folder / graph)
    known = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    found = {}
    for node in model.graph.node:
        if node.op_type == "MatMulNBits":
            bits, block, rows = (
                next(a.i for a in node.attribute if a.name == name) for name in ("bits", "block_size", "N")
            )
            codes = unpacked(known[node.input[1]].reshape(rows, -1), bits)
            scales = known[node.input[2]].reshape(rows, -1)
            stored = len(node.input) > 3
            zeros = unpacked(known[node.input[3]].reshape(rows, -1), bits)[:, : scales.shape[1], None] if stored else 0
            numbers = (codes.reshape(rows, -1, block).astype(np.float32) - zeros - (not stored) * (1 << bits - 1)) * (
                scales[..., None]
            )
            numbers = numbers.reshape(rows, -1)
            values, sums = numbers[:, :columns], numbers[:, columns:]
            if sums.size:
                values = values + np.repeat(sums[:, : columns // block], block, 1)
            found[node.input[1].removesuffix(names.CODES)] = Product(values, bits, block, sums.size > 0)
    return found


def unpacked(codes: np.ndarray, bits: int) -> np.ndarray:
    return codes if bits == 8 else np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)


def expected(checkpoint: GgufCheckpoint, stem: str, rows: int) -> np.ndarray:
    """The weight of a product: its first parameter, and as many that follow it as it has rows."""
    layer, _, part = stem.removesuffix(".merged").removesuffix(".weight").rpartition(".")
    merged = next((parts[parts.index(part) :] for parts in PARTS if part in parts), (part,))
    every = [f"{layer}.{name}.weight" for name in merged] if layer else [f"{part}.weight"]
    return np.concatenate([slab for name in every for slab in checkpoint.slabs(checkpoint.tensors[name])])[:rows]


MIXED = {"attn_q": "Q4_K", "attn_k": "Q5_0", "attn_v": "Q6_K", "ffn_gate": "Q4_1", "ffn_up": "Q5_1", "ffn_down": "Q5_K"}


@pytest.mark.parametrize(
    ("precision", "types"),
    [
        ("int8", {}),
        ("int8", {"attn_": "Q5_0", "ffn_": "Q4_0"}),
        ("int4", {"attn_": "Q4_0", "ffn_": "Q4_0"}),
        ("int4", MIXED),
    ],
)
def test_products_are_the_files_numbers(precision, types, tmp_path):
    """What a zero point cannot hold of a minimum, half a step, is rounded to the weight's own bits."""
    checkpoint = GgufCheckpoint.open(wide_file(types).write(tmp_path / "m.gguf"))
    export = export_verifier(checkpoint, tmp_path, BuildConfig(precision=precision))
    found = products(tmp_path, export.graph)
    rows = 0
    for stem, product in found.items():
        exact = expected(checkpoint, stem, len(product.values))
        rows += len(exact)
        if product.offsets:
            steps = np.ptp(exact.reshape(len(exact), -1, 32), axis=-1).repeat(32, 1) / ((1 << product.bits) - 1)
            assert (np.abs(product.values - exact) <= 0.12 * steps).all()
        else:
            np.testing.assert_array_equal(product.values, exact)
    assert rows == 2 * (256 + 2 * 128 + 256 + 2 * 256 + 256) + checkpoint.config["vocab_size"]
    assert {(product.bits, product.block) for product in found.values()} == (
        {(8, 32)} if precision == "int8" else {(4, 32), (8, 32), *([(8, 16)] if types == MIXED else [])}
    )


def test_int8_rounds_minima_and_blocks_of_sixteen(tmp_path):
    """They would cost a third of the speed of 8 bits."""
    checkpoint = GgufCheckpoint.open(wide_file({"attn_q": "Q4_1", "attn_v": "Q6_K"}).write(tmp_path / "m.gguf"))
    export = export_verifier(checkpoint, tmp_path, BuildConfig(precision="int8"))
    found = {stem: product for stem, product in products(tmp_path, export.graph).items() if "layers.0.self" in stem}
    assert {(product.bits, product.block, product.offsets) for product in found.values()} == {(8, 32, False)}
    for stem, product in found.items():
        exact = expected(checkpoint, stem, len(product.values))
        steps = np.abs(exact.reshape(len(exact), -1, 32)).max(-1).repeat(32, 1) / 127
        assert (np.abs(product.values - exact) <= 0.51 * steps).all()


def test_blocks_of_sixteen_and_negative_scales_run(tmp_path):
    checkpoint = GgufCheckpoint.open(wide_file({"attn_v": "Q6_K", "ffn_": "Q4_0"}).write(tmp_path / "m.gguf"))
    logits = {}
    for precision in ("fp32", "int8"):
        folder = tmp_path / precision
        folder.mkdir()
        graph = Graph(folder, export_verifier(checkpoint, folder, BuildConfig(precision=precision)), 1)
        logits[precision] = graph.call(np.arange(8)[None], np.arange(-1, 7)[None], np.array([[7]]))[
            names.LOGITS
        ].ravel()
    difference = np.abs(logits["int8"] - logits["fp32"]).max()
    assert 0 < difference < 0.05 * np.abs(logits["fp32"]).max()  # activations are rounded to 8 bits


@pytest.mark.parametrize("kind", [*SYMMETRIC_TYPES, *MINIMA])
def test_codes_times_scales_are_the_librarys_numbers(kind):
    packed = random_blocks(kind, (5, 512))
    codes, grid = decode(packed, kind)
    values = values_of(codes.reshape(5, grid.scales.shape[1], -1), grid)
    number = gguf.GGMLQuantizationType[kind]
    exact = gguf.dequantize(packed, number)
    if kind in SYMMETRIC_TYPES:
        np.testing.assert_array_equal(values, exact)
    else:
        np.testing.assert_allclose(values, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())
    assert codes.max() > len(np.unique(codes)) // 2


def test_scales_that_are_not_finite_are_refused(tmp_path):
    file = wide_file({"ffn_up": "Q4_0"})
    file.packed["blk.0.ffn_up.weight"][3, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    checkpoint = GgufCheckpoint.open(file.write(tmp_path / "m.gguf"))
    name = "model.layers.0.mlp.up_proj.weight"
    grid = Source.of_names(checkpoint, {name: (256, 256)}).grid(name)
    assert grid is not None
    with pytest.raises(CheckpointError, match="not finite"):
        list(grid.slabs())
