"""Draft and resample graphs in ONNX Runtime against training's computation and the references of Algorithms 1 and 2."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from redraft import names
from redraft.engines import open_calls
from redraft.engines.bundle import Bundle
from redraft.errors import CheckpointError, UsageError
from redraft.export.checkpoint.model_config import load_config
from redraft.export.drafters import find_exporter
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity, TokenData
from redraft.export.drafters.draft_vocabulary import DraftVocabulary
from redraft.export.drafters.level_tree import IMPOSSIBLE
from redraft.export.drafters.lyanna import lyanna_shape
from redraft.export.drafters.lyanna_token_info import make_tables
from redraft.export.drafters.writing import Target
from redraft.methods.lyanna import METHOD, LyannaBuild, LyannaShape, resample_outputs
from redraft.methods.lyanna_token_info import lookup
from tests.engines.calls import sampling_values
from tests.engines.drafters import LYANNA_DRAFT, LYANNA_DRAFT_SINGLE, LYANNA_RESAMPLE

from .tiny import (
    CONFIG,
    VOCABULARY,
    Exported,
    Verifier,
    arrays,
    counts,
    export,
    make_verifier,
    manifest_with_verifier,
    random_drafter,
    write_drafter,
)
from .token_tree import Tree, resample

CAPACITY = 48
GARBAGE = 1e4
TOLERANCE = 1e-4
HALF_TOLERANCE = 2e-2


@dataclass
class History:
    """Inputs of one sequence's drafter: feature m is at position m, before token m + 1."""

    features: torch.Tensor
    tokens: torch.Tensor

    def __len__(self) -> int:
        return len(self.features)


def history(rows: int, seed: int, hidden: int = 32) -> History:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (rows + 1,), generator=generator)
    return History(torch.randn(rows, hidden, generator=generator), tokens)


class Draft:
    """Runs the draft graph without the runtime, on buffers with random initial content."""

    def __init__(self, exported: Exported, graph: str, batch: int) -> None:
        shape, generator = exported.shape, np.random.default_rng(5)
        self.engine = open_calls(exported.bundle, graph, threads=1)
        size = (batch, shape.kv_heads, CAPACITY, shape.head_dim)
        self.caches = [(generator.standard_normal(size) * GARBAGE).astype(shape.dtype) for _ in range(2)]
        self.engine.bind(names.key_cache(0), self.caches[0])
        self.engine.bind(names.value_cache(0), self.caches[1])
        for name, table in exported.tables.items():
            self.engine.bind(name, table)
        self.engine.bind(names.DRAFT_LOGIT_SCALE, np.full(batch, shape.draft_logit_scale, np.float32))
        self.past = np.zeros(batch, np.int64)
        self.sizes = {"B": batch} if graph == LYANNA_DRAFT else {}

    def call(self, histories: list[History], rows: list[int], width: int) -> dict[str, np.ndarray]:
        """Draft from the next rows[b] rows of each sequence b, padded to `width` with random features and tokens."""
        call = self.engine.prepare(**self.sizes, M=width)
        generator = np.random.default_rng(6)
        inputs = call.inputs
        inputs[names.FEATURE_ROWS][:] = generator.standard_normal(inputs[names.FEATURE_ROWS].shape) * GARBAGE
        inputs[names.TOKENS][:] = generator.integers(0, VOCABULARY, inputs[names.TOKENS].shape)
        for b, (sequence, count) in enumerate(zip(histories, rows, strict=True)):
            past = int(self.past[b])
            inputs[names.FEATURE_ROWS][b, :count] = sequence.features[past : past + count]
            inputs[names.TOKENS][b, :count] = sequence.tokens[past + 1 : past + count + 1]
            inputs[names.POSITIONS][b] = np.arange(past, past + width)
            inputs[names.NUM_PENDING][b] = count
        inputs[names.CACHE_LEN][:] = self.past
        inputs[names.KV_LEN][0] = self.past.max() + width
        call.run()
        self.past += rows
        return {name: array.copy() for name, array in call.outputs.items()}


def same_tree(found: dict[str, np.ndarray], b: int, expected: Tree, count: int | None = None) -> None:
    count = len(expected.tokens) if count is None else count
    assert len(expected.tokens) == count
    assert found[names.TREE_TOKENS][b, :count].tolist() == expected.tokens
    assert found[names.TREE_PARENTS][b, :count].tolist() == expected.parents
    np.testing.assert_allclose(found[names.TREE_LOG_PROBS][b, :count], expected.log_probs, atol=TOLERANCE)


