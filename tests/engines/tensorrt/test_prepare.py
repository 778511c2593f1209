"""Graphs for TensorRT's parser: they compute the same as the portable graph, with operators that the parser has.

ONNX Runtime runs both: the prepared graph with TensorRT's own operators unchanged, the one for the plugin with the
operator's body restored.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from redraft import names, signatures
from redraft.engines.tensorrt.expand import expand, expand_maxima
from redraft.engines.tensorrt.native import DECOMPOSABLE
from redraft.engines.tensorrt.prepare import copied_bytes, graph_file, merge_weights, prepare
from redraft.engines.tensorrt_records import weights_file
from redraft.errors import BackendError
from tests.engines.graphs import Decoder, for_onnxruntime, restore_bodies, save_verifier, stored_outside

PAST, NODES = (3, 6), 5
PARENTS = (-1, 0, 0, 1, None)
"""The last node is padding: it sees committed rows and itself."""


def feeds(decoder: Decoder) -> dict[str, np.ndarray]:
    """Two sequences of different lengths, a tree each; rows past `kv_len` are poisoned."""
    random = np.random.default_rng(0)
    mask = np.eye(NODES, dtype=bool)
    for node, parent in enumerate(PARENTS[1:], 1):
        if parent is not None:
            mask[node] |= mask[parent]
    depth = mask.sum(1) - 1
    values = {
        names.TOKEN_IDS: random.integers(0, decoder.vocabulary, (2, NODES)),
        names.POSITIONS: np.array(PAST)[:, None] + depth,
        names.TREE_MASK: np.tile(mask, (2, 1, 1)),
        names.CACHE_LEN: np.array(PAST),
        names.KV_LEN: np.array([max(PAST) + NODES]),
        names.OUTPUT_ROWS: np.tile(np.arange(NODES), (2, 1)),
    }
    for cache in signatures.caches(decoder.shape):
        rows = random.standard_normal((2, decoder.kv_heads, 24, decoder.head_dim)).astype(np.float32)
        for sequence, past in enumerate(PAST):
            rows[sequence, :, past:] = 1e3
        values[cache] = rows
    return values


def run(model: Path | bytes, decoder: Decoder) -> list[np.ndarray]:
    given = for_onnxruntime(model) if isinstance(model, Path) else model
    session = ort.InferenceSession(given, providers=["CPUExecutionProvider"])
    return session.run(None, feeds(decoder))


def assert_same(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4)


MIXED = Decoder(windows=(0, 3), qk_norm=True, qkv_bias=True)


def test_native_attention_computes_the_same_as_the_operator(tmp_path: Path) -> None:
    decoder = MIXED
    portable = save_verifier(decoder, tmp_path)
    prepared = prepare(tmp_path, portable.name, names.VERIFIER, (10, 15), "native", capacity=24)
    assert names.TREE_ATTENTION not in {node.op_type for node in prepared.graph.node}
    assert not prepared.functions
    for value in (*prepared.graph.input, *prepared.graph.output):  # TensorRT's KV update wants fixed rows
        if value.name.startswith(("kv.", "present.")):
            assert value.type.tensor_type.shape.dim[2].dim_value == 24
    assert {"RMSNormalization", "RotaryEmbedding"} <= {node.op_type for node in prepared.graph.node}
    attributes = {a.name: a.i for node in prepared.graph.node if node.op_type == "Attention" for a in node.attribute}
    assert attributes[DECOMPOSABLE] == 1  # float32, for which TensorRT has no fused attention
    assert_same(run(tmp_path / graph_file(names.VERIFIER), decoder), run(portable, decoder))


def test_operators_that_older_parsers_lack_are_spelled_out(tmp_path: Path) -> None:
    decoder = MIXED
    portable = save_verifier(decoder, tmp_path)
    model = ir.load(portable)
    expand(model, (10, 9))
    assert not {"RMSNormalization", "RotaryEmbedding"} & {node.op_type for node in model.graph}
    assert_same(run(ir.to_proto(model).SerializeToString(), decoder), run(portable, decoder))


def single_node(node: onnx.NodeProto, x: np.ndarray, constant: np.ndarray) -> onnx.ModelProto:
    """A graph of one node over `x` and a constant `c`."""
    value, kind = onnx.helper.make_tensor_value_info, onnx.helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = onnx.helper.make_graph(
        [node], "g", [value("x", kind, x.shape)], [value("y", kind, None)],
        [onnx.numpy_helper.from_array(constant, "c")],
    )  # fmt: skip
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 24)], ir_version=11)


def outputs(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    return ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]


@pytest.mark.parametrize(
    "node",
    [
        onnx.helper.make_node("ReduceMax", ["x", "c"], ["y"], keepdims=1),
        onnx.helper.make_node("ReduceLogSumExp", ["x", "c"], ["y"], keepdims=1),
        onnx.helper.make_node("LogSoftmax", ["x"], ["y"], axis=-1),
    ],
    ids=lambda node: node.op_type,
)
def test_maxima_are_spelled_out_as_the_same_numbers(node: onnx.NodeProto) -> None:
    x = (np.random.default_rng(0).normal(size=(2, 3, 50)) * 40).astype(np.float32)
    before = single_node(node, x, np.array([2]))
    model = ir.from_proto(before)
    expand_maxima(model)
    assert "TopK" in (kinds := {each.op_type for each in model.graph})
    assert node.op_type not in kinds
    np.testing.assert_allclose(outputs(ir.to_proto(model), x), outputs(before, x), atol=1e-5)


def test_half_precision_norms_are_computed_wide(tmp_path: Path) -> None:
    """x² overflows fp16 from 256 on; the mean must be taken in float32."""
    x = np.full((1, 1, 8), 300, np.float16)
    node = onnx.helper.make_node("RMSNormalization", ["x", "c"], ["y"], axis=-1, epsilon=1e-5)
    model = ir.from_proto(single_node(node, x, np.ones(8, np.float16)))
    expand(model, (10, 9))
    np.testing.assert_allclose(outputs(ir.to_proto(model), x), np.ones_like(x), rtol=1e-3)


def test_the_plugin_is_named_as_every_parser_looks_it_up(tmp_path: Path) -> None:
    decoder = Decoder()
    portable = save_verifier(decoder, tmp_path)
    model = prepare(tmp_path, portable.name, names.VERIFIER, (10, 9), "plugin")
    nodes = [node for node in model.graph.node if node.op_type == names.TREE_ATTENTION]
    assert len(nodes) == decoder.layers
    assert not model.functions
    assert {entry.domain for entry in model.opset_import} == {""}
    for node in nodes:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        assert (node.domain, attributes["plugin_version"], attributes["plugin_namespace"]) == ("", b"1", b"")
    assert_same(run(restore_bodies(model).SerializeToString(), decoder), run(portable, decoder))


def test_weights_stay_in_their_files(tmp_path: Path) -> None:
    stored_outside(Decoder(), tmp_path)
    before = (tmp_path / "weights.bin").read_bytes()
    prepared = prepare(tmp_path, "verifier.onnx", names.VERIFIER, (10, 9), "plugin")
    embedding = next(tensor for tensor in prepared.graph.initializer if tensor.name == "embed")
    assert {entry.key: entry.value for entry in embedding.external_data}["location"] == "weights.bin"
    assert (tmp_path / "weights.bin").read_bytes() == before


@pytest.mark.parametrize("backwards", [False, True])
def test_merged_projections_are_one_initializer_each(backwards: bool, tmp_path: Path) -> None:
    """A Concat of weights would be a layer of TensorRT's, which might move them at every call."""
    decoder = Decoder()
    portable = stored_outside(decoder, tmp_path, backwards)
    parts = concatenated(onnx.load(portable, load_external_data=False))
    assert parts
    expected = run(portable, decoder)
    prepared = prepare(tmp_path, portable.name, names.VERIFIER, (10, 15), "native")
    assert "Concat" not in weight_readers(prepared)
    assert_same(run(tmp_path / graph_file(names.VERIFIER), decoder), expected)
    merged = {tensor.name for tensor in prepared.graph.initializer if tensor.name.endswith(".merged")}
    assert len(merged) == 2 * decoder.layers  # queries, keys and values; gate and up
    assert not parts & {tensor.name for tensor in prepared.graph.initializer}
    assert (tmp_path / weights_file(names.VERIFIER)).exists() is backwards  # the parts' order in the file


