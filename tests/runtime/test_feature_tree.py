"""Drafters that predict features, end to end over tiny real graphs: texts are the verifier's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from redraft.assembly.bundle import build_bundle
from redraft.assembly.models import Model
from redraft.config import BuildConfig, DrafterBuild
from redraft.engines import open_bundle
from redraft.engines.device import Device
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.drafters.checkpoint import Identity, save_drafter
from redraft.export.drafters.feature_drafter import FeatureConfig
from redraft.methods import ROWS, find_method
from redraft.runtime import Generation, Runtime, SamplingParams, SpeculationParams
from redraft.runtime.drafters.candidate_noise import ChainProposal
from redraft.runtime.sequence import Sequence
from redraft.runtime.verifier import Verifier
from redraft.types import Budget, Tree
from tests.cli.conftest import write_tokenizer
from tests.engines.fake_onnxruntime import onnxruntime_cuda
from tests.export.drafters.test_feature_graphs import SIZES, random_module
from tests.export.drafters.tiny import token_data, write_verifier

from .devices import cpu_device, open_over, tensorrt_device
from .fakes import fix_costs
from .lyanna_bundle import CONTEXT, VOCABULARY
from .test_rejection_drafts import FAR, chi_square

STEPS = 4
METHODS = tuple(name for name, row in ROWS.items() if row.family == "feature_tree")
CHAIN = "chain"
"""A drafter of chains."""
DRAFTERS = (*METHODS, CHAIN)
PROMPTS = [[3, 4, 5, 6], [9, 3] * 20, [4] * 40, [7]]
SHARP = 0.3
"""Deviation of weights for which a distribution at a wrong node is far from the right one."""
TREES = Budget(8, STEPS, 3)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A verifier with a drafter of each method, and one with initial weights that drafts chains of few tokens."""
    folder = tmp_path_factory.mktemp("features")
    checkpoint = write_verifier(folder / "verifier", vocab_size=VOCABULARY, max_position_embeddings=CONTEXT)
    write_tokenizer(folder / "verifier")
    checkpoint = Checkpoint.open(checkpoint.path)
    options = {"precision": "fp32", "width": 3, "steps": STEPS}
    drafters = []
    for method in METHODS:
        form = ROWS[method].form
        states = find_method(method).hidden_states
        config = FeatureConfig(**{**SIZES, "vocab_size": VOCABULARY, "logit_scale": 1.0}, hidden_states=states, **form)
        data = token_data(config)
        save_drafter(
            folder / method,
            method,
            config,
            Identity.of(checkpoint),
            random_module(config, SHARP),
            data.counts,
            {},
            None,
        )
        drafters.append(DrafterBuild(method, str(folder / method), method, options))
    drafters.append(DrafterBuild(CHAIN, "random", METHODS[-1], {**options, "width": 1, "draft_vocabulary": 9}))
    model = Model("little", str(checkpoint.path), checkpoint.path)
    build_bundle(model, BuildConfig(drafters=tuple(drafters)), folder / "engines", {}, False, lambda message: None)
    return folder / "engines"


@pytest.fixture(scope="module", autouse=True)
def unmeasured() -> Iterator[None]:
    """Calls cost the same on every machine."""
    with pytest.MonkeyPatch.context() as patch:
        fix_costs(patch)
        yield


@pytest.fixture(scope="module")
def one(bundle: Path, unmeasured: None) -> Iterator[Runtime]:
    with Runtime.open(bundle, threads=1, verify=False) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def three(bundle: Path, unmeasured: None) -> Iterator[Runtime]:
    with Runtime.open(bundle, threads=1, max_num_seqs=3, verify=False) as runtime:
        yield runtime


def params(temperature: float, seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=40, temperature=temperature, seed=seed, ignore_eos=True)


def texts(generations: list[Generation]) -> list[list[int]]:
    return [list(generation.token_ids) for generation in generations]


@pytest.fixture(scope="module")
def plain(one: Runtime) -> dict[float, list[list[int]]]:
    """The verifier's own texts after PROMPTS, by temperature."""
    return {t: texts(one.generate(PROMPTS, params(t, 3), "none")) for t in (0.0, 1.0)}