def check_draft(
    exported: Exported, found: dict[str, np.ndarray], histories: list[History], ends: list[int],
    tolerance: float = TOLERANCE,
) -> None:  # fmt: skip
    """Logits equal those of training, and the tree is Algorithm 1's."""
    shape = exported.shape
    for b, (sequence, end) in enumerate(zip(histories, ends, strict=True)):
        logits = exported.chain_logits(sequence.features[:end], sequence.tokens[: end + 1])
        np.testing.assert_allclose(found[names.CHAIN_LOGITS][b], logits, atol=tolerance, rtol=tolerance)
        root = int(sequence.tokens[end])
        same_tree(found, b, exported.subtree(found[names.CHAIN_LOGITS][b], root).top_nodes(shape.nodes))


@pytest.fixture(params=["whole", "pruned", "trained"])
def exported(request) -> Exported:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("graph", [LYANNA_DRAFT, LYANNA_DRAFT_SINGLE])
def test_a_draft_of_one_sequence_equals_training(exported: Exported, graph: str) -> None:
    """Calls without padding, with padding, of a single row, after different numbers of rows."""
    sequence = history(20, seed=1)
    drafting = Draft(exported, graph, 1)
    for rows, width in ((7, 7), (2, 5), (1, 1), (1, 4), (9, 9)):
        found = drafting.call([sequence], [rows], width)
        check_draft(exported, found, [sequence], [int(drafting.past[0])])


@pytest.fixture(scope="session")
def half_verifier(tmp_path_factory: pytest.TempPathFactory) -> Verifier:
    return make_verifier(tmp_path_factory.mktemp("half"), "fp16")


def test_with_an_fp16_verifier_all_but_the_logits_is_fp16(half_verifier: Verifier, tmp_path: Path) -> None:
    exported = export(tmp_path, half_verifier, precision=None)
    assert {ref.dtype for ref in exported.lyanna.weights} == {"F16"}
    sequence = history(12, seed=1)
    drafting = Draft(exported, LYANNA_DRAFT, 1)
    for rows, width in ((7, 7), (2, 5)):
        found = drafting.call([sequence], [rows], width)
        check_draft(exported, found, [sequence], [int(drafting.past[0])], HALF_TOLERANCE)


def test_two_element_types_in_one_graph_are_refused(half_verifier: Verifier, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="in int8 cannot read the features of a verifier in float16; choose prec"):
        export(tmp_path, half_verifier, precision="int8")


def test_bf16_weights_of_a_drafter_are_its_own_bytes(tmp_path: Path) -> None:
    """The drafter's file has the verifier's file name, so the bundle gives it another."""
    exported = export(tmp_path, make_verifier(tmp_path / "verifier", "bf16"), precision=None)
    refs = [ref for ref in exported.lyanna.weights if ref.initializer.startswith("lyanna.")]
    assert {(ref.file, ref.dtype) for ref in refs} == {("weights/lyanna.model.safetensors", "BF16")}
    stored = (tmp_path / "drafter/model.safetensors").read_bytes()
    assert (tmp_path / "graphs/weights/lyanna.model.safetensors").read_bytes() == stored


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_head_of_a_draft_vocabulary_is_rows_of_the_verifiers(
    little_verifier: Verifier, tmp_path: Path, precision: str
) -> None:
    """It is the drafter's own weight, in the drafter's precision."""
    exported = export(tmp_path, little_verifier, replace(CONFIG, draft_vocab_size=23), precision=precision)
    heads = {ref.initializer: ref for ref in exported.lyanna.weights if ref.initializer.startswith("lyanna.head")}
    kinds = {"fp32": {"": (23, 32)}, "int8": {".codes": (23, 1, 32), ".scales": (23, 1)}}
    assert {name: ref.shape for name, ref in heads.items()} == {
        f"lyanna.head{part}": shape for part, shape in kinds[precision].items()
    }
    if precision == "fp32":
        (ref,) = heads.values()
        stored = (exported.bundle.path / ref.file).read_bytes()[ref.offset : ref.offset + ref.length]
        assert stored == exported.head.numpy()[exported.vocabulary].tobytes()


