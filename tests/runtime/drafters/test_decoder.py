"""A draft model in the runtime: it drafts its own continuation of all committed tokens, and stops where it should."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.runtime import Runtime, SamplingParams, SpeculationParams
from redraft.runtime.drafters.base import PREFIX_BLOCK
from redraft.runtime.drafters.candidate_noise import ChainProposal
from redraft.runtime.drafters.decoder import DecoderDrafter, Drafting
from redraft.runtime.drafters.growing_tree import Chain, GrowingTree
from redraft.runtime.requests.request import Request
from redraft.runtime.trees.tree import depths_of, within
from redraft.types import Budget, Tree
from tests.runtime.drafters.test_rejection_drafts import FAR, chi_square
from tests.runtime.fakes import fix_costs

from .decoder_bundle import CONTEXT, DRAFTED, drafter_of, open_student, watched

PROMPTS = [[5, 9, 3, 17, 12, 8], [1, 2, 20, 6, 7, 13, 9, 9, 4, 11, 3]]
LONG = [3 + number * number % 29 for number in range(90)]
PARAMS = SamplingParams(max_tokens=48, ignore_eos=True)


def opened(folder: Path, slots: int = 1, device: str | None = None) -> Runtime:
    return Runtime.open(folder / "engines", threads=1, max_num_seqs=slots, device=device, verify=False)


def chains(method: str, tokens: int) -> SpeculationParams:
    return SpeculationParams(method, budget=Budget(tokens, tokens, 1))


WIDE = SpeculationParams("wide", budget=Budget(9, 4, 3))


@pytest.mark.parametrize(("slots", "device"), [(1, None), (2, None), (1, "cpu"), (2, "cpu")])
def test_texts_are_the_verifiers(folder: Path, slots: int, device: str | None) -> None:
    """Fixed budgets draft in every text. Adaptive ones may not, where other requests can share their calls."""
    with opened(folder, slots, device) as runtime:
        for temperature, ways in ((0.0, (chains("narrow", 6), WIDE)), (1.0, (chains("wide", 6), WIDE, "ngram+narrow"))):
            params = SamplingParams(max_tokens=48, ignore_eos=True, temperature=temperature, seed=4)
            plain = [text.token_ids for text in runtime.generate([*PROMPTS, LONG], params, "none")]
            for way in ways:
                found = runtime.generate([*PROMPTS, LONG], params, way)
                assert [text.token_ids for text in found] == plain
                drafted = [text.metrics.num_draft_tokens for text in found]
                assert all(drafted) or (way == "ngram+narrow" and (slots > 1 or any(drafted)))


@pytest.mark.parametrize("slots", [1, 2])
def test_a_verifier_that_drafts_for_itself_accepts_every_token(folder: Path, slots: int) -> None:
    with opened(folder, slots) as runtime:
        for values in ({}, {"temperature": 1.0}, {"temperature": 1.0, "acceptance": "rejection"}):
            params = SamplingParams(max_tokens=48, ignore_eos=True, seed=9, **values)
            for text in runtime.generate([*PROMPTS, LONG], params, chains("same", 24)):
                assert text.metrics.num_draft_tokens == text.metrics.num_accepted_draft_tokens > 40
                assert text.metrics.num_steps < 5


@pytest.mark.parametrize("method", ["narrow", "same"])
@pytest.mark.parametrize("shared", [40, 75])
def test_a_shared_prefix_changes_no_draft(
    folder: Path, method: str, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter takes its rows over, and computes none of them again."""
    later = [*LONG[:shared], 4, 4]
    with opened(folder, 2) as runtime:
        computed: list[int] = []
        prepare = Mock(side_effect=lambda slots, starts, pending, batch: computed.extend(map(len, pending)))
        monkeypatch.setattr(drafter_of(runtime, method), "_prepare", prepare)
        (alone,) = runtime.generate([later], PARAMS, chains(method, 6))
        before = sum(computed)
        runtime.forget_prefixes()
        runtime.generate([LONG], PARAMS, chains(method, 6))
        computed.clear()
        (again,) = runtime.generate([later], PARAMS, chains(method, 6))
    assert again.cached_tokens == shared - shared % PREFIX_BLOCK
    assert before - sum(computed) == again.cached_tokens
    assert again.token_ids == alone.token_ids
    counts = [(m.num_steps, m.num_draft_tokens, m.num_accepted_draft_tokens) for m in (again.metrics, alone.metrics)]
    assert counts[0] == counts[1]
    assert counts[0][2] > 0


