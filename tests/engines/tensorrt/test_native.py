"""Chains and kept rows prepared for TensorRT: they and the portable graph give equal results in ONNX Runtime.

TensorRT's KV update writes to the memory of an input, so a buffer has one: a chain's later rows are not written.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from redraft import names, signatures
from redraft.engines.manifest import dump_manifest, load_manifest
from redraft.engines.tensorrt.native import lower_attention
from redraft.engines.tensorrt.operators import problems
from redraft.engines.tensorrt.prepare import graph_file, prepare
from redraft.errors import BackendError
from redraft.export.graph.step_graphs import export_step_graphs
from redraft.methods.chains import draft_outputs
from redraft.runtime import Runtime, SamplingParams, SpeculationParams
from redraft.signatures import VerifierShape
from redraft.types import Budget
from tests.engines.calls import sampling_values
from tests.engines.drafters import LYANNA_DRAFT
from tests.engines.graphs import for_onnxruntime, restore_bodies
from tests.export.drafters.tiny import CONFIG, Exported
from tests.runtime.lyanna_bundle import STEPS

RELEASE = (10, 15)
CAPACITY, WIDTH, POISON = 40, 5, 1e3
NUM_PENDING = (3, 5)
"""Rows that two sequences bring to a call; the rest of WIDTH is padding."""
CACHES = (names.key_cache(0), names.value_cache(0))
LINKS = [names.link(cache, number) for number, cache in enumerate(CACHES * (CONFIG.steps - 1), 1)]
SHAPE = VerifierShape(layers=2, kv_heads=2, head_dim=8, hidden=12, vocabulary=9, max_positions=64)


@pytest.fixture(scope="module")
def native(drafter: Exported) -> str:
    """The file of the drafter's graph in TensorRT's own operators, next to the portable one."""
    prepare(drafter.bundle.path, f"{LYANNA_DRAFT}.onnx", LYANNA_DRAFT, RELEASE, "native")
    file = drafter.bundle.path / graph_file(LYANNA_DRAFT)
    return for_onnxruntime(file).rename(file.with_name("native.onnx")).name


@pytest.fixture(scope="module")
def plugin(drafter: Exported) -> str:
    """The file of the drafter's graph for the plugin."""
    prepare(drafter.bundle.path, f"{LYANNA_DRAFT}.onnx", LYANNA_DRAFT, (10, 9), "plugin")
    file = drafter.bundle.path / graph_file(LYANNA_DRAFT)
    return file.rename(file.with_name("plugin.onnx")).name


class Drafting:
    """A draft graph and the KV buffers that it passes from call to call."""

    def __init__(self, exported: Exported, file: str) -> None:
        self._shape, self._tables = exported.shape, exported.tables
        self._session = ort.InferenceSession(exported.bundle.path / file, providers=["CPUExecutionProvider"])
        size = (2, self._shape.kv_heads, CAPACITY, self._shape.head_dim)
        self.caches = {name(0): np.full(size, POISON, np.float32) for name in (names.key_cache, names.value_cache)}

    def __call__(self, cache_len: np.ndarray, seed: int) -> dict[str, np.ndarray]:
        """Rows of `seed` after the first cache_len[b] ones; padding is garbage like the buffers' first content."""
        random = np.random.default_rng(seed)
        features = random.standard_normal((2, WIDTH, self._shape.hidden)).astype(np.float32)
        for sequence, count in enumerate(NUM_PENDING):
            features[sequence, count:] = POISON
        feeds = {
            names.FEATURE_ROWS: features,
            names.TOKENS: random.integers(0, self._shape.vocabulary, (2, WIDTH)),
            names.POSITIONS: cache_len[:, None] + np.arange(WIDTH),
            names.NUM_PENDING: np.array(NUM_PENDING), names.CACHE_LEN: cache_len,
            names.KV_LEN: np.array([cache_len.max() + WIDTH]),
            **sampling_values(2, self._shape.steps), **self.caches, **self._tables,
        }  # fmt: skip
        outputs = [output.name for output in self._session.get_outputs()]
        found = dict(zip(outputs, self._session.run(outputs, feeds), strict=True))
        self.caches = {cache: found[names.present(cache)] for cache in self.caches}
        return found


