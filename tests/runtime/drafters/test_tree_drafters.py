"""Drafters that draft a tree in one call, end to end over tiny real graphs: texts are the verifier's own.

They are Medusa's heads, heads on the trunk, drafters that predict features, and blocks. One bundle has them all.
"""

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
from redraft.config import BuildConfig, DrafterBuild
from redraft.engines.host_device import array_of
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.drafters.checkpoint import Identity, save_drafter
from redraft.export.drafters.feature_drafter import FeatureConfig
from redraft.export.drafters.medusa import MedusaConfig, MedusaHeads
from redraft.export.drafters.multi_head import MultiHeadConfig, MultiHeadDrafter
from redraft.methods import ROWS, find_method
from redraft.runtime import Generation, Runtime, SamplingParams, SpeculationParams
from redraft.runtime.requests.request import Request
from redraft.runtime.steps.verifier import Verifier
from redraft.train.batches import Batch
from redraft.train.objectives.multi_head import MultiHeadObjective
from redraft.types import Budget, Tree
from tests.cli.conftest import write_tokenizer
from tests.export.drafters.test_block_graphs import AFTER_TOKENS, BOTH_WAYS, ONE_WAY
from tests.export.drafters.test_block_graphs import form as block_form
from tests.export.drafters.test_block_graphs import random_module as random_block
from tests.export.drafters.test_feature_graphs import SIZES, random_module
from tests.export.drafters.tiny import HIDDEN, counts, token_data, write_verifier
from tests.export.drafters.trunk_heads import random_heads
from tests.runtime.devices import opener
from tests.runtime.fakes import fix_costs
from tests.runtime.lyanna_bundle import CONTEXT, VOCABULARY

from .test_rejection_drafts import FAR, chi_square

HEADS, NODES, STEPS = 3, 11, 4
RANKS = ((0.6, 0.3, 0.2), (0.5, 0.4, 0.1), (0.4, 0.2, 0.1))
MEDUSA = MedusaConfig(
    hidden_size=HIDDEN, vocab_size=VOCABULARY, heads=HEADS, draft_logit_scale=1.25, rank_accuracies=RANKS
)
TRUNK = MultiHeadConfig(
    hidden_size=HIDDEN, vocab_size=VOCABULARY, intermediate_size=48, heads=4, kv_heads=2, head_dim=8,
    draft_heads=HEADS, draft_logit_scale=1.25, hidden_states=("0",), rank_accuracies=RANKS,
)  # fmt: skip
FORMS = {(row.static, row.states): name for name, row in ROWS.items() if row.family == "feature_tree"}
FEATURES = STATIC, DYNAMIC, SEVERAL_STATES = tuple(FORMS.values())
"""The last method of each kind of tree and of hidden states. Others differ in training, or inside of their graphs."""
BLOCKS = BOTH_WAYS, AFTER_TOKENS, ONE_WAY
FEW_MEDUSA, FEW_TRUNK, CHAIN = "few-medusa", "few-trunk", "chain"
"""Drafters of few tokens, and one of chains."""
TREE_DRAFTERS = (*FEATURES, CHAIN, *BLOCKS)
DRAFTERS = ("medusa", FEW_MEDUSA, "ngram+medusa", "multi_head", FEW_TRUNK, "ngram+multi_head", *TREE_DRAFTERS)
PROMPTS = [[3, 4, 5, 6], [9, 3] * 20, [4] * 40, [7], list(range(13)) * 6]
"""The last one is longer than a call that catches up."""
WHOLE, CUT, SMALL, TREES = Budget(NODES, HEADS, NODES), Budget(5, 2, 3), Budget(4, 2, 2), Budget(8, STEPS, 3)
SHARP = 0.3
"""Deviation of weights for which a distribution at a wrong node is far from the right one."""


def whole_of(drafter: str) -> Budget:
    return TREES if drafter in TREE_DRAFTERS else WHOLE


def medusa_heads() -> MedusaHeads:
    """Heads of which some are right: sharp, without zeros."""
    torch.manual_seed(2)
    module = MedusaHeads(MEDUSA).eval().requires_grad_(False)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=SHARP)
    return module.bfloat16().float()


def trunk_heads(folder: Path) -> MultiHeadDrafter:
    """Random heads with the norm of the verifier in a folder, as they are stored."""
    module = random_heads(TRUNK)
    module.norm.weight.copy_(LlamaForCausalLM.from_pretrained(folder / "verifier").model.norm.weight)
    return module.bfloat16().float()


