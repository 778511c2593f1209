"""The graphs that a bundle is measured against compute correct results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from experiments import cost_curve
from experiments.products import write_products
from experiments.sessions import open_session
from experiments.timing import interleaved
from redraft import names
from redraft.engines import open_bundle

CONFIG = {
    "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 20,
}  # fmt: skip


@pytest.mark.parametrize("graph", [names.VERIFIER, names.VERIFIER_BATCH])
def test_products_are_those_of_the_bundle_over_its_own_weights(bundle: Path, tmp_path: Path, graph: str) -> None:
    """Four a layer and the logits, of which one of 2 rows is compared; attention's own products are left out."""
    opened = open_bundle(bundle)
    write_products(bundle / opened.graph(graph).file, tmp_path / "products.onnx")
    session = open_session(tmp_path / "products.onnx", threads=1)
    shape = opened.manifest.shape
    assert len(session.get_outputs()) == 4 * shape.layers + 1
    rows = {spec.name: np.random.default_rng(0).random((2, spec.shape[1]), np.float32) for spec in session.get_inputs()}
    logits = session.run(None, rows)[-1]
    assert logits.shape == (2, shape.vocabulary)
    head = opened.array("lm_head.weight")
    np.testing.assert_allclose(logits, rows[f"rows.{head.shape[1]}"] @ head.T, rtol=1e-5)


def test_the_curve_times_every_graph_of_the_bundle_and_its_products(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs for chains, which have no mask, have them too."""
    monkeypatch.setattr(cost_curve, "interleaved", lambda calls: interleaved(calls, blocks=1, runs=1))
    monkeypatch.setattr(cost_curve, "medians", lambda calls: {name: call() or 1.0 for name, call in calls.items()})
    monkeypatch.setattr(cost_curve, "KV_ROWS", 20)
    monkeypatch.setattr("sys.argv", ["cost_curve", "--engines", str(bundle), "--sizes", "1,4", "--threads", "1"])
    found = cost_curve.main()
    graphs = [f"bundle {name}" for name in cost_curve.verifier_graphs(open_bundle(bundle))]
    assert f"bundle {names.VERIFIER_SINGLE}" in graphs
    for size in ("1", "4"):
        assert sorted(found["milliseconds"][size]) == sorted([*graphs, "products"])
        assert min(found["milliseconds"][size].values()) > 0


def test_a_graph_without_products_has_no_floor(tmp_path: Path) -> None:
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    graph = onnx.helper.make_graph([node], "g", [value], [onnx.helper.make_empty_tensor_value_info("y")])
    onnx.save(onnx.helper.make_model(graph), tmp_path / "graph.onnx")
    with pytest.raises(ValueError, match="multiplies nothing by weights"):
        write_products(tmp_path / "graph.onnx", tmp_path / "out.onnx")


@pytest.mark.slow
def test_naive_graph_computes_the_same_as_transformers(tmp_path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from experiments.naive_graph import export_naive

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, max_position_embeddings=32)).eval()
    model.save_pretrained(tmp_path)
    export_naive(tmp_path, tmp_path / "naive.onnx", capacity=16)
    session = open_session(tmp_path / "naive.onnx", threads=1)
    tokens = np.arange(6)[None]
    mask = np.zeros((1, 1, 6, 16), bool)
    mask[0, 0, :, :6] = np.tri(6, dtype=bool)
    caches = {spec.name: np.zeros(spec.shape, np.float32) for spec in session.get_inputs()[4:]}
    inputs = {"token_ids": tokens, "positions": tokens, "cache_len": np.array([0]), "mask": mask, **caches}
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