@pytest.mark.parametrize("axis", [0, -2])
@pytest.mark.parametrize("kept", [0, 1])
def test_weights_that_follow_one_another_in_a_file_are_not_copied(kept: int, axis: int, tmp_path: Path) -> None:
    """So lie the two that a gate multiplies in safetensors. Others are copied, also out of a file with hard links."""
    first, second = (np.full((2, 4), value, np.float16) for value in (1, 2))
    model = concat_model(tmp_path, [first, second], [("ab", axis)], gap=b"" if kept else b"\0\0")
    (tmp_path / "linked.bin").hardlink_to(tmp_path / "w.bin")  # as a bundle's weights are to a checkpoint's
    copied = 0 if kept else 2 * first.nbytes
    assert copied_bytes(model) == copied
    assert merge_weights(model, tmp_path, "merged.bin") == copied
    (tmp_path / "linked.bin").unlink()  # onnx_ir reads no such file
    assert (tmp_path / "merged.bin").exists() is not bool(kept)
    (merged,) = merged_in(model)
    np.testing.assert_array_equal(merged, np.concatenate([first, second]))


@pytest.mark.parametrize("merges", [("ab", "a"), ("ac", "acb")])
def test_weights_that_are_read_twice_are_copied_for_each(merges: tuple[str, str], tmp_path: Path) -> None:
    """TensorRT refuses two weights of different sizes at one place of a file."""
    parts = {name: np.full((2, 4), value, np.float16) for value, name in enumerate("abc")}
    model = concat_model(tmp_path, list(parts.values()), [(letters, 0) for letters in merges])
    copied = sum(map(len, merges)) * parts["a"].nbytes
    assert copied_bytes(model) == merge_weights(model, tmp_path, "merged.bin") == copied
    for merged, letters in zip(merged_in(model), merges, strict=True):
        np.testing.assert_array_equal(merged, np.concatenate([parts[letter] for letter in letters]))