def assert_same_draft(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name in (names.TREE_TOKENS, names.TREE_PARENTS):
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    for name in (names.TREE_LOG_PROBS, names.CHAIN_LOGITS):
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-4, atol=2e-4, err_msg=name)


@pytest.mark.parametrize("attention", ["native", "plugin"])
def test_a_chain_drafts_the_same_call_after_call(
    attention: str, drafter: Exported, request: pytest.FixtureRequest
) -> None:
    """Poison after the committed rows between calls changes nothing. The operator's body stands for the plugin."""
    file = request.getfixturevalue(attention)
    if attention == "plugin":
        model = restore_bodies(onnx.load(drafter.bundle.path / file))
        onnx.save(model, drafter.bundle.path / (file := "body.onnx"))
    portable, other = Drafting(drafter, f"{LYANNA_DRAFT}.onnx"), Drafting(drafter, file)
    cache_len = np.array([0, 2])
    for cache in CACHES:
        committed = np.random.default_rng(9).standard_normal((drafter.shape.kv_heads, 2, drafter.shape.head_dim))
        for draft in (portable, other):
            draft.caches[cache][1, :, :2] = committed
    for call in range(3):
        assert_same_draft(other(cache_len, call), portable(cache_len, call))
        cache_len = cache_len + NUM_PENDING
        for cache, rows in other.caches.items():
            for sequence, kv_len in enumerate(cache_len):
                np.testing.assert_allclose(
                    rows[sequence, :, :kv_len], portable.caches[cache][sequence, :, :kv_len], rtol=2e-4, atol=2e-4
                )
                rows[sequence, :, kv_len:] = -POISON


def test_with_the_plugin_the_buffers_between_nodes_are_outputs(drafter: Exported, plugin: str) -> None:
    """They are bound to the buffer's own memory, so they have its type and sizes."""
    graph = onnx.load(drafter.bundle.path / plugin, load_external_data=False).graph
    portable = onnx.load(drafter.bundle.path / f"{LYANNA_DRAFT}.onnx", load_external_data=False).graph
    assert [output.name for output in graph.output] == [*(output.name for output in portable.output), *LINKS]
    assert [names.linked(name) for name in LINKS] == [*CACHES] * (CONFIG.steps - 1)
    buffers = {each.name: each.type for each in graph.input}
    assert all(output.type == buffers[cache] for output in graph.output if (cache := names.linked(output.name)))
    nodes = [node for node in graph.node if node.op_type == names.TREE_ATTENTION]
    assert [name for node in nodes for name in node.input[3:5]] == [*CACHES, *LINKS]
    assert [name for node in nodes for name in node.output[1:3]] == [*LINKS, *map(names.present, CACHES)]


def test_every_buffer_is_updated_once_from_an_input_to_an_output(drafter: Exported, native: str) -> None:
    """TensorRT's KV update can do only this."""
    graph = onnx.load(drafter.bundle.path / native, load_external_data=False).graph
    updates = [node for node in graph.node if node.op_type == "TensorScatter"]
    assert [node.input[0] for node in updates] == [*CACHES]
    assert [node.output[0] for node in updates] == [
        names.present(cache) for cache in (node.input[0] for node in updates)
    ]
    assert {output.name for output in graph.output} == {spec.name for spec in draft_outputs(drafter.shape)}
    assert sum(node.op_type == "Attention" for node in graph.node) == CONFIG.steps


