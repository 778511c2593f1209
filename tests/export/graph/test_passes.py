"""The exported graph is cheap: one product for products that share an input, single operators, no useless nodes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.export.models import COMMON, Exported

LAYERS = COMMON["num_hidden_layers"]


def test_llama_is_products_norms_and_attention(exports: Callable[..., Exported]) -> None:
    """A layer has four products, no Reshape, only Transposes of weights, and single operators for rotary and norms."""
    count = exports("llama").operators()
    expected = {
        "MatMul": 4 * LAYERS + 1, "Transpose": 4 * LAYERS + 1, "TreeAttention": LAYERS, "RotaryEmbedding": 2 * LAYERS,
        "RMSNormalization": 2 * LAYERS + 1, "Concat": 2 * LAYERS, "Split": 2 * LAYERS, "Mul": 2 * LAYERS,
    }  # fmt: skip
    assert {name: count[name] for name in expected} == expected
    assert not {"Reshape", "Cast", "Slice", "Shape", "Expand", "Pow", "ReduceMean", "Cos", "Sin", "Range"} & set(count)


def test_biases_are_merged_too(exports: Callable[..., Exported]) -> None:
    count = exports("qwen2").operators()
    assert count["MatMul"] == 4 * LAYERS + 1
    assert count["Concat"] == 3 * LAYERS
    assert not {"Reshape", "Cast", "Slice", "Shape"} & set(count)


def test_head_norms_cost_two_reshapes_each(exports: Callable[..., Exported]) -> None:
    count = exports("qwen3").operators()
    assert count["RMSNormalization"] == 4 * LAYERS + 1
    assert count["Reshape"] == 4 * LAYERS
    assert count["Transpose"] == count["MatMul"]


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_every_product_is_quantized(exports: Callable[..., Exported], precision: str) -> None:
    count = exports("llama", precision).operators()
    assert count["MatMulNBits"] == 4 * LAYERS + 1
    assert not {"MatMul", "Transpose"} & set(count)


def test_experts_do_not_merge_into_one_product(exports: Callable[..., Exported]) -> None:
    """Each expert has one gate-and-up product and one down product."""
    assert exports("mixtral").operators()["MatMul"] == LAYERS * (2 + 1 + 2 * 4) + 1
