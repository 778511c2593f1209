"""The graphs of a step equal their NumPy functions."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from redraft import names, signatures
from redraft.export.graph.step_graphs import export_slot_copy, export_step_graphs
from redraft.methods.lyanna import METHOD, LyannaShape
from redraft.names import TensorSpec
from redraft.runtime.params import SamplingParams
from redraft.runtime.sampling import make_sampler
from redraft.runtime.sampling.noise import draft_noise
from redraft.runtime.trees.tree import ancestor_mask
from redraft.signatures import VerifierShape
from redraft.types import DraftTree
from tests.engines.drafters import LYANNA_COPY_SLOT

SHAPE = VerifierShape(layers=2, kv_heads=2, head_dim=8, hidden=12, vocabulary=9, max_positions=64)


LYANNA = LyannaShape(
    hidden=12, vocabulary=9, kv_heads=1, head_dim=4, steps=3, width=2, nodes=5, resample_nodes=3, token_info="fp16",
    draft_vocabulary=9, rank=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("step")
    export_step_graphs(SHAPE, out, gathers=True)
    export_slot_copy(LYANNA_COPY_SLOT, METHOD.state(LYANNA), out)
    return out


@functools.cache
def opened(path: Path) -> ort.InferenceSession:
    return ort.InferenceSession(path, providers=["CPUExecutionProvider"])


def run(folder: Path, name: str, inputs: dict[str, NDArray]) -> dict[str, NDArray]:
    session = opened(folder / f"{name}.onnx")
    outputs = [output.name for output in session.get_outputs()]
    return dict(zip(outputs, session.run(outputs, inputs), strict=True))


def random_tree(rng: np.random.Generator, nodes: int, vocabulary: int) -> tuple[NDArray, NDArray]:
    """Tokens and parents, siblings of different tokens."""
    while True:
        parents = np.array([-1, *(rng.integers(0, node) for node in range(1, nodes))])
        tokens = rng.integers(0, vocabulary, nodes)
        if len({(p, t) for p, t in zip(parents[1:], tokens[1:], strict=True)}) == nodes - 1:
            return tokens, parents


def laid_out(
    folder: Path, host: list[tuple[NDArray, NDArray]], made: list[tuple[NDArray, NDArray]], on_device: list[int],
    cache_len: NDArray,
) -> dict[str, NDArray]:  # fmt: skip
    fields = [[np.stack([tree[field] for tree in trees]) for field in range(2)] for trees in (host, made)]
    return run(folder, names.STEP_PREPARE_TREE, {
        names.HOST_TOKENS: fields[0][0], names.HOST_PARENTS: fields[0][1], names.STORED_TOKENS: fields[1][0],
        names.STORED_PARENTS: fields[1][1], names.ON_DEVICE: np.array(on_device), names.CACHE_LEN: cache_len,
    })  # fmt: skip


@pytest.mark.parametrize("nodes", [1, 2, 9, 40])
def test_prepare_tree(folder: Path, nodes: int) -> None:
    """Takes `nodes` nodes of stored trees of 9. Padding nodes are children of the root."""
    rng, width = np.random.default_rng(nodes), 9
    host = [random_tree(rng, nodes, 10**6) for _ in range(3)]
    made = [random_tree(rng, width, 10**6) for _ in range(3)]
    cache_len = np.array([5, 0, 17])
    found = laid_out(folder, host, made, [1, 0, 1], cache_len)
    cut = [tuple(np.pad(field, (0, max(nodes - width, 0)))[:nodes] for field in tree) for tree in made]
    trees = [cut[0], host[1], cut[2]]
    tokens, parents = (np.stack([tree[field] for tree in trees]) for field in range(2))
    np.testing.assert_array_equal(found[names.TOKEN_IDS], tokens)
    np.testing.assert_array_equal(found[names.PARENTS], parents)
    masks = np.stack([ancestor_mask(row) for row in parents])
    np.testing.assert_array_equal(found[names.TREE_MASK], masks)
    np.testing.assert_array_equal(found[names.POSITIONS], masks.sum(2) - 1 + cache_len[:, None])


def test_prepare_tree_of_the_deepest_chain(folder: Path) -> None:
    tree = np.zeros(65, np.int64), np.arange(-1, 64)
    found = laid_out(folder, [tree], [tree], [0], np.array([3]))
    np.testing.assert_array_equal(found[names.POSITIONS][0], np.arange(3, 68))


def accepting(trees: list[tuple[NDArray, NDArray]], logits: NDArray, counts: NDArray) -> dict[str, NDArray]:
    return {
        names.LOGITS: logits, names.TOKEN_IDS: np.stack([tokens for tokens, _ in trees]),
        names.PARENTS: np.stack([parents for _, parents in trees]),
        names.TREE_MASK: np.stack([ancestor_mask(parents) for _, parents in trees]), names.NODES: counts,
    }  # fmt: skip


@pytest.mark.parametrize("temperatures", [(), (0.7, 0.0, 1.5)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("nodes", [1, 4, 13])
def test_acceptance_is_the_samplers(folder: Path, nodes: int, temperatures: tuple[float, ...]) -> None:
    """Sequences have their own temperatures and seeds. A small vocabulary makes paths of all lengths occur."""
    rng, vocabulary = np.random.default_rng(nodes), 4 if nodes < 13 else 9
    lengths, differ = set(), 0
    for _ in range(60):
        trees = [random_tree(rng, nodes, vocabulary) for _ in range(3)]
        logits = rng.standard_normal((3, nodes, 9)).astype(np.float32)
        logits[:, :, vocabulary:] -= 9
        counts = np.array([nodes, nodes, rng.integers(1, nodes + 1)])
        requests = [SamplingParams(temperature=t, seed=int(rng.integers(1 << 40))) for t in temperatures or (0.0,) * 3]
        texts = [[0] * int(rng.integers(2, 70)) for _ in requests]
        inputs = accepting(trees, logits, counts)
        if temperatures:
            keys = [draft_noise(one).keys(len(text), nodes) for one, text in zip(requests, texts, strict=True)]
            inputs |= {names.NOISE_KEYS: np.array(keys), names.TEMPERATURE: np.array(temperatures, np.float32)}
        found = run(folder, names.STEP_ACCEPT_SAMPLED if temperatures else names.STEP_ACCEPT, inputs)
        for b, (tokens, parents) in enumerate(trees):
            tree = DraftTree(tokens[: counts[b]], parents[: counts[b]], np.zeros(counts[b], np.float32))
            outcome = make_sampler(requests[b]).verify(logits[b, : counts[b]], tree, texts[b])
            kept = 1 + len(outcome.path)
            lengths.add(kept)
            expected = [0, *outcome.path, *range(kept, nodes)]
            assert found[names.PATH][b].tolist() == expected
            assert found[names.ACCEPT_OUTPUT][b, : 1 + nodes].tolist() == [kept, *expected]
            targets = found[names.ACCEPT_OUTPUT][b, 1 + nodes :]
            assert [targets[node] for node in (0, *outcome.path)] == list(outcome.tokens)
            assert temperatures or targets.tolist() == logits[b].argmax(1).tolist()
            differ += int(targets[0] != logits[b, 0].argmax())
    assert len(lengths) >= min(nodes, 3)
    assert (differ > 30) == bool(temperatures)


@pytest.mark.parametrize("graph", [names.STEP_ACCEPT, names.STEP_ACCEPT_SAMPLED])
def test_rows_without_a_largest_number_are_not_reached(folder: Path, graph: str) -> None:
    """A chain of four, whose rows agree with it: rows of NaN, infinities, and -inf alone end it. One -inf does not."""
    tokens, parents = np.zeros(4, np.int64), np.arange(-1, 3)
    logits = np.zeros((5, 4, 9), np.float32)
    logits[:, :, 0] = 5.0
    logits[0, 1, 3] = np.nan
    logits[1, 0, 8] = np.inf
    logits[2, 2] = -np.inf
    logits[3, 1, 7] = -np.inf
    inputs = accepting([(tokens, parents)] * 5, logits, np.full(5, 4))
    if graph == names.STEP_ACCEPT_SAMPLED:
        inputs |= {names.NOISE_KEYS: np.ones((5, 4, 2), np.int64), names.TEMPERATURE: np.zeros(5, np.float32)}
    found = run(folder, graph, inputs)[names.ACCEPT_OUTPUT]
    assert found[:, 0].tolist() == [2, 1, 3, 4, 4]
    assert found[:, 5:].tolist() == [[0, -1, 0, 0], [-1, 0, 0, 0], [0, 0, -1, 0], [0] * 4, [0] * 4]


def test_a_large_vocabulary_is_sampled_as_the_host_samples_it(tmp_path: Path) -> None:
    """The host computes the noise of likely tokens first, and of others only if they can win."""
    shape = VerifierShape(layers=1, kv_heads=1, head_dim=8, hidden=8, vocabulary=50_000, max_positions=64)
    export_step_graphs(shape, tmp_path, gathers=False)
    rng, nodes = np.random.default_rng(3), 3
    tokens, parents = np.zeros(nodes, np.int64), np.array([-1, 0, 0])
    for seed, temperature in enumerate((0.3, 1.0, 2.0) * 3):
        logits = (rng.standard_normal((1, nodes, 50_000)) * 3).astype(np.float32)
        params = SamplingParams(temperature=temperature, seed=seed)
        keys = np.array([draft_noise(params).keys(7, nodes)], np.int64)
        inputs = accepting([(tokens, parents)], logits, np.array([nodes]))
        found = run(tmp_path, names.STEP_ACCEPT_SAMPLED, {
            **inputs, names.NOISE_KEYS: keys, names.TEMPERATURE: np.array([temperature], np.float32),
        })  # fmt: skip
        tree = DraftTree(tokens, parents, np.zeros(nodes, np.float32))
        outcome = make_sampler(params).verify(logits[0], tree, [5] * 7)
        assert found[names.ACCEPT_OUTPUT][0, 1 + nodes] == outcome.tokens[0]


def test_rows_of_the_path_are_kept(folder: Path) -> None:
    rng = np.random.default_rng(3)
    shape = (2, SHAPE.kv_heads, 30, SHAPE.head_dim)
    caches = {name: rng.standard_normal(shape).astype(np.float32) for name in signatures.caches(SHAPE)}
    path, cache_len = np.array([[0, 2, 5, 3, 4, 5], [0, 1, 2, 3, 4, 5]]), np.array([4, 24])
    found = run(folder, names.STEP_COMPACT_KV, {names.PATH: path, names.CACHE_LEN: cache_len, **caches})
    for name, cache in caches.items():
        expected = cache.copy()
        expected[0, :, 4:10] = cache[0][:, 4 + path[0]]
        np.testing.assert_array_equal(found[names.present(name)], expected)


def test_feature_rows_of_the_path_wait(folder: Path) -> None:
    rng = np.random.default_rng(4)
    features = rng.standard_normal((2, 4, SHAPE.hidden)).astype(np.float32)
    waiting = rng.standard_normal((2, 9, SHAPE.hidden)).astype(np.float32)
    path, rows = np.array([[0, 3, 2, 3], [0, 1, 2, 3]]), np.array([0, 5])
    found = run(folder, names.STEP_GATHER_FEATURES, {
        names.FEATURE_ROWS: features, names.PATH: path, names.PENDING_FEATURES: waiting, names.PENDING_OFFSET: rows,
    })[names.present(names.PENDING_FEATURES)]  # fmt: skip
    np.testing.assert_array_equal(found[0, :4], features[0][path[0]])
    np.testing.assert_array_equal(found[0, 4:], waiting[0, 4:])
    np.testing.assert_array_equal(found[1], np.concatenate([waiting[1, :5], features[1]]))


@pytest.mark.parametrize("nodes", [1, 4, 6])
def test_trees_of_some_slots_are_stored(folder: Path, nodes: int) -> None:
    """Drafted slots get the new trees with padding nodes under the root; other slots keep their trees."""
    rng, space = np.random.default_rng(nodes), 6
    tokens, parents = rng.integers(0, 9, (2, 3, nodes))
    stored_tokens, stored_parents = rng.integers(10, 19, (2, 3, space))
    found = run(folder, names.STEP_STORE_TREES, {
        names.TREE_TOKENS: tokens, names.TREE_PARENTS: parents, names.DRAFTED: np.array([12, 0, 1]),
        names.STORED_TOKENS: stored_tokens, names.STORED_PARENTS: stored_parents,
    })  # fmt: skip
    for name, made, stored in (
        (names.STORED_TOKENS, tokens, stored_tokens), (names.STORED_PARENTS, parents, stored_parents)
    ):  # fmt: skip
        expected = stored.copy()
        expected[[0, 2]] = 0
        expected[[0, 2], :nodes] = made[[0, 2]]
        np.testing.assert_array_equal(found[names.present(name)], expected)


@pytest.mark.parametrize(
    ("graph", "state"),
    [
        (names.STEP_COPY_SLOT, signatures.verifier_state(SHAPE)),
        (LYANNA_COPY_SLOT, METHOD.state(LYANNA)),
    ],
)
def test_a_slot_is_copied(folder: Path, graph: str, state: tuple[TensorSpec, ...]) -> None:
    sizes = {"B": 4, "C": 7, "W": 6}
    rng = np.random.default_rng(5)
    shapes = {spec.name: [sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape] for spec in state}
    held = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    found = run(folder, graph, {names.SOURCE_SLOT: np.array([3]), names.TARGET_SLOT: np.array([1]), **held})
    assert set(found) == {names.present(name) for name in held}
    for name, values in held.items():
        np.testing.assert_array_equal(found[names.present(name)], values[[0, 3, 2, 3]])


def test_graphs_are_valid_and_as_their_contracts_say(folder: Path) -> None:
    state = METHOD.state(LYANNA)
    copied = {LYANNA_COPY_SLOT: (signatures.copy_slot_inputs(state), signatures.in_place(state))}
    contracts = signatures.step_signatures(SHAPE, gathers=True) | copied
    assert len(contracts) == 8
    for name, (inputs, outputs) in contracts.items():
        model = onnx.load(folder / f"{name}.onnx")
        onnx.checker.check_model(model, full_check=True)
        assert [value.name for value in model.graph.input] == [spec.name for spec in inputs]
        assert [value.name for value in model.graph.output] == [spec.name for spec in outputs]


# ONNX Runtime's kernels for CUDA take these types only, of operators here whose kernels for the CPU take more
# (docs/OperatorKernels.md of its repository).
CUDA_TYPES = {"ArgMax": {"FLOAT", "FLOAT16", "DOUBLE"}, "MatMul": {"FLOAT", "FLOAT16", "DOUBLE", "BFLOAT16"},
              "Greater": {"FLOAT", "FLOAT16", "DOUBLE", "INT32", "INT64", "UINT32", "UINT64", "BFLOAT16"}}  # fmt: skip


def test_no_node_is_left_to_the_cpu_for_its_type(folder: Path) -> None:
    """Such a node would copy its inputs to the host in the middle of a step."""
    seen = set()
    for path in folder.glob("step.*.onnx"):
        model = onnx.shape_inference.infer_shapes(onnx.load(path), strict_mode=False)
        values = (*model.graph.input, *model.graph.value_info, *model.graph.output)
        types = {value.name: onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type) for value in values}
        for node in model.graph.node:
            if node.op_type in CUDA_TYPES:
                seen.add(node.op_type)
                assert {types[name] for name in node.input} <= CUDA_TYPES[node.op_type], (path.name, node.output)
    assert seen == set(CUDA_TYPES)
