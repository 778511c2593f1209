"""Medusa end to end over tiny real graphs: heads read the right row, and texts are the verifier's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from redraft.assembly.bundle import build_bundle
from redraft.assembly.models import Model
from redraft.config import BuildConfig, DrafterBuild
from redraft.engines import open_bundle
from redraft.engines.device import Device
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.drafters.checkpoint import Identity, save_drafter
from redraft.export.drafters.medusa import MedusaConfig, MedusaHeads
from redraft.runtime import Generation, Runtime, SamplingParams, SpeculationParams, api, speculation
from redraft.runtime.cost import VerifyCosts
from redraft.runtime.drafters.candidate_noise import ChainProposal
from redraft.runtime.sequence import Sequence
from redraft.runtime.verifier import Verifier
from redraft.types import Budget, Costs, Tree
from tests.cli.conftest import write_tokenizer
from tests.engines.fake_onnxruntime import onnxruntime_cuda
from tests.export.drafters.tiny import HIDDEN, counts, write_verifier

from .devices import cpu_device, open_over, tensorrt_device
from .fakes import CURVE
from .lyanna_bundle import CONTEXT, VOCABULARY
from .test_rejection_drafts import FAR, chi_square

HEADS, NODES = 3, 11
CONFIG = MedusaConfig(
    hidden_size=HIDDEN, vocab_size=VOCABULARY, heads=HEADS, draft_logit_scale=1.25,
    rank_accuracies=((0.6, 0.3, 0.2), (0.5, 0.4, 0.1), (0.4, 0.2, 0.1)),
)  # fmt: skip
FEW, OTHER = "few", "other"
"""A drafter of few tokens, and one of another method."""
PROMPTS = [[3, 4, 5, 6], [9, 3] * 20, [4] * 40, [7]]
WHOLE = Budget(NODES, HEADS, NODES)


def heads() -> MedusaHeads:
    """Heads of which some are right: sharp, without zeros."""
    torch.manual_seed(2)
    module = MedusaHeads(CONFIG).eval().requires_grad_(False)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module.bfloat16().float()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`verifier`, and `engines` of it with three drafters."""
    folder = tmp_path_factory.mktemp("heads")
    checkpoint = write_verifier(folder / "verifier", vocab_size=VOCABULARY, max_position_embeddings=CONTEXT)
    write_tokenizer(folder / "verifier")
    identity = Identity.of(Checkpoint.open(checkpoint.path))
    save_drafter(folder / "heads", "medusa", CONFIG, identity, heads(), counts(VOCABULARY), {})
    drafters = (
        DrafterBuild("medusa", str(folder / "heads"), "medusa", {"precision": "fp32", "nodes": NODES}),
        DrafterBuild(FEW, "random", "medusa", {"precision": "fp32", "steps": 2, "draft_vocabulary": 9}),
        DrafterBuild(OTHER, "random", "mtp", {"precision": "fp32"}),
    )
    model = Model("little", str(checkpoint.path), checkpoint.path)
    build_bundle(model, BuildConfig(drafters=drafters), folder / "engines", {}, False, lambda message: None)
    return folder


