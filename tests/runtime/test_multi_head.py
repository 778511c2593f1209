"""Heads on the trunk end to end over tiny real graphs: training's logits, and texts that are the verifier's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from redraft import names
from redraft.assembly.bundle import build_bundle
from redraft.assembly.models import Model
from redraft.config import BuildConfig, DrafterBuild, Precision
from redraft.engines import open_bundle
from redraft.engines.device import Device
from redraft.engines.host_device import array_of
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.drafters.checkpoint import Identity, save_drafter
from redraft.export.drafters.multi_head import MultiHeadConfig, MultiHeadDrafter
from redraft.runtime import Generation, Runtime, SamplingParams, SpeculationParams
from redraft.runtime.drafters.candidate_noise import ChainProposal
from redraft.runtime.sequence import Sequence
from redraft.runtime.verifier import Verifier
from redraft.train.batches import Batch
from redraft.train.objectives.multi_head import MultiHeadObjective
from redraft.types import Budget, Tree
from tests.cli.conftest import write_tokenizer
from tests.engines.fake_onnxruntime import onnxruntime_cuda
from tests.export.drafters.tiny import HIDDEN, counts, write_verifier
from tests.export.drafters.trunk_heads import random_heads

from .devices import cpu_device, open_over, tensorrt_device
from .fakes import fix_costs
from .lyanna_bundle import CONTEXT, VOCABULARY
from .test_rejection_drafts import FAR, chi_square

HEADS, NODES = 3, 11
CONFIG = MultiHeadConfig(
    hidden_size=HIDDEN, vocab_size=VOCABULARY, intermediate_size=48, heads=4, kv_heads=2, head_dim=8,
    draft_heads=HEADS, draft_logit_scale=1.25, hidden_states=("0",),
    rank_accuracies=((0.6, 0.3, 0.2), (0.5, 0.4, 0.1), (0.4, 0.2, 0.1)),
)  # fmt: skip
HEAD, FEW, OTHER = "multi_head", "few", "other"
"""The drafter, one of few tokens, and one of another method."""
PROMPTS = [[3, 4, 5, 6], [9, 3] * 20, [4] * 40, [7], list(range(13)) * 6]
"""The last one is longer than a call that catches up."""
WHOLE = Budget(NODES, HEADS, NODES)


def write_bundle(folder: Path, precision: Precision) -> Path:
    """Build `folder`/engines of a random Llama, its heads, and drafters at random."""
    checkpoint = write_verifier(folder / "verifier", vocab_size=VOCABULARY, max_position_embeddings=CONTEXT + 64)
    write_tokenizer(folder / "verifier")
    identity = Identity.of(Checkpoint.open(checkpoint.path))
    save_drafter(folder / "heads", HEAD, CONFIG, identity, heads(folder), counts(VOCABULARY), {})
    drafters = (
        DrafterBuild(HEAD, str(folder / "heads"), HEAD, {"precision": precision, "nodes": NODES}),
        DrafterBuild(FEW, "random", HEAD, {"precision": "fp32", "steps": 2, "draft_vocabulary": 9}),
        DrafterBuild(OTHER, "random", "mtp", {"precision": "fp32"}),
    )
    model = Model("little", str(checkpoint.path), checkpoint.path)
    config = BuildConfig(precision=precision, drafters=drafters)
    build_bundle(model, config, folder / "engines", {}, False, lambda message: None)
    return folder


def heads(folder: Path) -> MultiHeadDrafter:
    """Random heads with the norm of the verifier in a folder, as they are stored."""
    module = random_heads(CONFIG)
    module.norm.weight.copy_(LlamaForCausalLM.from_pretrained(folder / "verifier").model.norm.weight)
    return module.bfloat16().float()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("heads"), "fp32")


@pytest.fixture(scope="module", autouse=True)
def unmeasured() -> Iterator[None]:
    """Calls cost the same on every machine."""
    with pytest.MonkeyPatch.context() as patch:
        fix_costs(patch)
        yield


@pytest.fixture(scope="module")
def one(folder: Path, unmeasured: None) -> Iterator[Runtime]:
    with Runtime.open(folder / "engines", threads=1, verify=False) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def three(folder: Path, unmeasured: None) -> Iterator[Runtime]:
    with Runtime.open(folder / "engines", threads=1, max_num_seqs=3, verify=False) as runtime:
        yield runtime


def params(temperature: float, seed: int = 3) -> SamplingParams:
    return SamplingParams(max_tokens=40, temperature=temperature, seed=seed, ignore_eos=True)


def texts(generations: list[Generation]) -> list[list[int]]:
    return [list(generation.token_ids) for generation in generations]


@pytest.fixture(scope="module")
def plain(one: Runtime) -> dict[float, list[list[int]]]:
    """The verifier's own texts after PROMPTS, by temperature."""
    return {t: texts(one.generate(PROMPTS, params(t), "none")) for t in (0.0, 1.0)}


