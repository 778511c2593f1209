"""Draft and resample graphs in ONNX Runtime against training's computation and the references of Algorithms 1 and 2."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from redraft import names
from redraft.engines import open_calls
from redraft.errors import CheckpointError, UsageError
from redraft.export.checkpoint.model_config import load_config
from redraft.export.drafters import find_exporter
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity
from redraft.export.drafters.level_tree import IMPOSSIBLE
from redraft.export.drafters.lyanna import lyanna_shape
from redraft.export.drafters.writing import Target
from redraft.methods.chains import DRAWN_LOG_PROB
from redraft.methods.lyanna import METHOD, LyannaBuild
from redraft.methods.lyanna_token_info import lookup
from tests.engines.drafters import LYANNA_DRAFT_SINGLE, LYANNA_RESAMPLE

from . import draft_calls
from .draft_calls import GREEDY, NOISY, SCALED, Arrays, Draft, Sampling, check_drafts, in_each_form, inputs_of, program
from .tiny import (
    BUILD,
    CONFIG,
    VOCABULARY,
    Exported,
    Verifier,
    export,
    make_verifier,
    random_drafter,
    write_drafter,
)
from .tiny import (
    exported as exported_in,
)
from .token_tree import Tree

TOLERANCE, HALF_TOLERANCE = 1e-4, 2e-2
RESAMPLE_BATCH = names.batch(LYANNA_RESAMPLE)
TRAINED = replace(CONFIG, draft_vocab_size=23, chain_projection=True, qkv_bias=True)
FEW = replace(CONFIG, steps=4, first_token=False, draft_logit_scale=1.0, logit_scale=1.0, head_dim=8)
EXPORTS = {
    "whole": (CONFIG, {}),
    "pruned": (FEW, {"token_info": "fp8", "draft_vocabulary": 20, "width": 3, "nodes": 100}),
    "trained": (TRAINED, {"token_info": "lowrank", "resample_nodes": 100, "head_rank": 7}),
    "coded": (TRAINED, {"token_info": "int8", "precision": "int8", "head_rank": 7}),
}
"""The whole vocabulary, three steps and a tree cut from eleven nodes to nine; four wider steps without first token and
scales, built for the twenty most frequent tokens; a draft vocabulary of 23 tokens that was trained, a projected chain,
biases, resampled trees as large as possible and a factorized head; the same in 8 bits. Each has another form of token
information."""
Exports = Callable[[str], Exported]


@pytest.fixture(scope="module")
def exports(little_verifier: Verifier, tmp_path_factory: pytest.TempPathFactory) -> Exports:
    """Exports a drafter of EXPORTS once."""

    @cache
    def get(name: str) -> Exported:
        config, options = EXPORTS[name]
        return export(tmp_path_factory.mktemp(name), little_verifier, config, **options)

    return get


@pytest.fixture(params=["whole", "pruned", "trained"])
def exported(request: pytest.FixtureRequest, exports: Exports) -> Exported:
    return exports(request.param)


def graph_of(exported: Exported) -> draft_calls.Exported:
    return draft_calls.Exported(exported.bundle.path, METHOD, exported.lyanna, exported.tables, METHOD.id)


def noisy(exported: Exported, logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Logits [S, H] of the positions after a root, with their noise."""
    vocabulary, unscaled = graph_of(exported).vocabulary, replace(sampling, scale=1.0)
    return np.stack([unscaled.scaled(row, depth, vocabulary).numpy() for depth, row in enumerate(logits)])


def tree_of(exported: Exported, logits: np.ndarray, root: int, sampling: Sampling, nodes: int) -> Tree:
    """The tree of Algorithm 1 over logits [S, H] without noise."""
    return exported.subtree(noisy(exported, logits, sampling), root, sampling.scale, sampling.drawn).top_nodes(nodes)


@in_each_form
def test_a_draft_is_algorithm_1_over_trainings_chain(
    exported: Exported, form: str, samplings: tuple[Sampling, ...]
) -> None:
    """Later drafts must not see rows of an earlier draft's chain."""

    def expected(features: torch.Tensor, tokens: list[int], sampling: Sampling) -> Draft:
        chain = exported.chain_logits(features, torch.tensor(tokens))
        tree = tree_of(exported, chain, tokens[-1], sampling, exported.shape.nodes)
        return Draft(tree.tokens, tree.parents, tree.log_probs, chain)

    check_drafts(graph_of(exported), program(graph_of(exported), form, len(samplings)), samplings, expected)