def test_a_random_drafter_runs(little_verifier: Verifier, tmp_path: Path) -> None:
    """The table changes logits, and the bundle has only the pool of random weights."""
    shutil.copytree(little_verifier.folder, tmp_path / "graphs")
    options = LyannaBuild(precision="fp32", width=2, nodes=8)
    target = Target(METHOD.id, little_verifier.export, tmp_path / "graphs", options)
    lyanna = find_exporter(METHOD.id).random(target, load_config(little_verifier.checkpoint))
    own = {ref.file for ref in lyanna.weights if ref.initializer.startswith("lyanna.")}
    assert own == {"weights/lyanna.random.safetensors"}
    bundle = Bundle(tmp_path / "graphs", manifest_with_verifier(tmp_path / "graphs", little_verifier, lyanna))
    exported = Exported(random_drafter(), lyanna, torch.empty(0), torch.empty(0), bundle)
    found = Draft(exported, LYANNA_DRAFT, 1).call([history(6, seed=1)], [6], 6)
    assert np.isfinite(found[names.TREE_LOG_PROBS]).all()
    assert np.abs(exported.tables[f"{names.TOKEN_INFO}table"].astype(np.float32)).max() > 0.5


def test_sequences_of_different_pasts_and_backlogs_share_a_call(exported: Exported) -> None:
    histories = [history(14, seed=seed) for seed in (1, 2, 3)]
    drafting = Draft(exported, LYANNA_DRAFT, 3)
    for rows, width in (([6, 1, 3], 6), ([1, 4, 2], 4), ([2, 8, 5], 11)):
        found = drafting.call(histories, rows, width)
        check_draft(exported, found, histories, drafting.past.tolist())


@pytest.mark.parametrize("graph", [LYANNA_DRAFT, LYANNA_DRAFT_SINGLE])
def test_catching_up_in_two_goes_is_catching_up_in_one(exported: Exported, graph: str) -> None:
    """The second draft must not see rows of the first draft's chain."""
    sequence = history(5, seed=4)
    twice, once = Draft(exported, graph, 1), Draft(exported, graph, 1)
    twice.call([sequence], [3], 3)
    found, expected = twice.call([sequence], [2], 2), once.call([sequence], [5], 5)
    np.testing.assert_allclose(found[names.CHAIN_LOGITS], expected[names.CHAIN_LOGITS], atol=1e-5)
    for name in (names.TREE_TOKENS, names.TREE_PARENTS):
        assert np.array_equal(found[name], expected[name])
    for a, b in zip(twice.caches, once.caches, strict=True):
        np.testing.assert_allclose(a[:, :, :5], b[:, :, :5], atol=1e-5)


@pytest.mark.parametrize("drafter", ["whole", "trained"])
def test_probabilities_are_those_of_the_trained_drafter(drafter: str, request: pytest.FixtureRequest) -> None:
    """A node's probability is softmax(s (M h + RMSNorm(W2 W1 E(t)))) along its path, to fp16.

    With a draft vocabulary, M and W2 have the rows of its tokens.
    """
    exported: Exported = request.getfixturevalue(drafter)
    ids = np.arange(VOCABULARY) if exported.vocabulary is None else exported.vocabulary
    column = {token: place for place, token in enumerate(ids.tolist())}
    sequence = history(6, seed=7)
    if drafter == "trained":
        sequence.tokens[6] = int(ids[2])
    found = Draft(exported, LYANNA_DRAFT, 1).call([sequence], [6], 6)
    logits = torch.from_numpy(exported.chain_logits(sequence.features, sequence.tokens))
    tokens, parents, log_probs = (found[name][0].tolist() for name in (names.TREE_TOKENS, names.TREE_PARENTS,
                                                                       names.TREE_LOG_PROBS))  # fmt: skip
    assert tokens[0] == int(sequence.tokens[6])
    depths = [0]
    for node in range(1, len(tokens)):
        parent = parents[node]
        depths.append(depths[parent] + 1)
        scores = logits[depths[parent]] + torch.from_numpy(exported.added(tokens[parent]))
        step = (scores * CONFIG.draft_logit_scale).log_softmax(-1)
        assert log_probs[node] == pytest.approx(log_probs[parent] + step[column[tokens[node]]].item(), abs=5e-3)
    assert max(depths) > 1