def write_features(folder: Path, identity: Identity) -> list[DrafterBuild]:
    """Write a drafter of each kind, and one with initial weights that drafts chains of few tokens."""
    options = {"precision": "fp32", "width": 3, "steps": STEPS}
    found = []
    for method in FEATURES:
        form = ROWS[method].form
        states = find_method(method).hidden_states
        config = FeatureConfig(**{**SIZES, "vocab_size": VOCABULARY, "logit_scale": 1.0}, hidden_states=states, **form)
        module = random_module(config, SHARP)
        save_drafter(folder / method, method, config, identity, module, token_data(config).counts, {}, None)
        found.append(DrafterBuild(method, str(folder / method), method, options))
    for method in BLOCKS:
        states = find_method(method).hidden_states
        block = block_form(method, vocab_size=VOCABULARY, logit_scale=1.0, steps=STEPS, hidden_states=states)
        drafter = random_block(block, SHARP)
        save_drafter(folder / method, method, block, identity, drafter, token_data(block).counts, {}, None)
        found.append(DrafterBuild(method, str(folder / method), method, options))
    return [*found, DrafterBuild(CHAIN, "random", DYNAMIC, {**options, "width": 1, "draft_vocabulary": 9})]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `engines` of a random Llama and all drafters, and the checkpoints. One drafter is in int8."""
    folder = tmp_path_factory.mktemp("trees")
    checkpoint = write_verifier(folder / "verifier", vocab_size=VOCABULARY, max_position_embeddings=CONTEXT + 64)
    write_tokenizer(folder / "verifier")
    identity = Identity.of(Checkpoint.open(checkpoint.path))
    save_drafter(folder / "heads", "multi_head", TRUNK, identity, trunk_heads(folder), counts(VOCABULARY), {})
    save_drafter(folder / "medusa", "medusa", MEDUSA, identity, medusa_heads(), counts(VOCABULARY), {})
    exact, few = {"precision": "fp32"}, {"steps": 2, "draft_vocabulary": 9}
    drafters = [
        DrafterBuild("multi_head", str(folder / "heads"), "multi_head", {**exact, "nodes": NODES}),
        DrafterBuild("medusa", str(folder / "medusa"), "medusa", {**exact, "nodes": NODES}),
        DrafterBuild(FEW_MEDUSA, "random", "medusa", {**exact, **few}),
        DrafterBuild(FEW_TRUNK, "random", "multi_head", {"precision": "int8", **few}),
        *write_features(folder, identity),
    ]
    model = Model("little", str(checkpoint.path), checkpoint.path)
    build_bundle(model, BuildConfig(drafters=tuple(drafters)), folder / "engines", {}, False, lambda message: None)
    return folder


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


@pytest.mark.parametrize(
    ("drafter", "slots"),
    [
        *[(drafter, "three") for drafter in DRAFTERS],
        *[(drafter, "one") for drafter in ("medusa", "multi_head", STATIC, BOTH_WAYS, ONE_WAY)],
    ],
)
def test_drafted_text_is_the_verifiers_own(
    plain: dict[float, list[list[int]]], drafter: str, slots: str, request: pytest.FixtureRequest
) -> None:
    """Also with a seed. Sequences begin, end and change slots. Drafts are accepted."""
    runtime: Runtime = request.getfixturevalue(slots)
    for temperature, expected in plain.items():
        for budget in (whole_of(drafter), SMALL if temperature else None):
            runtime.forget_prefixes()  # else prompts of earlier runs take no time, and drafts pay less
            found = runtime.generate(PROMPTS, params(temperature), SpeculationParams(drafter, budget=budget))
            assert texts(found) == expected, (temperature, budget)
            drafted, accepted = (
                sum(getattr(generation.metrics, name) for generation in found)
                for name in ("num_draft_tokens", "num_accepted_draft_tokens")
            )
            assert drafted > 0
            assert budget is None or 0 < accepted < drafted, (temperature, budget)


@pytest.mark.parametrize("shared", [31, 33, 48])
def test_a_shared_prefix_changes_no_draft_of_medusas(three: Runtime, shared: int) -> None:
    """The hidden state that a draft reads is that of a row that is computed, even if all rows are shared."""
    how, first = SpeculationParams("medusa", budget=WHOLE), [5, 9, 3, 11, 7, 8] * 9
    later = [*first[:shared], 4]
    three.forget_prefixes()
    (alone,) = three.generate([later], params(0.0), how)
    three.forget_prefixes()
    three.generate([first], params(0.0), how)
    (again,) = three.generate([later], params(0.0), how)
    assert 0 < again.cached_tokens < shared
    assert again.token_ids == alone.token_ids
    counts = [(m.num_steps, m.num_draft_tokens, m.num_accepted_draft_tokens) for m in (again.metrics, alone.metrics)]
    assert counts[0] == counts[1]
    assert counts[0][2] > 0


@pytest.mark.parametrize("drafter", ["medusa", DYNAMIC])
def test_drafts_on_one_thread_are_those_on_several(folder: Path, drafter: str) -> None:
    with Runtime.open(folder / "engines", threads=2, verify=False) as runtime:
        made, how = runtime._speculation.drafter(drafter), SpeculationParams(drafter, budget=whole_of(drafter))
        found = []
        made.load_one_thread()
        for threads in (2, 1, 2):
            made.draft_on_one_thread(threads == 1)
            for rows, expected in ((8, threads), (9, 2)):
                program = made._draft_program(rows)
                assert program._session.get_session_options().intra_op_num_threads == expected
            ended = runtime.generate(PROMPTS, params(0.0), how)
            found.append((texts(ended), [one.metrics.num_accepted_draft_tokens for one in ended]))
        assert found[0] == found[1] == found[2]
        assert sum(found[0][1]) > 0


def test_requests_of_other_methods_share_a_batch(three: Runtime, plain: dict[float, list[list[int]]]) -> None:
    """A call computes all slots, but leaves those of other drafters as they are."""
    for drafter, few, other in (
        ("medusa", FEW_MEDUSA, SEVERAL_STATES), ("multi_head", FEW_TRUNK, "medusa"), (STATIC, CHAIN, "multi_head")
    ):  # fmt: skip
        own = SpeculationParams(drafter, budget=whole_of(drafter))
        ways = [own, SpeculationParams(other, budget=SMALL), "none", few, own]
        for temperature, expected in plain.items():
            assert texts(three.generate(PROMPTS, params(temperature), ways)) == expected, (drafter, temperature)


@pytest.mark.parametrize(
    ("drafter", "budget"),
    [("medusa", WHOLE), ("multi_head", CUT), (STATIC, TREES), (CHAIN, TREES), (AFTER_TOKENS, TREES)],
)
def test_texts_of_rejection_have_the_verifiers_distribution(three: Runtime, drafter: str, budget: Budget) -> None:
    """Trees of heads' draws branch: cousins share draws, which only one path reads. Others are chains."""
    assert chi_square(three, SpeculationParams(drafter, budget=budget), "rejection") < FAR