def drafted(exported: Exported, form: str, last: int = 5) -> tuple[np.ndarray, Arrays]:
    """Training's chain logits [N, H] after a text that ends with this token, and the outputs of the graph."""
    made, generator = graph_of(exported), torch.Generator().manual_seed(7)
    tokens = [*torch.randint(0, VOCABULARY, (6,), generator=generator).tolist(), last]
    features = torch.randn(6, exported.shape.hidden, generator=generator)
    sampling = Sampling(exported.shape.draft_logit_scale)
    found = program(made, form, 1)(inputs_of(made, [features], [tokens], [0], (6,), [sampling]))
    return exported.chain_logits(features, torch.tensor(tokens)), found


def same_tree(found: Arrays, slot: int, expected: Tree, count: int | None = None) -> None:
    assert count in (None, len(expected.tokens))
    count = len(expected.tokens)
    assert found[names.TREE_TOKENS][slot, :count].tolist() == expected.tokens
    assert found[names.TREE_PARENTS][slot, :count].tolist() == expected.parents
    np.testing.assert_allclose(found[names.TREE_LOG_PROBS][slot, :count], expected.log_probs, atol=TOLERANCE)


def test_with_an_fp16_verifier_all_but_the_logits_is_fp16(tmp_path: Path) -> None:
    exported = export(tmp_path, make_verifier(tmp_path / "verifier", "float16"), precision=None)
    assert {ref.dtype for ref in exported.lyanna.weights} == {"F16"}
    expected, found = drafted(exported, "portable")
    logits, shape = found[names.CHAIN_LOGITS][0], exported.shape
    np.testing.assert_allclose(logits, expected, atol=HALF_TOLERANCE, rtol=HALF_TOLERANCE)
    same_tree(found, 0, tree_of(exported, logits, 5, Sampling(shape.draft_logit_scale), shape.nodes))


def test_two_element_types_in_one_graph_are_refused(tmp_path: Path) -> None:
    target = Target(METHOD.id, make_verifier(tmp_path, "float16").export, tmp_path, LyannaBuild(precision="int8"))
    with pytest.raises(UsageError, match="in int8 cannot read the features of a verifier in float16; choose prec"):
        _ = target.precision


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("trained", {"": (23, 32), ".left": (23, 7), ".right": (7, 32)}),
        (
            "coded",
            {
                **{".rows": (23, 32), ".scales": (23, 1), ".left.codes": (23, 1, 32), ".left.scales": (23, 1)},
                **{".right.codes": (7, 1, 32), ".right.scales": (7, 1)},
            },
        ),
    ],
)
def test_the_head_of_a_draft_vocabulary_is_rows_of_the_verifiers(
    exports: Exports, name: str, expected: dict[str, tuple[int, ...]]
) -> None:
    """It is the drafter's own weight, in the drafter's precision, and so are its factors."""
    exported = exports(name)
    heads = {ref.initializer: ref for ref in exported.lyanna.weights if ref.initializer.startswith("lyanna.head")}
    assert {key: ref.shape for key, ref in heads.items()} == {f"lyanna.head{part}": s for part, s in expected.items()}
    if ref := heads.get("lyanna.head"):
        stored = (exported.bundle.path / ref.file).read_bytes()[ref.offset : ref.offset + ref.length]
        assert stored == exported.head.numpy()[exported.vocabulary].tobytes()


def test_embedding_and_head_are_the_verifiers_bytes(exports: Exports, little_verifier: Verifier) -> None:
    """The drafter's own file has no tensor of vocabulary size."""
    placed, weights = {ref.file for ref in little_verifier.export.weights}, exports("whole").lyanna.weights
    own = {ref.initializer: ref for ref in weights if ref.file not in placed}
    assert own
    assert all(name.startswith("lyanna.") and VOCABULARY not in ref.shape for name, ref in own.items())


def test_quantized_products_stay_near_fp32(exports: Exports) -> None:
    for form in ("portable", "single"):
        expected, found = drafted(exports("coded"), form)
        assert 1e-4 < np.abs(found[names.CHAIN_LOGITS][0] - expected).max() < 0.1 * np.abs(expected).max()