@pytest.fixture(scope="module", autouse=True)
def unmeasured() -> Iterator[None]:
    """Calls cost the same on every machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "load_costs", lambda verifier, identity: VerifyCosts.of(CURVE))
        patch.setattr(speculation, "cached_costs", lambda verifier, drafter, identity: Costs())
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
@pytest.mark.parametrize("drafter", ["medusa", FEW, "ngram+medusa"])
def test_drafted_text_is_the_verifiers_own(
    plain: dict[float, list[list[int]]], drafter: str, slots: str, temperature: float, budget: Budget | None,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """Sequences begin, end and change slots. Drafts are accepted."""
    runtime: Runtime = request.getfixturevalue(slots)
    found = runtime.generate(PROMPTS, params(temperature), SpeculationParams(drafter, budget=budget))
    assert texts(found) == plain[temperature]
    drafted, accepted = (
        sum(getattr(generation.metrics, name) for generation in found)
        for name in ("num_draft_tokens", "num_accepted_draft_tokens")
    )
    assert drafted > 0
    assert budget is None or 0 < accepted < drafted


def test_heads_read_the_hidden_state_that_gave_the_last_token(
    three: Runtime, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each drafted tree has the candidates of transformers' own hidden state there, in every slot and every step."""
    drafter, seen = three._speculation.drafter("medusa"), list[tuple[list[int], Tree]]()
    draft = drafter.draft

    def observed(batch: list[Sequence], budgets: list[Budget]) -> list[Tree]:
        trees = draft(batch, budgets)
        pairs = zip(batch, trees, strict=True)
        seen.extend((list(seq.tokens), tree) for seq, tree in pairs if len(tree) == NODES + 1)  # near ends they are cut
        return trees

    monkeypatch.setattr(drafter, "draft", observed)
    found = three.generate(PROMPTS, params(0.0), SpeculationParams("medusa", budget=WHOLE))
    assert sum(generation.metrics.num_accepted_draft_tokens for generation in found) > 0
    model, own = LlamaForCausalLM.from_pretrained(folder / "verifier"), heads()
    assert len(seen) > 40
    with torch.no_grad():
        for tokens, tree in seen:
            hidden = model.model(torch.tensor([tokens])).last_hidden_state[0, -2]
            best = model.lm_head(own(hidden)).topk(3).indices  # [heads, ranks]
            depths = np.zeros(len(tree), int)
            for node in range(1, len(tree)):
                depths[node] = depths[tree.parents[node]] + 1
                assert tree.tokens[node] in best[depths[node] - 1]
            assert tree.tokens[0] == tokens[-1]
            for level in range(1, HEADS + 1):  # the likeliest candidate is in each tree
                assert best[level - 1, 0] in tree.tokens[depths == level]


def test_requests_of_other_methods_share_its_batch(three: Runtime, plain: dict[float, list[list[int]]]) -> None:
    """A call computes all slots, but leaves those of other drafters as they are."""
    ways = [SpeculationParams("medusa", budget=WHOLE), SpeculationParams(OTHER, budget=Budget(4, 4, 1)), "none", FEW]
    for temperature in (0.0, 1.0):
        assert texts(three.generate(PROMPTS, params(temperature), ways)) == plain[temperature]


@pytest.mark.parametrize("drafter", ["medusa", FEW])
@pytest.mark.parametrize("budget", [WHOLE, Budget(5, 2, 3)], ids=["whole", "cut"])
def test_texts_of_rejection_have_the_verifiers_distribution(one: Runtime, drafter: str, budget: Budget) -> None:
    """Trees of draws branch: cousins share draws, which only one path reads."""
    assert chi_square(one, SpeculationParams(drafter, budget=budget), "rejection") < FAR


def test_heads_that_claim_another_distribution_are_found(one: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ChainProposal.logits
    monkeypatch.setattr(ChainProposal, "logits", lambda self, depth, token: -right(self, depth, token))
    assert chi_square(one, SpeculationParams("medusa", budget=WHOLE), "rejection") > FAR


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
    """Also of draws, and of budgets that are less deep or wide than the tree."""
    drawn = replace(params(1.0), acceptance="rejection")
    with opened(max_num_seqs) as runtime:
        for drafter in ("medusa", FEW):
            for budget in (WHOLE, Budget(5, 2, 3), None):
                how = SpeculationParams(drafter, budget=budget)
                for temperature in (0.0, 1.0):
                    found = runtime.generate(PROMPTS, params(temperature), how)
                    assert texts(found) == plain[temperature], (drafter, temperature, budget)
                    if budget is not None:
                        host = one.generate(PROMPTS, params(temperature), how)
                        steps = [[g.metrics.num_spec_steps for g in of_device] for of_device in (found, host)]
                        assert steps[0] == steps[1], (drafter, temperature, budget)
        how = SpeculationParams("medusa", budget=WHOLE)
        found, host = (texts(each.generate(PROMPTS, drawn, how)) for each in (runtime, one))
        assert [text[:-HEADS] for text in found] == [text[:-HEADS] for text in host]  # its trees reach past the end