def test_a_chain_may_be_shorter_than_it_was_trained_and_of_one_step(little_verifier: Verifier, tmp_path: Path) -> None:
    """A drafter of one step has no graph to resample."""
    exported = export(tmp_path, little_verifier, steps=1, nodes=3, width=4)
    assert LYANNA_RESAMPLE not in exported.bundle.manifest.all_graphs
    assert not (exported.bundle.path / f"{LYANNA_RESAMPLE}.onnx").exists()
    assert (exported.shape.steps, exported.shape.nodes) == (1, 4)
    sequence = history(4, seed=9)
    expected = exported.chain_logits(sequence.features, sequence.tokens)[:1]
    for graph in (LYANNA_DRAFT, LYANNA_DRAFT_SINGLE):
        found = Draft(exported, graph, 1).call([sequence], [4], 4)
        np.testing.assert_allclose(found[names.CHAIN_LOGITS][0], expected, atol=TOLERANCE, rtol=TOLERANCE)
        tree = exported.subtree(found[names.CHAIN_LOGITS][0], int(sequence.tokens[4]))
        same_tree(found, 0, tree.top_nodes(4))


def test_quantized_products_stay_near_fp32(little_verifier: Verifier, tmp_path: Path) -> None:
    exported = export(tmp_path, little_verifier, precision="int8")
    sequence = history(6, seed=7)
    expected = exported.chain_logits(sequence.features, sequence.tokens)
    for graph in (LYANNA_DRAFT, LYANNA_DRAFT_SINGLE):
        found = Draft(exported, graph, 1).call([sequence], [6], 6)[names.CHAIN_LOGITS][0]
        assert 1e-4 < np.abs(found - expected).max() < 0.1 * np.abs(expected).max()


def test_signatures_are_the_contract(exported: Exported) -> None:
    for record in exported.bundle.manifest.all_graphs.values():
        graph = onnx.load(exported.bundle.path / record.file, load_external_data=False).graph
        for values, specs in ((graph.input, record.inputs), (graph.output, record.outputs)):
            found = [(v.name, tuple(d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim)) for v in values]
            assert found == [(spec.name, spec.shape) for spec in specs]


def test_every_step_of_the_lowered_chain_writes_to_the_bound_buffers(exported: Exported) -> None:
    """With inner values, each step would copy the whole cache, with the same results but more time."""
    record = exported.bundle.manifest.all_graphs[LYANNA_DRAFT_SINGLE]
    graph = onnx.load(exported.bundle.path / record.file, load_external_data=False).graph
    attentions = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
    outputs = [value.name for value in graph.output]
    assert len(attentions) == exported.shape.steps
    for node in attentions:
        assert list(node.input[3:5]) == [names.key_cache(0), names.value_cache(0)]
        assert all(name in outputs for name in node.output[1:3])
    written = [spec for spec in record.outputs if spec.in_place_of]
    assert len(written) == 2 * exported.shape.steps
    assert {spec.name.split(".present")[0] for spec in written} == {names.key_cache(0), names.value_cache(0)}
    assert all(spec.name.startswith(f"{spec.in_place_of}.present") for spec in written)


def test_embedding_and_head_are_the_verifiers_bytes(whole: Exported, little_verifier: Verifier) -> None:
    """The drafter's own file has no tensor of vocabulary size."""
    placed = {ref.file for ref in little_verifier.export.weights}
    own = {ref.initializer for ref in whole.lyanna.weights if ref.file not in placed}
    assert own
    assert all(name.startswith("lyanna.") for name in own)
    assert not any(VOCABULARY in ref.shape for ref in whole.lyanna.weights if ref.initializer in own)


# --- Algorithm 2 -----------------------------------------------------------------------------------------------------


def check_resample(run, logits: np.ndarray, shape: LyannaShape, tables: dict[str, np.ndarray]) -> None:
    """Compares every first step, in one batch and one at a time, with the reference on the same tables.

    Each sequence of a batch has another draft logit scale.
    """
    steps, vocabulary = list(range(1, shape.steps)), tables.get(names.DRAFT_VOCABULARY)
    for firsts in (steps, steps[::-1], *([step] for step in steps)):
        batch = logits[: len(firsts)]
        tokens = np.arange(7, 7 + len(firsts)) * 3 % VOCABULARY
        scales = np.linspace(0.5, 1.5, len(firsts), dtype=np.float32)
        found = run(batch, np.array(firsts), tokens, scales)
        for b, (first, token) in enumerate(zip(firsts, tokens.tolist(), strict=True)):
            full = resample(
                batch[b], first, token, lambda t: lookup(tables, t), shape.width, 0, float(scales[b]), vocabulary
            )
            tree, count = full.top_nodes(shape.resample_nodes), int(found[names.TREE_COUNT][b])
            same_tree(found, b, tree, count)
            assert (found[names.TREE_LOG_PROBS][b, count:] == np.float32(IMPOSSIBLE)).all()


