"""The lowered graphs compute the portable graph's results."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx_ir import DataType
from onnx_ir.tape import Tape

from redraft import names
from redraft.engines import Calls, open_calls
from redraft.engines.bundle import Bundle
from redraft.engines.lowering import lower_operators, lower_packed, lower_single
from redraft.engines.lowering.operators import fuse_factors, fuse_sums
from tests.engines.bundles import manifest_of
from tests.engines.graphs import Decoder, save_verifier, stored_outside

CAPACITY = 32
UNUSED = 6e4
"""In rows that no call may read."""
CASES = [(1, 0), (6, 0), (1, 9), (7, 9), (2, CAPACITY - 2), (1, CAPACITY - 2)]
"""Nodes, and rows before them."""
DECODERS = {
    "plain": Decoder(),
    "multi-query": Decoder(kv_heads=1),
    "every head": Decoder(kv_heads=4, layers=1),
    "head size 8": Decoder(head_dim=8),
    "q/k norm": Decoder(qk_norm=True),
    "windows": Decoder(windows=(0, 5)),
    "one window": Decoder(windows=(4, 4)),
    "sizes of inputs": Decoder(sizes_of_inputs=True),
    "factors": Decoder(factors=True),
    "around attention": Decoder(qkv_bias=True, swish=True, biased_norm=True, hidden_states=("last", "0", "1")),
}
LARGE = {
    "head size 12": Decoder(head_dim=12),
    "head size 256": Decoder(head_dim=256),
    "softcap": Decoder(softcap=5.0),
    "sinks": Decoder(sinks=True),
    "sinks of every head": Decoder(kv_heads=4, sinks=True),
    "fp16 keys and values": Decoder(kv="float16"),
    "fp16 keys and values with sinks": Decoder(kv="float16", sinks=True, windows=(0, 5)),
}
"""Decoders without a graph for one sequence: the kernel refuses them, or rounds differently from the batch's."""
FORMS = (names.VERIFIER_BATCH, names.VERIFIER_OPERATORS, names.VERIFIER_SINGLE, names.VERIFIER_FAST)


def lowered(decoder: Decoder, folder) -> Bundle:
    """A bundle of the portable graph and of all its lowered graphs."""
    save_verifier(decoder, folder)
    manifest = manifest_of(decoder)
    portable = manifest.graphs[names.VERIFIER]
    made = (
        lower_packed(folder, portable),
        lower_operators(folder, portable),
        lower_single(folder, portable),
        lower_single(folder, portable, exact=False),
    )
    forms = {name: record for name, record in zip(FORMS, made, strict=True) if record}
    return Bundle(folder, replace(manifest, graphs={**manifest.graphs, **forms}))