def test_a_random_drafter_runs(little_verifier: Verifier, tmp_path: Path) -> None:
    """The table changes logits, and the bundle has only the pool of random weights."""
    out = Path(shutil.copytree(little_verifier.folder, tmp_path / "graphs"))
    target = Target(METHOD.id, little_verifier.export, out, LyannaBuild(**BUILD | {"steps": 1}))
    lyanna = find_exporter(METHOD.id).random(target, load_config(little_verifier.checkpoint))
    own = {ref.file for ref in lyanna.weights if ref.initializer.startswith("lyanna.")}
    assert own == {"weights/lyanna.random.safetensors"}
    exported = exported_in(out, little_verifier, lyanna, random_drafter())
    assert np.isfinite(drafted(exported, "portable")[1][names.TREE_LOG_PROBS]).all()
    assert np.abs(exported.tables[f"{names.TOKEN_INFO}table"].astype(np.float32)).max() > 0.5


@pytest.mark.parametrize("drafter", ["whole", "trained"])
def test_probabilities_are_those_of_the_trained_drafter(exports: Exports, drafter: str) -> None:
    """A node's probability is softmax(s (M h + RMSNorm(W2 W1 E(t)))) along its path, to fp16.

    With a draft vocabulary, M and W2 have the rows of its tokens.
    """
    exported = exports(drafter)
    ids = graph_of(exported).vocabulary.tolist()
    logits, found = drafted(exported, "portable", ids[2])
    tokens, parents, log_probs = (
        found[name][0].tolist() for name in (names.TREE_TOKENS, names.TREE_PARENTS, names.TREE_LOG_PROBS)
    )
    depths = [0]
    for node in range(1, len(tokens)):
        parent = parents[node]
        depths.append(depths[parent] + 1)
        scores = torch.from_numpy(logits[depths[parent]] + exported.added(tokens[parent]))
        step = (scores * CONFIG.draft_logit_scale).log_softmax(-1)
        assert log_probs[node] == pytest.approx(log_probs[parent] + step[ids.index(tokens[node])].item(), abs=5e-3)
    assert max(depths) > 1


def test_a_chain_may_be_shorter_than_it_was_trained_and_of_one_step(little_verifier: Verifier, tmp_path: Path) -> None:
    """A drafter of one step has no graph to resample."""
    exported = export(tmp_path, little_verifier, steps=1, nodes=3, width=4)
    assert LYANNA_RESAMPLE not in exported.bundle.manifest.all_graphs
    assert not (exported.bundle.path / f"{LYANNA_RESAMPLE}.onnx").exists()
    assert (exported.shape.steps, exported.shape.nodes) == (1, 4)
    for form in ("portable", "single"):
        expected, found = drafted(exported, form)
        np.testing.assert_allclose(found[names.CHAIN_LOGITS][0], expected[:1], atol=TOLERANCE, rtol=TOLERANCE)
        same_tree(found, 0, tree_of(exported, expected[:1], 5, Sampling(exported.shape.draft_logit_scale), 4))


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


# --- Algorithm 2 -----------------------------------------------------------------------------------------------------


def chain_of(exported: Exported, batch: int) -> np.ndarray:
    size = (batch, exported.shape.steps, exported.shape.draft_vocabulary)
    return np.random.default_rng(3).normal(scale=2, size=size).astype(np.float32)


def resampled(
    exported: Exported, graph: str, logits: np.ndarray, firsts: Sequence[int], roots: Sequence[int],
    samplings: Sequence[Sampling],
) -> Arrays:  # fmt: skip
    """Outputs of the graph for chains [B, N, H] whose steps from `firsts` on are left, and for these roots."""
    engine, steps = open_calls(exported.bundle, graph, threads=1), exported.shape.steps - 1
    for name, table in exported.tables.items():
        engine.bind(name, table)
    call = engine.prepare(B=len(roots))
    values = {
        names.CHAIN_LOGITS: logits, names.FIRST_STEP: firsts, names.TOKENS: roots,
        **draft_calls.sampling_inputs(samplings, steps),
    }  # fmt: skip
    for name, value in values.items():
        call.inputs[name][...] = value
    call.run()
    return {name: array.copy() for name, array in call.outputs.items()}