@pytest.mark.parametrize(("axis", "output"), [(1, False), (-1, False), (0, True)])
def test_other_concats_stay(axis: int, output: bool, tmp_path: Path) -> None:
    """Those along another axis, and those that give an output of the graph."""
    model = concat_model(tmp_path, [np.ones((2, 4), np.float16)] * 2, [("ba", axis)], output)
    assert copied_bytes(model) == merge_weights(model, tmp_path, "merged.bin") == 0
    assert "Concat" in {node.op_type for node in model.graph}
    assert merged_in(model) == []


def concat_model(
    folder: Path, parts: Sequence[np.ndarray], concats: Sequence[tuple[str, int]], output: bool = False,
    gap: bytes = b"",
) -> ir.Model:  # fmt: skip
    """A graph of Concats, each by the letters of its weights and an axis; weights are in one file with gaps.

    output: makes the results outputs of the graph instead of inputs of other nodes.
    """
    size = parts[0].nbytes
    (folder / "w.bin").write_bytes(gap.join(part.tobytes() for part in parts))
    made = [
        onnx.helper.make_node("Concat", list(names), [f"{'y' if output else 'w'}{number}"], axis=axis)
        for number, (names, axis) in enumerate(concats)
    ]
    readers = [] if output else [onnx.helper.make_node("Abs", [f"w{n}"], [f"y{n}"]) for n in range(len(concats))]
    outputs = [onnx.helper.make_tensor_value_info(f"y{n}", onnx.TensorProto.FLOAT16, None) for n in range(len(concats))]
    graph = onnx.helper.make_graph([*made, *readers], "g", [], outputs)
    for number, (name, part) in enumerate(zip("abc", parts, strict=False)):
        tensor = graph.initializer.add(name=name, data_type=onnx.TensorProto.FLOAT16, dims=part.shape)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", "w.bin"), ("offset", number * (size + len(gap))), ("length", size)):
            tensor.external_data.add(key=key, value=str(value))
    onnx.save(onnx.helper.make_model(graph), folder / "g.onnx")
    return ir.load(folder / "g.onnx")


def merged_in(model: ir.Model) -> list[np.ndarray]:
    """The merged weights of a graph, in its order."""
    initializers = model.graph.initializers
    return [value.const_value.numpy() for name, value in initializers.items() if name.endswith(".merged")]


def concatenated(model: onnx.ModelProto) -> set[str]:
    """Names of the weights that Concats read."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return {name for node in model.graph.node if node.op_type == "Concat" for name in node.input} & weights


def weight_readers(model: onnx.ModelProto) -> set[str]:
    """Return the operators of nodes that read only tensors with stored values."""
    stored = {tensor.name for tensor in model.graph.initializer if tensor.external_data}
    return {node.op_type for node in model.graph.node if stored.issuperset(node.input)}


@pytest.mark.parametrize(
    ("decoder", "release", "message"),
    [
        (Decoder(), (10, 14), r"TensorRT 10\.14 has no KV update of its own; build with --attention plugin"),
        (Decoder(), (11, 1), r"TensorRT 11\.1 may read rows .* not live; build with --attention plugin, or .*2$"),
        (Decoder(softcap=20.0), (10, 15), r"verifier: node 'l0\.attended' is TreeAttention with a softcap"),
    ],
)
def test_native_attention_is_refused_if_it_would_be_wrong(
    decoder: Decoder, release: tuple[int, int], message: str, tmp_path: Path
) -> None:
    portable = save_verifier(decoder, tmp_path)
    with pytest.raises(BackendError, match=message):
        prepare(tmp_path, portable.name, names.VERIFIER, release, "native")
    assert not (tmp_path / graph_file(names.VERIFIER)).exists()