@pytest.mark.parametrize("budget", [WHOLE, Budget(4, 2, 2), None], ids=["whole", "small", "adaptive"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("slots", ["one", "three"])
@pytest.mark.parametrize("drafter", [HEAD, FEW, f"ngram+{HEAD}"])
def test_drafted_text_is_the_verifiers_own(
    plain: dict[float, list[list[int]]], drafter: str, slots: str, temperature: float, budget: Budget | None,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """Also with a seed. Sequences begin, end and change slots. Drafts are accepted."""
    runtime: Runtime = request.getfixturevalue(slots)
    found = runtime.generate(PROMPTS, params(temperature), SpeculationParams(drafter, budget=budget))
    assert texts(found) == plain[temperature]
    drafted, accepted = (
        sum(getattr(generation.metrics, name) for generation in found)
        for name in ("num_draft_tokens", "num_accepted_draft_tokens")
    )
    assert drafted > 0
    assert budget is None or 0 < accepted < drafted


@pytest.mark.parametrize("slots", ["one", "three"])
def test_drafts_have_trainings_logits(
    slots: str, folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """In every slot and step, whatever was rejected before: of the whole text so far, computed again."""
    runtime: Runtime = request.getfixturevalue(slots)
    drafter, seen = runtime._speculation.drafter(HEAD), list[tuple[list[int], np.ndarray, Tree]]()
    draft = drafter.draft

    def observed(batch: list[Sequence], budgets: list[Budget]) -> list[Tree]:
        trees = draft(batch, budgets)
        logits = array_of(drafter._state[names.CHAIN_LOGITS])
        for slot, (seq, tree) in enumerate(zip(batch, trees, strict=True)):
            if len(tree) > 1:
                seen.append((list(seq.tokens), logits[slot].copy(), tree))
        return trees

    monkeypatch.setattr(drafter, "draft", observed)
    found = runtime.generate(PROMPTS, params(0.0), SpeculationParams(HEAD, budget=WHOLE))
    kept = {tokens for one in found for tokens, steps in enumerate(one.metrics.acceptance_histogram) if steps}
    assert kept >= set(range(HEADS))  # a rejection at every depth
    model = LlamaForCausalLM.from_pretrained(folder / "verifier")
    objective = MultiHeadObjective(model, CONFIG)
    objective.drafter.load_state_dict(heads(folder).state_dict())
    assert len(seen) > 40
    with torch.no_grad():
        for tokens, logits, tree in seen:
            text = torch.tensor([tokens])
            batch = Batch(text, ("",), torch.tensor([[len(tokens) - 2]]), torch.tensor([len(tokens)]))
            wanted = [drafts[0, 0].numpy() for drafts in objective.drafts(batch, objective.states(batch))]
            np.testing.assert_allclose(logits, np.stack(wanted), atol=1e-4)
            assert tree.tokens[0] == tokens[-1]
            assert wanted[0].argmax() in tree.tokens[tree.parents == 0]


def test_requests_of_other_methods_share_its_batch(three: Runtime, plain: dict[float, list[list[int]]]) -> None:
    """A call computes all slots, but leaves those of other drafters as they are."""
    ways = [
        SpeculationParams(HEAD, budget=WHOLE), SpeculationParams(OTHER, budget=Budget(4, 4, 1)), "none", FEW,
        SpeculationParams(HEAD, budget=WHOLE),
    ]  # fmt: skip
    for temperature in (0.0, 1.0):
        assert texts(three.generate(PROMPTS, params(temperature), ways)) == plain[temperature]


@pytest.mark.parametrize("budget", [WHOLE, Budget(5, 2, 3)], ids=["whole", "cut"])
def test_texts_of_rejection_have_the_verifiers_distribution(one: Runtime, budget: Budget) -> None:
    """Trees of draws branch: cousins share draws, which only one path reads."""
    assert chi_square(one, SpeculationParams(HEAD, budget=budget), "rejection") < FAR


def test_heads_that_claim_another_distribution_are_found(one: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ChainProposal.logits
    monkeypatch.setattr(ChainProposal, "logits", lambda self, depth, token: -right(self, depth, token))
    assert chi_square(one, SpeculationParams(HEAD, budget=WHOLE), "rejection") > FAR


def test_a_seed_gives_the_same_tokens_again(one: Runtime) -> None:
    drawn = replace(params(1.0), acceptance="rejection")
    first, second = (texts(one.generate(PROMPTS, drawn, SpeculationParams(HEAD, budget=WHOLE))) for _ in range(2))
    assert first == second
    assert first != texts(one.generate(PROMPTS, replace(drawn, seed=4), SpeculationParams(HEAD, budget=WHOLE)))


@pytest.mark.parametrize("slots", [1, 3])
def test_texts_in_int8_are_the_verifiers_own(tmp_path_factory: pytest.TempPathFactory, slots: int) -> None:
    """Verifier and heads."""
    engines = write_bundle(tmp_path_factory.mktemp("int8"), "int8") / "engines"
    with Runtime.open(engines, threads=1, max_num_seqs=slots, verify=False) as runtime:
        for temperature in (0.0, 1.0):
            plain = texts(runtime.generate(PROMPTS, params(temperature), "none"))
            found = runtime.generate(PROMPTS, params(temperature), SpeculationParams(HEAD, budget=WHOLE))
            assert texts(found) == plain
            assert sum(generation.metrics.num_accepted_draft_tokens for generation in found) > 0


@pytest.fixture(params=["cpu", "tensorrt", "onnxruntime on a GPU"])
def opened(
    request: pytest.FixtureRequest, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Runtime]:
    """A function that opens the bundle on a device, for a number of slots."""
    monkeypatch.setattr(Verifier, "warm", lambda self: None)  # so that requests prepare shapes while they run
    bundle = open_bundle(folder / "engines", verify=False)
    make: dict[str, Callable[[], Device]] = {
        "cpu": lambda: cpu_device(bundle),
        "tensorrt": lambda: tensorrt_device(bundle, tmp_path).device,
        "onnxruntime on a GPU": lambda: onnxruntime_cuda(bundle, monkeypatch),
    }
    return lambda max_num_seqs: open_over(make[request.param](), folder / "engines", max_num_seqs)


@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_texts_and_trees_on_a_device_are_the_hosts(
    opened: Callable[..., Runtime], plain: dict[float, list[list[int]]], one: Runtime, max_num_seqs: int
) -> None:
    """Also of budgets that are less deep or wide than the tree."""
    with opened(max_num_seqs) as runtime:
        for budget in (WHOLE, Budget(5, 2, 3), None):
            how = SpeculationParams(HEAD, budget=budget)
            for temperature in (0.0, 1.0):
                found = runtime.generate(PROMPTS, params(temperature), how)
                assert texts(found) == plain[temperature], (temperature, budget)
                if budget is not None:
                    host = one.generate(PROMPTS, params(temperature), how)
                    steps = [[g.metrics.num_spec_steps for g in of_device] for of_device in (found, host)]
                    assert steps[0] == steps[1], (temperature, budget)
