"""The graphs that a bundle is measured against compute what they claim to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from redraft.bench.products import Product, products_of, weight_bytes, write_products
from redraft.bench.sessions import open_session, zeros
from redraft.bench.timing import interleaved
from redraft.engines.onnxruntime_backend import bound_call

CONFIG = {
    "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 20,
}  # fmt: skip


def test_products_have_the_decoder_s_shapes() -> None:
    assert products_of(CONFIG) == (
        Product("qkv", 8, 16, 2), Product("out", 8, 8, 2), Product("gate_up", 8, 24, 2), Product("down", 12, 8, 2),
        Product("head", 8, 20, 1),
    )  # fmt: skip
    assert weight_bytes(products_of(CONFIG)) == 4 * (2 * (128 + 64 + 192 + 96) + 160)


def test_product_graph_runs_every_product(tmp_path: Path) -> None:
    write_products((Product("head", 3, 5, 2),), tmp_path / "products.onnx")
    outputs = {"head.0": zeros(4, 5), "head.1": zeros(4, 5)}
    session = open_session(tmp_path / "products.onnx", threads=1)
    bound_call(session, {"head.in": np.ones((4, 3), np.float32)}, outputs)()
    assert all(np.ptp(out, axis=0).max() == 0 and np.abs(out).min() > 0 for out in outputs.values())
    assert not np.array_equal(outputs["head.0"], outputs["head.1"])


@pytest.mark.slow
def test_naive_graph_computes_what_transformers_does(tmp_path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from redraft.bench.naive_graph import export_naive

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, max_position_embeddings=32)).eval()
    model.save_pretrained(tmp_path)
    export_naive(tmp_path, tmp_path / "naive.onnx", capacity=16)
    session = open_session(tmp_path / "naive.onnx", threads=1)
    tokens = np.arange(6)[None]
    mask = np.zeros((1, 1, 6, 16), bool)
    mask[0, 0, :, :6] = np.tri(6, dtype=bool)
    caches = {spec.name: np.zeros(spec.shape, np.float32) for spec in session.get_inputs()[4:]}
    inputs = {"token_ids": tokens, "positions": tokens, "past_len": np.array([0]), "mask": mask, **caches}
    logits = session.run(None, inputs)[0]
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_interleaved_blocks_take_turns() -> None:
    order: list[str] = []
    times = interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, blocks=2, runs=3)
    block = len(order) // 4
    assert order == ["a"] * block + ["b"] * block + ["a"] * block + ["b"] * block
    assert {name: len(values) for name, values in times.items()} == {"a": 6, "b": 6}