@pytest.mark.parametrize("budget", [TREES, Budget(3, 2, 2), None], ids=["trees", "small", "adaptive"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("slots", ["one", "three"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafted_text_is_the_verifiers_own(
    plain: dict[float, list[list[int]]], drafter: str, slots: str, temperature: float, budget: Budget | None,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """Sequences begin, end and change slots. Drafts are accepted."""
    runtime: Runtime = request.getfixturevalue(slots)
    how = SpeculationParams(drafter, budget=budget)
    found = runtime.generate(PROMPTS, params(temperature, 3), how)
    assert texts(found) == plain[temperature]
    drafted, accepted = (
        sum(getattr(generation.metrics, name) for generation in found)
        for name in ("num_draft_tokens", "num_accepted_draft_tokens")
    )
    assert drafted > 0
    assert budget is None or 0 < accepted < drafted


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_texts_of_rejection_have_the_verifiers_distribution(one: Runtime, drafter: str) -> None:
    assert chi_square(one, SpeculationParams(drafter, budget=TREES), "rejection") < FAR


def test_a_drafter_that_claims_another_distribution_is_found(one: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ChainProposal.logits
    monkeypatch.setattr(ChainProposal, "logits", lambda self, depth, token: -right(self, depth, token))
    assert chi_square(one, SpeculationParams(DRAFTERS[0], budget=TREES), "rejection") > FAR


def test_drawn_drafts_are_chains_next_to_trees(three: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first child of a node is drawn from the distribution that is kept."""
    drafter, seen = three._speculation.drafter(DRAFTERS[0]), set()
    draft = drafter.draft

    def observed(batch: list[Sequence], budgets: list[Budget]) -> list[Tree]:
        trees = draft(batch, budgets)
        for seq, tree in zip(batch, trees, strict=True):
            chain = tree.parents.tolist() == list(range(-1, len(tree) - 1))
            assert (tree.draws is not None) == seq.noise.drawn
            assert len(tree) <= TREES.nodes + 1
            if len(tree) > 1:
                seen.add((seq.noise.drawn, chain, len(tree) - 1))
        return trees

    monkeypatch.setattr(drafter, "draft", observed)
    sampled = [replace(params(1.0, seed), acceptance="rejection" if seed == 1 else "coupled") for seed in range(3)]
    found = three.generate([[5, 6, 7]] * 3, sampled, SpeculationParams(DRAFTERS[0], budget=TREES))
    assert all(generation.metrics.num_accepted_draft_tokens > 0 for generation in found)
    assert {chain for drawn, chain, _ in seen if drawn} == {True}
    assert max(nodes for drawn, _, nodes in seen if drawn) == STEPS
    assert (False, False, TREES.nodes) in seen


@pytest.fixture(params=["cpu", "tensorrt", "onnxruntime on a GPU"])
def opened(
    request: pytest.FixtureRequest, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Runtime]:
    """A function that opens the bundle on a device, for a number of slots."""
    monkeypatch.setattr(Verifier, "warm", lambda self: None)  # so that requests prepare shapes while they run
    opened = open_bundle(bundle, verify=False)
    make: dict[str, Callable[[], Device]] = {
        "cpu": lambda: cpu_device(opened),
        "tensorrt": lambda: tensorrt_device(opened, tmp_path).device,
        "onnxruntime on a GPU": lambda: onnxruntime_cuda(opened, monkeypatch),
    }
    return lambda max_num_seqs: open_over(make[request.param](), bundle, max_num_seqs)


@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_texts_and_trees_on_a_device_are_the_hosts(
    opened: Callable[..., Runtime], plain: dict[float, list[list[int]]], one: Runtime, max_num_seqs: int
) -> None:
    """Several hidden states, static and dynamic trees, chains, and budgets less wide than a tree's levels."""
    with opened(max_num_seqs) as runtime:
        for drafter in ("eagle", "eagle3", "griffin", CHAIN):
            for temperature in (0.0, 1.0):
                for budget in (TREES, Budget(12, STEPS, 3), None):
                    how = SpeculationParams(drafter, budget=budget)
                    found = runtime.generate(PROMPTS, params(temperature, 3), how)
                    assert texts(found) == plain[temperature], (drafter, temperature, budget)
                    if budget is not None:
                        host = one.generate(PROMPTS, params(temperature, 3), how)
                        steps = [[g.metrics.num_spec_steps for g in texts_of] for texts_of in (found, host)]
                        assert steps[0] == steps[1], (drafter, temperature, budget)


def test_draws_on_a_device_are_chains_without_a_copy(opened: Callable[..., Runtime]) -> None:
    """Their nodes are the first ones of the drafted tree, so that a cut at the end leaves the chain."""
    with opened(1) as runtime:
        asked: list[Tree] = []
        verify = runtime.verifier.verify
        runtime.verifier.verify = lambda batch, trees, made=(): asked.extend(trees) or verify(batch, trees, made)  # type: ignore[assignment, func-returns-value]
        drawn = replace(params(1.0, 3), acceptance="rejection")
        runtime.generate(PROMPTS, drawn, SpeculationParams("eagle2", budget=Budget(12, STEPS, 9)))
        sizes = [len(tree) for tree in asked]
        assert max(sizes) == STEPS + 1
        device = runtime.verifier.device
        assert any(tree.on_device for tree in asked) == device.step_graphs
