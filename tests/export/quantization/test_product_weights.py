"""Weights stored [in, out], as in GPT-2, are quantized like others: every product, with equal numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from redraft.export.checkpoint import base
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.checkpoint.sources import Source
from redraft.export.quantization.product_forms import ProductPlan
from redraft.export.quantization.product_weights import ProductWeight
from redraft.export.quantization.products import quantize_products
from tests.export.models import Exported, write_checkpoint

LAYERS = 2
PLAIN = ("transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight")
SIZES = dict(hidden_size=64, n_inner=128, num_hidden_layers=LAYERS, num_key_value_heads=4)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A GPT-2 whose products have 64 and 128 inputs, which all kinds of quantization take."""
    return Checkpoint.open(write_checkpoint(tmp_path_factory.mktemp("gpt2") / "model", "gpt2", **SIZES))


@pytest.mark.parametrize(("precision", "most"), [("int8", 0.05), ("int4", 0.4)])
def test_every_product_of_gpt2_is_quantized(precision: str, most: float, exports: Callable[..., Exported]) -> None:
    exported = exports("gpt2", precision, **SIZES)
    count = exported.operators()
    assert count["MatMulNBits"] == 4 * LAYERS + 1
    assert not {"MatMul", "Gemm"} & set(count)
    assert count["GatherBlockQuantized"] == 2  # of tokens and of positions
    assert [ref for ref in exported.verifier.weights if len(ref.shape) == 2 and ref.initializer in PLAIN] == []
    assert 1e-5 < exported.error(exports("gpt2", **SIZES)) < most


@pytest.mark.parametrize(("precision", "most"), [("int8", 0.05), ("int4", 0.6)])
def test_every_product_of_gpt2_but_the_logits_is_dequantized(
    precision: str, most: float, exports: Callable[..., Exported]
) -> None:
    exported = exports("gpt2", precision, "tensorrt", **SIZES)
    assert exported.operators()["DequantizeLinear"] == 4 * LAYERS
    assert 1e-5 < exported.error(exports("gpt2", **SIZES)) < most


def test_a_turned_weight_comes_by_outputs_in_small_slabs(gpt2: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "transformer.h.0.mlp.c_fc.weight"
    source = Source.of_names(gpt2, {name: (64, 128)})
    weight = ProductWeight((name,), turned=True)
    monkeypatch.setattr(base, "SLAB_BYTES", 4096)
    slabs = list(weight.slabs(source))
    assert weight.shape(source) == (128, 64)
    assert {slab.shape for slab in slabs} == {(16, 64)}
    np.testing.assert_array_equal(np.concatenate(slabs), gpt2.memmap(name).T)


def test_products_over_one_weight_have_the_same_bits(gpt2: Checkpoint) -> None:
    """A draft graph uses its head at every level, and only the logits of some levels decide what attention reads.

    The weight of such a product keeps 8 bits in int4, so all products over it must.
    """
    name = "transformer.h.0.mlp.c_fc.weight"
    source = Source.of_names(gpt2, {name: (64, 128)})
    x, weight = ir.val("x", ir.DataType.FLOAT, [1, 64]), ir.val(name, ir.DataType.FLOAT, [64, 128])
    weight.const_value = ir.ExternalTensor("unplaced", 0, 0, ir.DataType.FLOAT, shape=ir.Shape([64, 128]), name=name)
    attended, other = (ir.node("MatMul", [x, weight]) for _ in range(2))
    nodes = [attended, ir.node("TreeAttention", [attended.outputs[0]]), other]
    outputs = [nodes[1].outputs[0], other.outputs[0]]
    graph = ir.Graph([x], outputs, nodes=nodes, initializers=[weight], opset_imports={"": 21})
    quantize_products(ir.Model(graph, ir_version=10), source, ProductPlan("int4"), "", {})
    assert [node.attributes["bits"].as_int() for node in graph if node.op_type == "MatMulNBits"] == [8, 8]