@pytest.mark.parametrize("change", ["two rows on", "window", "another's row"])
def test_nodes_that_do_not_follow_row_by_row_are_refused(change: str, drafter: Exported) -> None:
    model = ir.load(drafter.bundle.path / f"{LYANNA_DRAFT}.onnx")
    third = [node for node in model.graph if node.op_type == names.TREE_ATTENTION][2]
    if change == "window":
        third.attributes["window"] = ir.AttrInt64("window", 4)
    elif change == "two rows on":
        two = ir.Value(name="two", const_value=ir.tensor(np.array(2), name="two"))
        model.graph.register_initializer(two)
        third.inputs[7].producer().replace_input_with(1, two)
    else:
        third.replace_input_with(4, next(value for value in model.graph.inputs if value.name == names.value_cache(0)))
    with pytest.raises(
        BackendError, match=r"another node wrote, and not its next row.*attention plugin, or without the"
    ):
        lower_attention(LYANNA_DRAFT, model, RELEASE)


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("step")
    export_step_graphs(SHAPE, folder, gathers=False)
    prepare(folder, f"{names.STEP_COMPACT_KV}.onnx", names.STEP_COMPACT_KV, RELEASE, "native")
    return folder


def test_rows_of_the_path_are_kept(step: Path) -> None:
    random = np.random.default_rng(3)
    size = (2, SHAPE.kv_heads, 30, SHAPE.head_dim)
    caches = {name: random.standard_normal(size).astype(np.float32) for name in signatures.caches(SHAPE)}
    path, cache_len = np.array([[0, 2, 5, 3, 4, 5], [0, 1, 2, 3, 4, 5]]), np.array([4, 24])
    feeds = {names.PATH: path, names.CACHE_LEN: cache_len, **caches}
    session = ort.InferenceSession(step / graph_file(names.STEP_COMPACT_KV), providers=["CPUExecutionProvider"])
    presents = session.run([names.present(cache) for cache in caches], feeds)
    for cache, found in zip(caches.values(), presents, strict=True):
        expected = cache.copy()
        expected[0, :, 4:10] = cache[0][:, 4 + path[0]]
        np.testing.assert_array_equal(found, expected)


def test_the_keeping_graph_updates_inputs_by_indices_of_a_fixed_length(step: Path) -> None:
    portable = onnx.load(step / f"{names.STEP_COMPACT_KV}.onnx")
    assert "GatherND by indices of a length that is computed" in next(problems(portable, RELEASE))
    model = onnx.load(step / graph_file(names.STEP_COMPACT_KV))
    assert not list(problems(model, RELEASE))
    updated = [node.input[0] for node in model.graph.node if node.op_type == "TensorScatter"]
    assert updated == signatures.caches(SHAPE)
    assert sum(node.op_type == "Reshape" for node in model.graph.node) == 1  # the indices are those of all buffers


def test_a_runtime_decodes_and_drafts_the_same_on_these_graphs(
    lyanna_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All three over many calls: prompts longer than a draft takes in, slots of different lengths, resampling."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    native = tmp_path / "native"
    shutil.copytree(lyanna_bundle, native)
    manifest = load_manifest(native)
    files = dict(manifest.files)
    for graph in (names.VERIFIER, LYANNA_DRAFT, names.STEP_COMPACT_KV):
        file = manifest.all_graphs[graph].file
        prepare(native, file, graph, RELEASE, "native")
        for_onnxruntime(native / graph_file(graph)).replace(native / file)
        files[file] = replace(files[file], size=(native / file).stat().st_size)
    (native / "manifest.json").write_text(dump_manifest(replace(manifest, files=files)))
    prompts = [[3, 4, 5, 6, 7] * 12 + [8], [9, 3], [4] * 66, [5, 7, 11]]
    results = []
    for folder in (lyanna_bundle, native):
        with Runtime.open(folder, threads=1, max_num_seqs=3, verify=False, device="cpu") as runtime:
            results.append(
                runtime.generate(
                    prompts, SamplingParams(max_tokens=40), SpeculationParams("lyanna", budget=Budget(30, STEPS, 9))
                )
            )
    for one, other in zip(*results, strict=True):
        assert one.token_ids == other.token_ids
        assert one.metrics.acceptance_histogram == other.metrics.acceptance_histogram
        assert one.metrics.size_histogram == other.metrics.size_histogram
    assert sum(one.metrics.num_accepted_draft_tokens for one in results[1]) > 0