def random_tree(nodes: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Depths int64[nodes] and ancestor-or-self bool[nodes, nodes]."""
    depths, mask = np.zeros(nodes, np.int64), np.eye(nodes, dtype=bool)
    for node in range(1, nodes):
        parent = random.integers(0, node)
        mask[node] |= mask[parent]
        depths[node] = depths[parent] + 1
    return depths, mask


def run(engine: Calls, decoder: Decoder, nodes: int, past: int, chain: bool = False) -> dict[str, np.ndarray]:
    """Outputs and committed rows after verifying one random tree over random rows, with random unused rows.

    chain: in place of a tree. All rows but the live ones, and one more that a single row may be copied to, must stay.
    """
    random = np.random.default_rng(nodes * 100 + past)
    caches = {}
    for spec in engine.inputs:
        if spec.name.startswith("kv."):
            shape = (1, decoder.kv_heads, CAPACITY, decoder.head_dim)
            caches[spec.name] = random.standard_normal(shape).astype(spec.dtype)
            caches[spec.name][:, :, past:] = UNUSED
            engine.bind(spec.name, caches[spec.name])
    symbols = {dim for spec in engine.inputs for dim in spec.shape}
    sizes = {"B": 1, "T": nodes, "N": nodes, "R": nodes}
    call = engine.prepare(**{symbol: size for symbol, size in sizes.items() if symbol in symbols})
    depths, mask = random_tree(nodes, random)
    if chain:
        depths, mask = np.arange(nodes), np.tri(nodes, dtype=bool)
    call.inputs[names.TOKEN_IDS][:] = random.integers(0, decoder.vocabulary, nodes)
    call.inputs[names.POSITIONS][:] = past + depths
    if names.TREE_MASK in call.inputs:
        call.inputs[names.TREE_MASK][:] = mask
    if names.PACKED_ROWS in call.inputs:
        call.inputs[names.PACKED_ROWS][:] = np.arange(nodes)
    call.inputs[names.CACHE_LEN][:] = past
    call.inputs[names.KV_LEN][:] = past + nodes
    call.inputs[names.OUTPUT_ROWS][:] = random.permutation(nodes)
    call.run()
    kv_len = {name: cache[:, :, : past + nodes] for name, cache in caches.items()}
    dead = {name: np.unique(cache[:, :, past + max(nodes, 2) :]) for name, cache in caches.items()}
    assert all(set(values.tolist()) <= {UNUSED} for values in dead.values())
    return {name: array.copy() for name, array in {**call.outputs, **kv_len}.items()}


@pytest.mark.parametrize("name", [*DECODERS, *LARGE])
def test_lowered_graphs_equal_the_portable_one(name, tmp_path, operators_library):
    decoder = {**DECODERS, **LARGE}[name]
    bundle = lowered(decoder, tmp_path)
    own = {names.VERIFIER_OPERATORS} if decoder.head_dim % 16 == 0 else set()
    assert set(bundle.manifest.graphs) - own == {names.VERIFIER, FORMS[0], *(() if name in LARGE else FORMS[2:])}
    portable = open_calls(bundle, threads=1)
    for form in list(bundle.manifest.graphs)[1:]:
        engine = open_calls(bundle, form, threads=1)
        for nodes, past in CASES:
            for chain in {True, form == names.VERIFIER_SINGLE}:
                expected, found = (run(one, decoder, nodes, past, chain) for one in (portable, engine))
                assert set(found) == set(expected)
                for output, array in expected.items():
                    message = f"{form}, {output}, T={nodes}, past={past}, chain={chain}"
                    apart = 1e-4 if decoder.kv is None else 1e-2
                    np.testing.assert_allclose(found[output], array, atol=apart, err_msg=message)


def operators(path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path, load_external_data=False).graph.node)


def test_a_plain_layer_becomes_the_fewest_nodes(tmp_path):
    decoder = Decoder(layers=3)
    lowered(decoder, tmp_path)
    found = operators(tmp_path / "verifier.single.onnx")
    assert found["GroupQueryAttention"] == decoder.layers
    assert found["SkipSimplifiedLayerNormalization"] == 2 * decoder.layers
    assert found["RMSNormalization"] == 1
    assert found["Split"] == decoder.layers
    assert found["Expand"] == decoder.layers + 2  # a row taken twice; positions of it, and the rows of the output
    assert found["Gather"] == 1  # the embedding
    assert not {"RotaryEmbedding", names.TREE_ATTENTION} & set(found)
    assert not onnx.load(tmp_path / "verifier.single.onnx").functions


def test_a_layer_of_the_graph_for_batches_rotates_once_and_moves_only_new_columns(tmp_path):
    decoder = Decoder(layers=3)
    lowered(decoder, tmp_path)
    found = operators(tmp_path / "verifier.batch.onnx")
    assert found["RotaryEmbedding"] == decoder.layers
    assert found["Split"] == 2 * decoder.layers  # values from queries and keys; gate and up
    assert (
        found["Gather"] == 4 * decoder.layers + 4
    )  # queries, keys, values, sums; the embedding, limits and two orders
    assert found["TensorScatter"] == 4 * decoder.layers  # keys and values; scores and probabilities
    assert found["GatherElements"] == 2 * decoder.layers + 1
    assert found["If"] == decoder.layers
    assert found["Where"] == 2  # once a call


@pytest.mark.parametrize("factors", [False, True])
def test_a_layer_for_the_operators_keeps_its_attention_gate_products_and_norms(factors, tmp_path):
    """Factors of a product's inputs stay nodes only after attention, and of the rows whose logits are wanted."""
    decoder = Decoder(layers=3, factors=factors)
    lowered(decoder, tmp_path)
    found = operators(tmp_path / "verifier.operators.onnx")
    assert found[names.CPU_TREE_ATTENTION] == found[names.SILU_GATE] == decoder.layers
    assert found["Mul"] == (decoder.layers + 1 if factors else 0)
    assert not {"RotaryEmbedding", "TensorScatter", "Split", "Sigmoid", names.TREE_ATTENTION} & set(found)


@pytest.mark.parametrize("value", ["", "g", "u", "s", "silu"])
@pytest.mark.parametrize("kind", ["output", "reader"])
def test_a_gate_becomes_one_node_unless_a_value_inside_it_has_another_reader(value, kind):
    outputs, reader = [f"float[T, 4] {value}"], ""
    if kind == "reader":
        outputs, reader = ["float[T, 4] read"], f"read = Neg ({value or 'y'})"
    text = f"""<ir_version: 11, opset_import: ["": 24]>
        gate (float[T, 8] x) => ({", ".join(["float[T, 4] y", *outputs[: bool(value or reader)]])})
        <int64[2] sizes = {{4, 4}}> {{
            g, u = Split <axis = -1> (x, sizes)
            s = Sigmoid (g)
            silu = Mul (g, s)
            y = Mul (silu, u)
            {reader}
        }}"""
    graph = ir.from_onnx_text(text).graph
    fuse_factors(graph)
    found = [node.op_type for node in graph if node.op_type != "Neg"]
    assert found == (["Split", "Sigmoid", "Mul", "Mul"] if value else [names.SILU_GATE])
    assert {output.name for output in graph.outputs} >= {"y"}


def test_weights_in_a_file_with_several_links_are_read(tmp_path):
    decoder = Decoder(factors=True)
    stored_outside(decoder, tmp_path)
    os.link(tmp_path / "weights.bin", tmp_path / "another")
    lower_operators(tmp_path, manifest_of(decoder).graphs[names.VERIFIER])
    assert operators(tmp_path / "verifier.operators.onnx")["Mul"] == decoder.layers + 1


def test_nodes_between_split_and_attention_stay(tmp_path):
    decoder = Decoder(qk_norm=True)
    lowered(decoder, tmp_path)
    found = operators(tmp_path / "verifier.single.onnx")
    assert found["RotaryEmbedding"] == 2 * decoder.layers
    assert found["Split"] == 2 * decoder.layers


def test_only_the_exact_graph_for_one_sequence_takes_no_trees(tmp_path):
    bundle = lowered(Decoder(), tmp_path)
    for form in FORMS:
        takes_trees = form != names.VERIFIER_SINGLE
        for inputs in (onnx.load(tmp_path / f"{form}.onnx").graph.input, bundle.graph(form).inputs):
            assert (names.TREE_MASK in [value.name for value in inputs]) == takes_trees


def test_a_product_appends_the_sums_of_its_input_alone():
    """Sums of another value, and a product that has none, stay as they are."""
    x, other = (
        ir.Value(name=name, shape=ir.Shape(["B", "T", 64]), type=ir.TensorType(DataType.FLOAT)) for name in ("x", "y")
    )
    tape = Tape()
    ints = [tape.op("Constant", [], {"value_ints": values}) for values in ([0, 0, -1, 32], [-1])]
    attributes = {"K": 66, "N": 8, "bits": 4, "block_size": 32}
    products = []
    for summed in (x, other, None):
        given = x
        if summed is not None:
            sums = tape.op("ReduceSum", [tape.op("Reshape", [summed, ints[0]]), ints[1]], {"keepdims": 0})
            given = tape.op("Concat", [x, sums], {"axis": -1})
        products.append(tape.op("MatMulNBits", [given], attributes, domain="com.microsoft"))
    graph = ir.Graph([x, other], products, nodes=tape.nodes)
    fuse_sums(graph)
    found = [value.producer() for value in graph.outputs]
    assert [node.op_type for node in found] == [names.SUMMED_PRODUCT, "MatMulNBits", "MatMulNBits"]
    assert found[0].inputs[0] is x
    assert {name: value.as_int() for name, value in found[0].attributes.items()} == attributes