def test_resampling_is_algorithm_2_for_every_first_step(exported: Exported) -> None:
    shape = exported.shape
    engine = open_calls(exported.bundle, LYANNA_RESAMPLE, threads=1)
    for name, table in exported.tables.items():
        engine.bind(name, table)

    def run(logits: np.ndarray, firsts: np.ndarray, tokens: np.ndarray, scales: np.ndarray) -> dict[str, np.ndarray]:
        call = engine.prepare(B=len(firsts))
        call.inputs[names.CHAIN_LOGITS][:] = logits
        call.inputs[names.FIRST_STEP][:] = firsts
        call.inputs[names.TOKENS][:] = tokens
        call.inputs[names.DRAFT_LOGIT_SCALE][:] = scales
        call.run()
        return {name: array.copy() for name, array in call.outputs.items()}

    size = (3, shape.steps, shape.draft_vocabulary)
    logits = np.random.default_rng(3).normal(scale=2, size=size).astype(np.float32)
    check_resample(run, logits, shape, exported.tables)


@pytest.mark.parametrize("drafted", [VOCABULARY, 20], ids=["whole", "pruned"])
@pytest.mark.parametrize("form", ["fp16", "int8", "fp8", "lowrank"])
def test_every_form_of_token_information_is_read_in_the_graph(form: str, drafted: int) -> None:
    options = LyannaBuild(token_info=form, width=3, nodes=9, draft_vocabulary=drafted)
    shape = lyanna_shape(replace(CONFIG, steps=3), options)
    assert shape.draft_vocabulary == drafted
    embedding = torch.randn(VOCABULARY, 32, generator=torch.Generator().manual_seed(1)).numpy()
    vocabulary = DraftVocabulary.of(TokenData(counts()), drafted)
    made = make_tables(random_drafter().token_info, iter([embedding]), vocabulary, shape)
    tables = arrays((*made, *vocabulary.tables()))
    graph = find_exporter(METHOD.id).trace_resample(shape)
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(ir.to_proto(graph).SerializeToString(), settings)
    outputs = [spec.name for spec in resample_outputs(shape)]

    def run(logits: np.ndarray, firsts: np.ndarray, tokens: np.ndarray, scales: np.ndarray) -> dict[str, np.ndarray]:
        feeds = {
            names.CHAIN_LOGITS: logits, names.FIRST_STEP: firsts, names.TOKENS: tokens,
            **sampling_values(len(firsts), shape.steps - 1, 0.0), names.DRAFT_LOGIT_SCALE: scales, **tables,
        }  # fmt: skip
        return dict(zip(outputs, session.run(outputs, feeds), strict=True))

    logits = np.random.default_rng(3).normal(size=(2, 3, drafted)).astype(np.float32)
    check_resample(run, logits, shape, tables)


def test_resampled_trees_have_half_of_the_nodes_of_a_draft_by_default() -> None:
    for nodes, asked, resampled in ((8, None, 4), (7, None, 4), (1, None, 1), (8, 3, 3), (8, 100, 6), (30, None, 5)):
        shape = lyanna_shape(CONFIG, LyannaBuild(width=2, nodes=nodes, resample_nodes=asked))
        assert shape.resample_nodes - 1 == resampled


# --- what does not fit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("config", {"steps": 2}, "trained for 2 steps, not 3"),
        ("config", {"hidden_size": 48}, "trained for hidden states of width 48, the verifier has 32"),
        ("config", {"vocab_size": 62}, "trained for a vocabulary of 62, the verifier has 61"),
        ("config", {"heads": 3}, "3 heads of 16"),
        ("config", {"depth": 2}, "unknown key depth"),
        ("verifier", {"weights": ["0" * 64]}, "trained for another verifier: expected weights 00000000"),
        ("verifier", {"tokenizer": "0" * 64}, "trained with another tokenizer.json"),
    ],
)
def test_a_drafter_that_does_not_belong_to_its_verifier_is_refused(
    little_verifier: Verifier, tmp_path: Path, part: str, change: dict[str, object], message: str
) -> None:
    file = write_drafter(tmp_path / "drafter", little_verifier.checkpoint) / "config.json"
    values = json.loads(file.read_text())
    values[part].update(change)
    file.write_text(json.dumps(values))
    opened, identity = DrafterCheckpoint.open(file.parent), Identity.of(little_verifier.checkpoint)
    target = Target(METHOD.id, little_verifier.export, tmp_path, LyannaBuild(steps=3))
    with pytest.raises(CheckpointError) as error:
        find_exporter(METHOD.id).trained(target, opened, identity)
    assert message in str(error.value)