def test_a_seed_gives_the_same_tokens_again(one: Runtime) -> None:
    drawn, how = replace(params(1.0), acceptance="rejection"), SpeculationParams("multi_head", budget=WHOLE)
    first, second = (texts(one.generate(PROMPTS, drawn, how)) for _ in range(2))
    assert first == second
    assert first != texts(one.generate(PROMPTS, replace(drawn, seed=4), how))


Seen = list[tuple[list[int], np.ndarray | None, Tree]]


def observed(runtime: Runtime, name: str, patch: pytest.MonkeyPatch) -> Seen:
    """Return the drafts of a drafter, which grow while it runs: committed tokens, logits of the chain, and tree."""
    drafter, seen = runtime._speculation.drafter(name), Seen()
    draft = drafter.draft

    def record(batch: list[Request], budgets: list[Budget]) -> list[Tree]:
        trees = draft(batch, budgets)
        logits = array_of(drafter._state[names.CHAIN_LOGITS])
        for slot, (seq, tree) in enumerate(zip(batch, trees, strict=True)):
            if len(tree) > 1:
                seen.append((list(seq.tokens), logits[slot].copy(), tree))
        return trees

    patch.setattr(drafter, "draft", record)
    return seen


def test_medusas_heads_read_the_hidden_state_that_gave_the_last_token(
    three: Runtime, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each drafted tree has the candidates of transformers' own hidden state there, in every slot and every step."""
    seen = observed(three, "medusa", monkeypatch)
    three.generate(PROMPTS, params(0.0), SpeculationParams("medusa", budget=WHOLE))
    model, own = LlamaForCausalLM.from_pretrained(folder / "verifier"), medusa_heads()
    whole = [(tokens, tree) for tokens, _, tree in seen if len(tree) == NODES + 1]  # near ends they are cut
    assert len(whole) > 40
    with torch.no_grad():
        for tokens, tree in whole:
            hidden = model.model(torch.tensor([tokens])).last_hidden_state[0, -2]
            best = model.lm_head(own(hidden)).topk(3).indices  # [heads, ranks]
            depths = np.zeros(len(tree), int)
            for node in range(1, len(tree)):
                depths[node] = depths[tree.parents[node]] + 1
                assert tree.tokens[node] in best[depths[node] - 1]
            assert tree.tokens[0] == tokens[-1]
            for level in range(1, HEADS + 1):  # the likeliest candidate is in each tree
                assert best[level - 1, 0] in tree.tokens[depths == level]


def test_drafts_of_trunk_heads_have_trainings_logits(
    three: Runtime, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every slot and step, whatever was rejected before: of the whole text so far, computed again."""
    seen = observed(three, "multi_head", monkeypatch)
    found = three.generate(PROMPTS, params(0.0), SpeculationParams("multi_head", budget=WHOLE))
    accepted = {tokens for one in found for tokens, steps in enumerate(one.metrics.acceptance_histogram) if steps}
    assert accepted >= set(range(HEADS))  # a rejection at every depth
    model = LlamaForCausalLM.from_pretrained(folder / "verifier")
    objective = MultiHeadObjective(model, TRUNK)
    objective.drafter.load_state_dict(trunk_heads(folder).state_dict())
    assert len(seen) > 40
    with torch.no_grad():
        for tokens, logits, tree in seen:
            text = torch.tensor([tokens])
            batch = Batch(text, ("",), torch.tensor([[len(tokens) - 2]]), torch.tensor([len(tokens)]))
            wanted = [drafts[0, 0].numpy() for drafts in objective.drafts(batch, objective.states(batch))]
            np.testing.assert_allclose(logits, np.stack(wanted), atol=1e-4)
            assert tree.tokens[0] == tokens[-1]
            assert wanted[0].argmax() in tree.tokens[tree.parents == 0]


def test_drawn_drafts_of_features_are_chains_next_to_trees(three: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first child of a node is drawn from the distribution that is kept."""
    seen = observed(three, STATIC, monkeypatch)
    sampled = [replace(params(1.0, seed), acceptance="rejection" if seed == 1 else "coupled") for seed in range(3)]
    found = three.generate([[5, 6, 7]] * 3, sampled, SpeculationParams(STATIC, budget=TREES))
    assert all(generation.metrics.num_accepted_draft_tokens > 0 for generation in found)
    trees = [tree for _, _, tree in seen]
    drawn, chosen = ([tree for tree in trees if (tree.draws is not None) == draws] for draws in (True, False))
    assert all(tree.parents.tolist() == list(range(-1, len(tree) - 1)) for tree in drawn)
    assert max(map(len, drawn)) == STEPS + 1
    assert max(map(len, chosen)) == TREES.nodes + 1
    assert len(drawn) < len(chosen)


@pytest.fixture(params=["cpu", "tensorrt", "onnxruntime on a GPU"])
def opened(
    request: pytest.FixtureRequest, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Runtime]:
    """A function that opens the bundle on a device, for a number of slots."""
    monkeypatch.setattr(Verifier, "warm", lambda self: None)  # so that requests prepare shapes while they run
    return opener(request.param, folder / "engines", tmp_path, monkeypatch)


def test_texts_and_trees_on_a_device_are_the_hosts(
    opened: Callable[..., Runtime], plain: dict[float, list[list[int]]], one: Runtime
) -> None:
    """Sequence hidden states, static and dynamic trees, chains, and budgets less deep or wide than a tree.

    A device adds up the last prompt's rows in another order, so a tree there may differ where two logits are close.
    """
    with opened(3) as runtime:
        for drafter in ("medusa", FEW_MEDUSA, "multi_head", *TREE_DRAFTERS):
            for temperature, budget in ((0.0, whole_of(drafter)), (1.0, CUT)):
                how = SpeculationParams(drafter, budget=budget)
                found, host = (each.generate(PROMPTS, params(temperature), how) for each in (runtime, one))
                assert texts(found) == plain[temperature], (drafter, temperature)
                steps = [[g.metrics.num_spec_steps for g in each[:-1]] for each in (found, host)]
                ends = int(drafter in BLOCKS)  # deep trees reach past the end, where the host cuts them
                assert np.abs(np.subtract(*steps)).max() <= ends, (drafter, temperature)
        drawn, how = replace(params(1.0), acceptance="rejection"), SpeculationParams("medusa", budget=WHOLE)
        ours, hosts = (texts(each.generate(PROMPTS, drawn, how)) for each in (runtime, one))
        assert [text[:-HEADS] for text in ours] == [text[:-HEADS] for text in hosts]  # its trees reach past the end


@pytest.mark.parametrize("opened", ["cpu", "tensorrt"], indirect=True)
def test_draws_on_a_device_are_chains_without_a_copy(opened: Callable[..., Runtime]) -> None:
    """Their nodes are the first ones of the drafted tree, so that a cut at the end leaves the chain."""
    with opened(1) as runtime:
        asked: list[Tree] = []
        verify = runtime.verifier.verify
        runtime.verifier.verify = lambda batch, trees, *others: asked.extend(trees) or verify(batch, trees, *others)  # type: ignore[assignment, func-returns-value]
        drawn = replace(params(1.0), acceptance="rejection")
        runtime.generate(PROMPTS, drawn, SpeculationParams(DYNAMIC, budget=Budget(12, STEPS, 9)))
        assert max(map(len, asked)) == STEPS + 1
        device = runtime.verifier.device
        assert any(tree.on_device for tree in asked) == device.step_graphs