def runs_of(drafter: DecoderDrafter, patch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list that gets the rows and levels of every later work of a chain."""
    runs: list[tuple[int, int]] = []
    extend = drafter._extend

    def counted(
        slots: range, batch: Sequence[Request], chains: Sequence[Chain], starts: Sequence[int],
        pending: Sequence[Sequence[int]], level: int, levels: int,
    ) -> None:  # fmt: skip
        runs.append((max(map(len, pending)), levels))
        extend(slots, batch, chains, starts, pending, level, levels)

    patch.setattr(drafter, "_extend", counted)
    return runs


class Reference:
    """The draft model in torch. It computes every token of a text again."""

    def __init__(self, folder: Path, student: str, drafted: slice = slice(None)) -> None:
        """drafted: the tokens that it drafts."""
        self.model = open_student(folder / student)
        stored = load_file(Checkpoint.open(folder / "verifier").path / "model.safetensors")
        self._embedding, self._head = stored["model.embed_tokens.weight"], stored["lm_head.weight"]
        self._left_out = torch.full((len(self._head),), -torch.inf)
        self._left_out[drafted] = 0

    @torch.no_grad()
    def log_probs(self, tokens: list[int]) -> torch.Tensor:
        states = self.model(F.embedding(torch.tensor([tokens]), self._embedding))
        return (self._head @ states[0, -1] + self._left_out).log_softmax(-1)

    def check(self, tokens: list[int], tree: Tree) -> None:
        """Every node is a likeliest token after its path, with its joint probability."""
        found, parents, joint = tree.tokens.tolist(), tree.parents.tolist(), tree.log_probs.tolist()
        assert found[0] == tokens[-1]
        for node in range(1, len(found)):
            path, at = [], parents[node]
            while at > 0:
                path.insert(0, found[at])
                at = parents[at]
            log_probs = self.log_probs([*tokens, *path])
            siblings = [other for other in range(1, node) if parents[other] == parents[node]]
            assert found[node] == int(log_probs.argsort(descending=True)[len(siblings)])
            assert joint[node] - joint[parents[node]] == pytest.approx(float(log_probs[found[node]]), abs=1e-3)


@pytest.mark.parametrize("slots", [1, 2])
def test_drafts_continue_all_committed_tokens(folder: Path, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was accepted before, and over rows that were kept: prompts of several chunks, steps of other methods."""
    reference = Reference(folder, "student")
    with opened(folder, slots) as runtime:
        drafts = watched(drafter_of(runtime, "narrow"), monkeypatch)
        ways = [chains("narrow", 5), "ngram+narrow", chains("narrow", 7)]
        runtime.generate([PROMPTS[0], PROMPTS[1], LONG], PARAMS, ways)
        assert {6, 8} <= {len(draft.tree) for draft in drafts}
        for draft in drafts:
            reference.check(draft.tokens, draft.tree)


def test_trees_have_the_likeliest_nodes_of_every_level(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = Reference(folder, "part", slice(1, 1 + DRAFTED))
    with opened(folder, 2) as runtime:
        drafts = watched(drafter_of(runtime, "wide"), monkeypatch)
        ways = [SpeculationParams("wide", budget=Budget(12, 5, 3)), SpeculationParams("wide", budget=Budget(6, 3, 2))]
        runtime.generate(PROMPTS, PARAMS, ways)
        shapes = [(len(draft.tree), max(depths_of(draft.tree.parents.tolist()))) for draft in drafts]
        assert max(nodes for nodes, _ in shapes) == 13
        assert max(depth for _, depth in shapes) > 2
        branching = 0
        for draft in drafts:
            reference.check(draft.tokens, draft.tree)
            assert (np.diff(draft.tree.log_probs) <= 1e-6).all()
            branching += len(set(draft.tree.parents.tolist())) < len(draft.tree) - 1
        assert branching > len(drafts) / 2


def test_rows_of_accepted_tokens_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verifier that drafts for itself computes two rows at the next draft: the last drafted token and the bonus."""
    with opened(folder) as runtime:
        runs = runs_of(drafter_of(runtime, "same"), monkeypatch)
        runtime.generate([PROMPTS[0]], PARAMS, chains("same", 5))
        assert runs[:2] == [(6, 4), (1, 1)]
        assert {rows for rows, _ in runs[2::2]} == {2}
        runs.clear()
        runtime.generate([PROMPTS[0]], PARAMS, chains("same", 3))
        assert [levels for _, levels in runs[:2]] == [2, 1]


def test_a_draft_stops_where_its_budget_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token that ends a draft stays, and no run follows it."""
    with opened(folder) as runtime:
        drafter = drafter_of(runtime, "narrow")
        drafts, runs = watched(drafter, monkeypatch), runs_of(drafter, monkeypatch)

        def shares_of(how: SpeculationParams) -> list[np.ndarray]:
            """Draft, and return the probabilities of each draft's tokens. Every level is one run."""
            drafts.clear()
            runs.clear()
            runtime.generate(PROMPTS, PARAMS, how)
            shares = [np.exp(np.diff(draft.tree.log_probs)) for draft in drafts]
            assert sum(levels for _, levels in runs) == sum(map(len, shares))
            return shares

        whole = shares_of(chains("narrow", 24))
        threshold = float(np.median(np.concatenate(whole)))
        stopped = shares_of(SpeculationParams("narrow", controller=f"confidence,gamma=24,threshold={threshold}"))
        assert all((share[:-1] >= threshold).all() for share in stopped)
        assert any(len(share) < 24 and share[-1] < threshold for share in stopped)
        assert sum(map(len, stopped)) < sum(map(len, whole))


def test_a_first_draft_of_one_work_times_a_level(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller does not know a level's cost before, so the next draft would be as long again."""
    with opened(folder) as runtime:
        drafter = drafter_of(runtime, "narrow")
        drafts, runs = watched(drafter, monkeypatch), runs_of(drafter, monkeypatch)
        runtime.generate(PROMPTS[:1], PARAMS, SpeculationParams("narrow", controller="adaptive"))
        assert runs[0][1] == 16
        assert len(drafts) > 1
        assert {levels for _, levels in runs[1:]} == {1}, "so that each may end it"
        drafter.step_ms = 1e6
        runtime.generate(PROMPTS[:1], PARAMS, chains("narrow", 4))
        assert drafter.step_ms < 1e5, "drafts of one work correct a level that seems dear"


def test_a_joint_probability_ends_a_draft_too() -> None:
    budget = Budget(6, 6, 1, share=0.2)
    seq = Request([3], 1, 100, frozenset(), None)  # type: ignore[arg-type]
    chain = Chain.of(seq, budget, 24)
    assert chain.left == 6
    for token in (4, 5, 6):
        chain.add(token, float(np.log(0.5)))
    assert (chain.tokens, chain.left) == ([3, 4, 5, 6], 0)


def test_rows_of_drafted_tokens_that_were_committed() -> None:
    state = Drafting(cache_len=3, drafted=[7, 8, 9])
    state.commit([1, 2, 3, 7, 8, 5, 6])
    assert (state.cache_len, state.drafted) == (5, [])
    state = Drafting(cache_len=3, drafted=[7, 8, 9])
    state.commit([1, 2, 3, 7, 8])
    assert state.cache_len == 4, "the last token's row gives the next token, so it is computed again"


def test_a_tree_grows_no_nodes_that_it_would_not_keep() -> None:
    tree = GrowingTree.of(1, Budget(3, 4, 2), 2, 3)
    tree.grow([[10, 11]], [np.log([0.6, 0.3])], last=False)
    assert tree.ends == [1, 2]
    tree.grow([[12, 13], [14, 15]], np.log([[0.9, 0.05], [0.5, 0.4]]), last=False)
    assert [tree.tokens[node] for node in tree.ends] == [12], "0.3 · 0.5 is below the three likeliest"
    best = within(tree.whole(None), Budget(3, 4, 2))
    assert best.tokens.tolist() == [1, 10, 12, 11]
    assert best.parents.tolist() == [-1, 0, 1, 0]
    assert tree.mask().tolist() == [[True, False, False], [False, True, False], [True, False, True]]


def test_no_probability_ends_a_tree_of_draws() -> None:
    budget = Budget(4, 4, 1, confidence=0.6, share=0.6)
    for drawn, ends in ((False, []), (True, [1])):
        tree = GrowingTree.of(1, budget, 1, 3, drawn)
        tree.grow([[10]], [np.log([0.5])], last=False)
        assert tree.ends == ends


LENGTHS = {
    "gammatune,eta=0.5,delta=2": [5, 6, 7, 8],  # averages 5, 6, 7, 8
    "gammatune,gamma=9,gamma_max=7": [7, 7, 7],
    "gammatune+,eta=0.5,delta=2,threshold=0": [5, 6, 7, 8],
    "heuristic": [5, 7, 9, 11],
    "fixed,gamma=24": [24],
    "svip,gamma=6,threshold=5": [6, 6, 6],
}


def test_lengths_follow_the_controller(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verifier drafts for itself, so every draft is accepted whole."""
    with opened(folder) as runtime:
        drafts = watched(drafter_of(runtime, "same"), monkeypatch)
        for controller, lengths in LENGTHS.items():
            drafts.clear()
            runtime.generate(PROMPTS[:1], PARAMS, SpeculationParams("same", controller=controller))
            assert [len(draft.tree) - 1 for draft in drafts][: len(lengths)] == lengths


def test_a_draft_near_the_end_of_the_context(folder: Path) -> None:
    """Rows and positions beyond it are padding."""
    prompt = (LONG * 4)[: CONTEXT - 12]
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    for device in (None, "cpu"):
        with opened(folder, 2, device) as runtime:
            plain = [text.token_ids for text in runtime.generate([prompt, LONG], params, "none")]
            found = runtime.generate([prompt, LONG], params, chains("narrow", 24))
            assert [text.token_ids for text in found] == plain
            assert len(plain[0]) == 12


@pytest.fixture
def with_fixed_costs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    fix_costs(monkeypatch)
    return opened(folder)


@pytest.mark.parametrize(
    ("acceptance", "how"),
    [
        ("rejection", chains("narrow", 4)),
        ("rejection", SpeculationParams("wide")),
        ("block", SpeculationParams("ngram+narrow")),
    ],
    ids=["chains", "adaptive, some tokens", "adaptive blocks"],
)
def test_drawn_drafts_leave_the_verifiers_distribution(
    with_fixed_costs: Runtime, acceptance: str, how: SpeculationParams
) -> None:
    assert chi_square(with_fixed_costs, how, acceptance, requests=12) < FAR


def test_a_draft_model_that_claims_another_distribution_is_found(
    with_fixed_costs: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ChainProposal.logits
    monkeypatch.setattr(ChainProposal, "logits", lambda self, depth, token: -right(self, depth, token))
    assert chi_square(with_fixed_costs, chains("narrow", 4), "rejection", requests=12) > FAR
