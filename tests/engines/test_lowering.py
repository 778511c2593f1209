"""The graph lowered for one sequence computes what the portable one does."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import onnx
import pytest

from redraft import names
from redraft.engines.bundle import Bundle
from redraft.engines.lowering import lower_single
from redraft.engines.onnxruntime_backend import OnnxRuntimeEngine, open_engine

from .bundles import manifest_of
from .graphs import Decoder, save_verifier

CAPACITY = 32
CASES = [(1, 0), (6, 0), (1, 9), (7, 9), (3, 20), (2, CAPACITY - 2), (1, CAPACITY - 1)]
DECODERS = {
    "plain": Decoder(),
    "multi-query": Decoder(kv_heads=1),
    "every head": Decoder(kv_heads=4, layers=1),
    "head size 8": Decoder(head_dim=8),
    "bias": Decoder(qkv_bias=True),
    "q/k norm": Decoder(qk_norm=True),
    "windows": Decoder(windows=(0, 5)),
    "one window": Decoder(windows=(4, 4)),
    "softcap": Decoder(softcap=5.0),
    "swish": Decoder(swish=True),
    "norm of a biased product": Decoder(biased_norm=True),
    "taps": Decoder(taps=("last", "0", "1")),
}


def engines(decoder: Decoder, folder) -> tuple[OnnxRuntimeEngine, OnnxRuntimeEngine]:
    save_verifier(decoder, folder)
    manifest = manifest_of(decoder)
    single = lower_single(folder, manifest.graphs[names.VERIFIER])
    assert single is not None
    bundle = Bundle(folder, replace(manifest, graphs={**manifest.graphs, names.VERIFIER_SINGLE: single}))
    return open_engine(bundle, threads=1), open_engine(bundle, names.VERIFIER_SINGLE, threads=1)


def random_tree(nodes: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Depths int64[nodes] and ancestor-or-self bool[nodes, nodes]."""
    depths, mask = np.zeros(nodes, np.int64), np.eye(nodes, dtype=bool)
    for node in range(1, nodes):
        parent = random.integers(0, node)
        mask[node] |= mask[parent]
        depths[node] = depths[parent] + 1
    return depths, mask


def run(engine: OnnxRuntimeEngine, decoder: Decoder, nodes: int, past: int) -> dict[str, np.ndarray]:
    """Outputs and live cache rows after verifying one random tree over random rows, with garbage in the dead ones."""
    random = np.random.default_rng(nodes * 100 + past)
    caches = {}
    for spec in engine.inputs:
        if spec.name.startswith("kv."):
            shape = (1, decoder.kv_heads, CAPACITY, decoder.head_dim)
            caches[spec.name] = random.standard_normal(shape).astype(np.float32)
            caches[spec.name][:, :, past:] = 1e30
            engine.bind(spec.name, caches[spec.name])
    batch = {"B": 1} if engine.inputs[0].shape[0] == "B" else {}
    call = engine.prepare(T=nodes, R=nodes, **batch)
    depths, mask = random_tree(nodes, random)
    call.inputs[names.TOKEN_IDS][:] = random.integers(0, decoder.vocabulary, nodes)
    call.inputs[names.POSITIONS][:] = past + depths
    call.inputs[names.TREE_MASK][:] = mask
    call.inputs[names.PAST_LEN][:] = past
    call.inputs[names.LIVE][:] = past + nodes
    call.inputs[names.OUTPUT_ROWS][:] = random.permutation(nodes)
    call.run()
    live = {name: cache[:, :, : past + nodes] for name, cache in caches.items()}
    dead = {name: np.unique(cache[:, :, past + nodes :]) for name, cache in caches.items()}
    assert all(set(values.tolist()) <= {float(np.float32(1e30))} for values in dead.values())
    return {name: array.copy() for name, array in {**call.outputs, **live}.items()}


@pytest.mark.parametrize("name", DECODERS)
def test_lowered_graph_equals_the_portable_one(name, tmp_path):
    decoder = DECODERS[name]
    portable, single = engines(decoder, tmp_path)
    for nodes, past in CASES:
        expected, found = run(portable, decoder, nodes, past), run(single, decoder, nodes, past)
        assert set(found) == set(expected)
        for output, array in expected.items():
            np.testing.assert_allclose(found[output], array, atol=1e-4, err_msg=f"{output}, T={nodes}, past={past}")


def operators(path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


def test_a_plain_layer_becomes_the_fewest_nodes(tmp_path):
    decoder = Decoder(layers=3)
    engines(decoder, tmp_path)
    found = operators(tmp_path / "verifier.single.onnx")
    assert found["GroupQueryAttention"] == decoder.layers
    assert found["SkipSimplifiedLayerNormalization"] == 2 * decoder.layers
    assert found["RMSNormalization"] == 1
    assert found["Split"] == decoder.layers
    assert not {"RotaryEmbedding", names.TREE_ATTENTION} & set(found)
    assert not onnx.load(tmp_path / "verifier.single.onnx").functions


def test_what_stands_between_split_and_attention_stays(tmp_path):
    decoder = Decoder(qk_norm=True)
    engines(decoder, tmp_path)
    found = operators(tmp_path / "verifier.single.onnx")
    assert found["RotaryEmbedding"] == 2 * decoder.layers
    assert found["Split"] == 2 * decoder.layers


def test_a_head_size_that_the_kernel_refuses_gives_no_graph(tmp_path):
    decoder = Decoder(head_dim=12)
    save_verifier(decoder, tmp_path)
    assert lower_single(tmp_path, manifest_of(decoder).graphs[names.VERIFIER]) is None
    assert not (tmp_path / "verifier.single.onnx").exists()
