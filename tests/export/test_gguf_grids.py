"""Quantized products of a GGUF file keep the file's own codes and scales if these are exact."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from redraft import names
from redraft.config import BuildConfig
from redraft.errors import CheckpointError
from redraft.export.gguf_checkpoint import GgufCheckpoint
from redraft.export.gguf_grids import ZEROS, decode
from redraft.export.sources import Source
from redraft.export.verifier import export_verifier

from .gguf_files import File, random_blocks, random_file
from .test_verifier import Graph

pytestmark = pytest.mark.usefixtures("traced_once")

PARTS = {"q_proj": ("q_proj", "k_proj", "v_proj"), "gate_proj": ("gate_proj", "up_proj")}


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
            scale[:] = np.frombuffer(np.float16(1e-4 if kind == "Q6_K" else -2e-3).tobytes(), np.uint8)
            file.packed[name] = packed.reshape(len(values), -1)
    return file


def products(folder: Path, graph: str) -> dict[str, tuple[np.ndarray, int, int]]:
    """Values, bits and block size of every quantized weight of a graph, by its stem."""
    model = onnx.load(folder / graph)
    known = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    found = {}
    for node in model.graph.node:
        if node.op_type == "MatMulNBits":
            bits, block, rows = (
                next(a.i for a in node.attribute if a.name == name) for name in ("bits", "block_size", "N")
            )
            codes, zeros = (unpacked(known[name].reshape(rows, -1), bits) for name in (node.input[1], node.input[3]))
            scales = known[node.input[2]].reshape(rows, -1)
            values = codes.reshape(rows, -1, block).astype(np.float32) - zeros[:, : scales.shape[1], None]
            found[node.input[1].removesuffix(names.CODES)] = (values * scales[..., None]).reshape(rows, -1), bits, block
    return found


def unpacked(codes: np.ndarray, bits: int) -> np.ndarray:
    return codes if bits == 8 else np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)


def expected(checkpoint: GgufCheckpoint, stem: str) -> np.ndarray:
    """The weight of a product, which may be several parameters one after the other."""
    stem = stem.removesuffix(".merged")
    layer, _, part = stem.removesuffix(".weight").rpartition(".")
    every = [f"{layer}.{name}.weight" for name in PARTS.get(part, (part,))] if layer else [stem]
    return np.concatenate([slab for name in every for slab in checkpoint.slabs(checkpoint.tensors[name])])


@pytest.mark.parametrize(
    ("precision", "types", "bits", "block"),
    [
        ("int8", {}, 8, 32),
        ("int8", {"attn_": "Q5_0", "ffn_": "Q4_0"}, 8, 32),
        ("int8", {"attn_v": "Q6_K", "ffn_down": "Q6_K", "attn_": "Q4_0"}, 8, None),
        ("int4", {"attn_": "Q4_0", "ffn_": "Q4_0"}, 4, 32),
    ],
)
def test_products_are_the_files_numbers(precision, types, bits, block, tmp_path):
    checkpoint = GgufCheckpoint.open(wide_file(types).write(tmp_path / "m.gguf"))
    export = export_verifier(checkpoint, tmp_path, BuildConfig(precision=precision))
    found = products(tmp_path, export.graph)
    assert len(found) == 2 * 4 + 1
    for stem, (values, its_bits, its_block) in found.items():
        np.testing.assert_array_equal(values, expected(checkpoint, stem))
        six = any(kind == "Q6_K" for kind in types.values()) and ("q_proj" in stem or "down_proj" in stem)
        assert its_block == (block or (16 if six else 32))
        assert its_bits == (8 if "lm_head" in stem else bits)
    shapes = [(ref.initializer, ref.shape) for ref in export.weights if ref.initializer.endswith(names.CODES)]
    for name, (rows, blocks, size) in shapes:
        assert rows * blocks * size * 8 == found[name.removesuffix(names.CODES)][0].size * (
            8 if "lm_head" in name else bits
        )


def test_parts_without_a_grid_are_quantized_next_to_parts_with_one(tmp_path):
    checkpoint = GgufCheckpoint.open(wide_file({"attn_q": "Q4_1", "attn_v": "Q6_K"}).write(tmp_path / "m.gguf"))
    export = export_verifier(checkpoint, tmp_path, BuildConfig(precision="int8"))
    (stem,) = [stem for stem in products(tmp_path, export.graph) if "layers.0" in stem and "q_proj" in stem]
    values, bits, block = products(tmp_path, export.graph)[stem]
    exact = expected(checkpoint, stem)
    assert (bits, block) == (8, 16)
    np.testing.assert_array_equal(values[256:], exact[256:])
    assert (values[:256] != exact[:256]).any()
    np.testing.assert_allclose(values[:256], exact[:256], atol=np.ptp(exact[:256]) / 255)


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


@pytest.mark.parametrize("kind", ZEROS)
def test_codes_times_scales_are_the_librarys_numbers(kind):
    packed = random_blocks(kind, (5, 512))
    codes, grid = decode(packed, kind)
    blocks = codes.reshape(5, grid.scales.shape[1], -1).astype(np.float32) - grid.zeros[..., None]
    number = gguf.GGMLQuantizationType[kind]
    np.testing.assert_array_equal((blocks * grid.scales[..., None]).reshape(5, -1), gguf.dequantize(packed, number))
    assert codes.max() > ZEROS[kind]


def test_scales_that_are_not_finite_are_refused(tmp_path):
    file = wide_file({"ffn_up": "Q4_0"})
    file.packed["blk.0.ffn_up.weight"][3, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    checkpoint = GgufCheckpoint.open(file.write(tmp_path / "m.gguf"))
    name = "model.layers.0.mlp.up_proj.weight"
    grid = Source.of_names(checkpoint, {name: (256, 256)}).grid(name)
    assert grid is not None
    with pytest.raises(CheckpointError, match="not finite"):
        list(grid.slabs())
