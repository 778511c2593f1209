"""The exported graph is cheap: one product for products that share an input, single operators, no useless nodes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import pytest

from redraft.config import BuildConfig
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.verifier import export_verifier
from tests.export.models import COMMON, write_checkpoint

pytestmark = pytest.mark.usefixtures("traced_once")

LAYERS = COMMON["num_hidden_layers"]


def operators(tmp_path: Path, architecture: str, **config) -> Counter[str]:
    source = write_checkpoint(tmp_path / "model", architecture)
    export_verifier(Checkpoint.open(source), tmp_path, BuildConfig(**config))
    return Counter(node.op_type for node in onnx.load(tmp_path / "verifier.onnx", load_external_data=False).graph.node)


def test_llama_is_products_norms_and_attention(tmp_path):
    """A layer has four products, no Reshape, only Transposes of weights, and single operators for rotary and norms."""
    count = operators(tmp_path, "llama")
    assert count["MatMul"] == 4 * LAYERS + 1
    assert count["TreeAttention"] == LAYERS
    assert count["RotaryEmbedding"] == 2 * LAYERS
    assert count["RMSNormalization"] == 2 * LAYERS + 1
    assert count["Transpose"] == count["MatMul"]
    assert count["Concat"] == count["Split"] == 2 * LAYERS
    assert count["Mul"] == 2 * LAYERS
    assert not {"Reshape", "Cast", "Slice", "Shape", "Expand", "Pow", "ReduceMean", "Cos", "Sin", "Range"} & set(count)


def test_biases_are_merged_too(tmp_path):
    count = operators(tmp_path, "qwen2")
    assert count["MatMul"] == 4 * LAYERS + 1
    assert count["Concat"] == 3 * LAYERS
    assert not {"Reshape", "Cast", "Slice", "Shape"} & set(count)


def test_head_norms_cost_two_reshapes_each(tmp_path):
    count = operators(tmp_path, "qwen3")
    assert count["RMSNormalization"] == 4 * LAYERS + 1
    assert count["Reshape"] == 4 * LAYERS
    assert count["Transpose"] == count["MatMul"]


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_every_product_is_quantized(tmp_path, precision):
    count = operators(tmp_path, "llama", precision=precision)
    assert count["MatMulNBits"] == 4 * LAYERS + 1
    assert "MatMul" not in count
    assert "Transpose" not in count


def test_experts_do_not_merge_into_one_product(tmp_path):
    """Each expert has one gate-and-up product and one down product."""
    count = operators(tmp_path, "mixtral")
    assert count["MatMul"] == LAYERS * (2 + 1 + 2 * 4) + 1
