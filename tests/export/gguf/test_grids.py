"""Quantized products of a GGUF file keep the file's own codes and scales if these are exact."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from redraft import names
from redraft.config import BuildConfig
from redraft.errors import CheckpointError
from redraft.export.checkpoint.sources import Source
from redraft.export.gguf.checkpoint import GgufCheckpoint
from redraft.export.gguf.grids import MINIMA, SYMMETRIC_TYPES, decode
from redraft.export.quantization.product_forms import EIGHT_BITS, Form, ProductPlan, coded
from redraft.export.quantization.product_weights import ProductWeight
from redraft.export.quantization.rounding import values_of
from tests.export.gguf_files import File, by_transformers, random_blocks, random_file
from tests.export.models import Graph, export_verifier

pytestmark = pytest.mark.usefixtures("traced_once")


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


NAME = "model.layers.0.mlp.up_proj.weight"


def source_of(file: File, folder: Path) -> Source:
    """The source of one matrix."""
    return Source.of_names(GgufCheckpoint.open(file.write(folder / "m.gguf")), {NAME: (256, 256)})


ROUNDED = Form(4, zeros=True, offsets=True)
FORMS = {
    "Q4_0": (Form(4, stored=True), Form(8, stored=True)),
    "Q5_0": (Form(8, stored=True), Form(8, stored=True)),
    "Q8_0": (Form(8, stored=True), Form(8, stored=True)),
    "Q6_K": (Form(8, 16, stored=True), EIGHT_BITS),
    "Q4_1": (Form(4, zeros=True, offsets=True, stored=True), EIGHT_BITS),
    "Q4_K": (Form(4, zeros=True, offsets=True, stored=True), EIGHT_BITS),
    "Q5_1": (Form(8, zeros=True, offsets=True, stored=True), EIGHT_BITS),
    "Q5_K": (Form(8, zeros=True, offsets=True, stored=True), EIGHT_BITS),
    "F16": (ROUNDED, EIGHT_BITS),
}
"""The forms of a weight by its type, in int4 and in int8."""


@pytest.mark.parametrize("kind", FORMS)
def test_products_have_the_files_codes(kind: str, tmp_path: Path) -> None:
    """Minima and blocks of 16 would cost int8 a third of its speed."""
    source, part = source_of(wide_file({"ffn_up": kind}), tmp_path), ProductWeight((NAME,))
    exact = np.concatenate(list(source.slabs(NAME)))
    for precision, expected in zip(("int4", "int8"), FORMS[kind], strict=True):
        form = ProductPlan(precision).form(part, source, smoothed=False, eight_bits=False)
        assert form == expected
        if form.stored:
            error = np.abs(values_of(*coded(part, source, form, None)) - exact).max()
            assert error <= (1e-5 * np.abs(exact).max() if form.offsets else 0)


def test_engines_with_the_files_codes_compute_its_model(tmp_path: Path) -> None:
    """Blocks of sixteen, negative scales, and minima, whose part that no zero point holds has the weight's own bits."""
    attention = {"attn_q": "Q4_K", "attn_k": "Q5_0", "attn_v": "Q6_K"}
    file = wide_file({**attention, "ffn_gate": "Q4_1", "ffn_up": "Q5_1", "ffn_down": "Q4_0"})
    path, tokens, logits = file.write(tmp_path / "m.gguf"), np.arange(8)[None], {}
    checkpoint = GgufCheckpoint.open(path)
    for precision in ("fp32", "int8", "int4"):
        folder = tmp_path / precision
        folder.mkdir()
        graph = Graph(folder, export_verifier(checkpoint, folder, BuildConfig(precision=precision)), 1)
        found = graph.call(tokens, tokens - 1, np.array([[7]]))
        logits[precision] = found[names.LOGITS].ravel()
    with torch.no_grad():
        expected = by_transformers(path)(torch.from_numpy(tokens)).logits[0, -1].numpy()
    differences = {
        precision: np.abs(own - expected).max() / np.abs(expected).max() for precision, own in logits.items()
    }
    assert differences["fp32"] < 1e-4
    assert all(1e-4 < differences[precision] < 0.05 for precision in ("int8", "int4"))  # activations are rounded


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
    grid = source_of(file, tmp_path).grid(NAME)
    assert grid is not None
    with pytest.raises(CheckpointError, match="not finite"):
        list(grid.slabs())