@pytest.mark.parametrize("name", EXPORTS)
@pytest.mark.parametrize("graph", [LYANNA_RESAMPLE, RESAMPLE_BATCH])
def test_resampling_is_algorithm_2_for_every_first_step(exports: Exports, name: str, graph: str) -> None:
    """Sequences of other steps, scales and noise in one call, then one at a time.

    The first noise belongs to the first step that is left, however many steps are used.
    """
    exported = exports(name)
    steps, samplings = list(range(1, exported.shape.steps)), (NOISY, SCALED, GREEDY)
    for firsts in (steps, steps[::-1], *([step] for step in steps)):
        logits, roots = chain_of(exported, len(firsts)), [(7 + slot) * 3 for slot in range(len(firsts))]
        found = resampled(exported, graph, logits, firsts, roots, samplings[: len(firsts)])
        for slot, (first, root) in enumerate(zip(firsts, roots, strict=True)):
            nodes, count = exported.shape.resample_nodes, int(found[names.TREE_COUNT][slot])
            same_tree(found, slot, tree_of(exported, logits[slot, first:], root, samplings[slot], nodes), count)
            assert (found[names.TREE_LOG_PROBS][slot, count:] == np.float32(IMPOSSIBLE)).all()


def test_without_noise_the_cpus_graph_is_the_portable_one_to_the_bit(exported: Exported) -> None:
    logits, samplings = chain_of(exported, 3), [replace(NOISY, temperature=0.0), SCALED, GREEDY]
    found, portable = (
        resampled(exported, graph, logits, [1, 2, 1], [3, 11, 8], samplings)
        for graph in (RESAMPLE_BATCH, LYANNA_RESAMPLE)
    )
    for name, values in portable.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


DRAWS = 4000


def test_drawn_candidates_are_draws_without_replacement_and_their_values_choose_no_node(exports: Exports) -> None:
    """The root's first child is drawn from q, its second from q without the first, whatever the first was."""
    exported, root, temperature = exports("pruned"), 5, 0.8
    logits = np.repeat(chain_of(exported, 1), DRAWS, axis=0)
    samplings = [Sampling(1 / temperature, temperature, seed, drawn=True) for seed in range(DRAWS)]
    found = resampled(exported, RESAMPLE_BATCH, logits, [1] * DRAWS, [root] * DRAWS, samplings)
    scores = (logits[0, 1] + lookup(exported.tables, root)) / temperature
    q = np.exp(scores - scores.max(), dtype=np.float64)
    q /= q.sum()
    pairs = np.outer(q, q) / (1 - q[:, None])
    np.fill_diagonal(pairs, 0)
    parents, log_probs = found[names.TREE_PARENTS], found[names.TREE_LOG_PROBS]
    assert (parents == parents[0]).all()
    assert (log_probs == log_probs[0]).all()
    first, second = np.flatnonzero(parents[0] == 0)[:2]
    assert log_probs[0, [first, second]].tolist() == [DRAWN_LOG_PROB, 2 * DRAWN_LOG_PROB]
    columns = np.searchsorted(graph_of(exported).vocabulary, found[names.TREE_TOKENS])
    counts = np.zeros_like(pairs)
    np.add.at(counts, (columns[:, first], columns[:, second]), 1)
    for found_counts, expected in ((counts.sum(1), q), (counts.ravel(), pairs.ravel())):
        assert deviation(found_counts, expected * DRAWS) < 4.5


def deviation(counts: np.ndarray, expected: np.ndarray) -> float:
    """Pearson's statistic in standard deviations above its mean. Rare cells are one."""
    rare = expected < 5
    counts, expected = (np.append(values[~rare], values[rare].sum()) for values in (counts, expected))
    return float((((counts - expected) ** 2 / expected).sum() - (len(counts) - 1)) / np.sqrt(2 * (len(counts) - 1)))


def test_resampled_trees_have_half_of_the_nodes_of_a_draft_by_default() -> None:
    for nodes, asked, most in ((8, None, 4), (7, None, 4), (1, None, 1), (8, 3, 3), (8, 100, 6), (30, None, 5)):
        shape = lyanna_shape(CONFIG, LyannaBuild(width=2, nodes=nodes, resample_nodes=asked))
        assert shape.resample_nodes - 1 == most


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
