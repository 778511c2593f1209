"""Lookahead decoding: its trees are the paper's mask, and window, pool and n-grams those of a plain loop."""

from __future__ import annotations

import io
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from redraft.errors import UsageError
from redraft.methods.unbuilt import LookaheadOptions
from redraft.plugins.operators import OFF, OPERATORS_VARIABLE
from redraft.runtime import Runtime, SamplingParams, SpeculationParams
from redraft.runtime.controllers.cost import CostCurve
from redraft.runtime.drafters import load_drafter
from redraft.runtime.drafters.lookahead import LookaheadDrafter
from redraft.runtime.requests.request import Request
from redraft.runtime.sampling.sampler import Greedy, accept
from redraft.runtime.trees.tree import ancestor_mask, layout, prune, root_only
from redraft.types import Budget, DraftTree, Outcome
from tests.runtime.fakes import FakeEngine, fake_verifier, greedy, make_runtime, mixing_rule, plain

Rule = Callable[[list[int]], int]
WIDE = Budget(nodes=400, depth=400, width=400)


def make(columns: int, ngram: int, candidates: int) -> LookaheadDrafter:
    return LookaheadDrafter(fake_verifier(FakeEngine(), 64), LookaheadOptions(columns, ngram, candidates))


def sequence(drafter: LookaheadDrafter, prompt: list[int], first: int) -> Request:
    """Return a request after its prompt, whose first token was committed."""
    seq = Request(list(prompt), len(prompt), 10**6, frozenset(), Greedy())
    drafter.begin(seq)
    seq.tokens.append(first)
    return seq


def offered(drafter: LookaheadDrafter, seq: Request, budget: Budget = WIDE) -> DraftTree:
    """Return the offered tree; the root alone without one."""
    found = [offer.tree for offer in drafter.offers(seq, budget)]
    return found[0] if found else root_only(seq.tokens[-1])


def paths_of(tree: DraftTree) -> list[list[int]]:
    """Return the tokens below the root of each node."""
    paths: list[list[int]] = [[]]
    for token, parent in zip(tree.tokens[1:].tolist(), tree.parents[1:].tolist(), strict=True):
        paths.append([*paths[parent], token])
    return paths


def verified(seq: Request, tree: DraftTree, rule: Rule) -> Outcome:
    return accept(tree, [rule([*seq.tokens, *path]) for path in paths_of(tree)])


def take(drafter: LookaheadDrafter, seq: Request, tree: DraftTree, rule: Rule) -> tuple[int, ...]:
    """Verify and commit a tree. Returns the committed tokens."""
    outcome = verified(seq, tree, rule)
    seq.tokens.extend(outcome.tokens)
    drafter.accept(seq, tree, outcome)
    return outcome.tokens


def columns_of(drafter: LookaheadDrafter, seq: Request) -> list[list[int]]:
    """Return the window's cells. In column 0 the root takes the place of the first."""
    columns = [list(column.tokens) for column in seq.drafting[drafter].window.columns]
    columns[0][0] = seq.tokens[-1]
    return columns


def pool_of(drafter: LookaheadDrafter, seq: Request, tokens: range) -> dict[int, list[tuple[int, ...]]]:
    """Return what the pool has after each token, the latest first."""
    pool = seq.drafting[drafter].pool
    return {token: pool.after(token) for token in tokens if pool.after(token)}


# --- the window as a tree --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("columns", "ngram"), [(1, 2), (1, 5), (5, 2), (5, 4), (4, 3), (2, 6), (7, 5)])
def test_the_tree_is_the_papers_mask(columns: int, ngram: int) -> None:
    """A cell sees itself, those above it in its column, and row 0 up to its column. Its position is row + column."""
    rows = ngram - 1
    cells = [(row, column) for row in range(rows) for column in range(columns)]
    seeds = [100 + place for place in range(len(cells))]
    drafter = make(columns, ngram, 1)
    tree = offered(drafter, sequence(drafter, seeds, 100))
    assert len(tree) == len(cells)
    nodes = [tree.tokens.tolist().index(100 + place) for place in range(len(cells))]
    seen, depths = ancestor_mask(tree.parents), layout(tree.parents).depths
    for (row, column), node in zip(cells, nodes, strict=True):
        visible = [(r == 0 and c <= column) or (c == column and r <= row) for r, c in cells]
        assert seen[node][nodes].tolist() == visible
        assert depths[node] == row + column
    pinned = np.arange(len(cells)) > 0
    assert tree.pinned is None if len(cells) == 1 else tree.pinned.tolist() == pinned.tolist()


# --- the same without trees ------------------------------------------------------------------------------------------


class Reference:
    """The paper's algorithm as a plain loop, with the differences that `lookahead_window` lists.

    rows: the window [N - 1][W].   pool: n-grams by first token, the oldest first.   real: cells that the model chose.
    """

    def __init__(self, sizes: tuple[int, int, int], tokens: list[int], rule: Rule) -> None:
        self.width, ngram, self.most = sizes
        self.height = ngram - 1
        self.text, self.rule = tokens, rule
        self.pool: dict[int, list[tuple[int, ...]]] = {}

    def begin(self) -> None:
        places = range(self.width * self.height)
        cells = [self.text[place % len(self.text)] for place in places]
        self.rows = [cells[row * self.width : (row + 1) * self.width] for row in range(self.height)]
        self.real = [[False] * self.width for _ in range(self.height)]

    def candidates(self) -> list[tuple[int, ...]]:
        return self.pool.get(self.text[-1], [])[::-1]

    def guesses(self, column: int) -> list[int]:
        """Return the tokens between the root and the new token of a column."""
        return [*self.rows[0][1 : column + 1], *[row[column] for row in self.rows[1:]]]

    def step(self, plainly: bool) -> list[int]:
        """Commit and return the tokens of a step, and update window and pool."""
        root = self.text[-1]
        drafts = [] if plainly else [*self.candidates(), *[self.guesses(column) for column in range(self.width)]]
        committed = max([self.agreeing(draft) for draft in drafts], key=len, default=self.agreeing([]))
        if not plainly:
            new = [self.rule([*self.text, *self.guesses(column)]) for column in range(self.width)]
            for column in range(self.width):
                if all(row[column] for row in self.real[1:]):
                    first = self.rows[0][column] if column else root
                    self.keep((first, *[row[column] for row in self.rows[1:]], new[column]))
            self.rows = [*self.rows[1:], new]
            self.real = [*self.real[1:], [True] * self.width]
        for _ in range(len(committed) - (not plainly)):
            self.rows = [[*row[1:], row[0]] for row in self.rows]
            self.real = [[*row[1:], row[0]] for row in self.real]
        self.text += committed
        return committed

    def agreeing(self, draft: list[int] | tuple[int, ...]) -> list[int]:
        """Return the accepted tokens of a draft, and the token after them."""
        found = [self.rule(self.text)]
        for token in draft:
            if token != found[-1]:
                break
            found.append(self.rule([*self.text, *found]))
        return found

    def keep(self, ngram: tuple[int, ...]) -> None:
        known = self.pool.setdefault(ngram[0], [])
        if ngram[1:] in known:
            known.remove(ngram[1:])
        known.append(ngram[1:])
        del known[: -self.most]


def hashed(seed: int, tokens: int, past: int) -> Rule:
    """Return a model whose next token depends on the last `past` ones."""

    def rule(text: list[int]) -> int:
        value = seed
        for token in text[-past:]:
            value = (value * 31 + token + 1) * 2654435761 % (1 << 32)
        return (value >> 11) % tokens

    return rule


@pytest.mark.parametrize("sizes", [(1, 2, 1), (3, 2, 2), (1, 4, 2), (4, 3, 2), (5, 4, 3), (3, 5, 1), (7, 3, 9)])
def test_pool_and_ngrams_are_those_of_a_plain_loop(sizes: tuple[int, int, int]) -> None:
    """Sequence hundred steps of models with short memories, so that n-grams recur. Some steps of two are plain."""
    accepted = 0
    for seed, plain_share in enumerate((0.0, 0.4, 0.4)):
        rule, chance = hashed(seed, 6, 1 + seed), random.Random(seed)
        prompt = [chance.randrange(6) for _ in range(1 + 7 * seed)]
        drafter, reference = make(*sizes), Reference(sizes, list(prompt), rule)
        reference.begin()
        reference.text.append(rule(prompt))
        seq = sequence(drafter, prompt, reference.text[-1])
        for _ in range(120):
            plainly = chance.random() < plain_share
            assert seq.drafting[drafter].pool.after(seq.tokens[-1]) == reference.candidates()
            tree = root_only(seq.tokens[-1]) if plainly else offered(drafter, seq)
            drafts = [] if plainly else [*reference.candidates(), *map(reference.guesses, range(sizes[0]))]
            beginnings = {tuple(draft[:end]) for draft in drafts for end in range(len(draft) + 1)} | {()}
            assert sorted(map(tuple, paths_of(tree))) == sorted(beginnings)
            committed = reference.step(plainly)
            accepted += len(committed) - 1
            assert list(take(drafter, seq, tree, rule)) == committed
            expected = {token: ngrams[::-1] for token, ngrams in reference.pool.items()}
            assert pool_of(drafter, seq, range(6)) == dict(sorted(expected.items()))
    assert accepted > 20


# --- budgets and rates -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "alone", "beside"),
    [
        (WIDE, 4, 4),
        (Budget(7, 9, 9), 4, 3),
        (Budget(6, 9, 9), 3, 2),
        (Budget(3, 9, 9), 2, 1),
        (Budget(1, 9, 9), 1, 0),
        (Budget(9, 3, 9), 3, 3),
        (Budget(9, 1, 9), 1, 1),
        (Budget(9, 9, 2), 4, 1),
        (Budget(9, 9, 1), 1, 0),
    ],
)
def test_a_small_budget_has_fewer_columns(budget: Budget, alone: int, beside: int) -> None:
    """W = 4, N = 3: c columns have 2 c - 1 nodes below the root, c levels, and 2 a level. An n-gram is 2 nodes."""
    drafter = make(4, 3, 2)
    assert (drafter.columns(budget, False), drafter.columns(budget, True)) == (alone, beside)
    seq = sequence(drafter, [11, 12, 13, 14, 15, 16, 17, 18], 9)
    for with_ngram in (False, True):
        if with_ngram:
            seq.drafting[drafter].pool.add((9, 21, 22))
        tree = offered(drafter, seq, budget)
        depths = layout(tree.parents).depths[1:].tolist()
        assert len(tree) - 1 <= budget.nodes
        assert max(depths) <= budget.depth
        assert max(map(depths.count, depths)) <= budget.width
        assert (21 in tree.tokens.tolist()) == with_ngram
        columns = beside if with_ngram else alone
        assert (0 if tree.pinned is None else tree.pinned.sum()) == max(2 * columns - 1, 0)


@pytest.mark.parametrize(
    ("nodes", "after"), [(0, [[9, 3], [0, 4], [4, 2]]), (1, [[9, 9], [1, 3], [0, 4]]), (5, [[9, 9], [3, 9], [4, 9]])]
)
def test_a_step_that_lost_the_window_teaches_nothing_about_it(nodes: int, after: list[list[int]]) -> None:
    """A tree without pinned nodes moves the window as a plain step does. The first node here is all of column 0."""
    drafter = make(3, 3, 2)
    seq = sequence(drafter, [4, 1, 0, 2, 3, 4], 2)
    tree = prune(offered(drafter, seq), nodes)
    assert (tree.pinned is None) == (nodes < 5)
    take(drafter, seq, tree, lambda tokens: 9)
    assert columns_of(drafter, seq) == after


def test_rates_of_correct_ngrams_are_learned() -> None:
    drafter = make(1, 3, 2)

    def probability(path: list[int]) -> float:
        seq = sequence(drafter, [1, 2], 9)
        for ngram in ((9, 31, 32), (9, 21, 22)):
            seq.drafting[drafter].pool.add(ngram)
        tree = offered(drafter, seq)
        return float(np.exp(tree.log_probs[paths_of(tree).index(path)]))

    before = probability([21, 22]), probability([31, 32])
    for _ in range(60):
        seq = sequence(drafter, [1, 2], 9)
        for ngram in ((9, 31, 32), (9, 21, 22)):
            seq.drafting[drafter].pool.add(ngram)
        take(drafter, seq, offered(drafter, seq), lambda tokens: {9: 21, 21: 22}.get(tokens[-1], 5))
    assert probability([21, 22]) > 1.5 * before[0]
    assert probability([31, 32]) < before[1]


# --- whole texts -----------------------------------------------------------------------------------------------------

PROMPTS = [[97 + (i * 7 + n) % 5 for i in range(1 + 5 * n)] for n in range(6)]
OPTIONS = {"max_window_size": 4, "max_ngram_size": 3, "max_verification_set_size": 2}


@pytest.mark.parametrize(
    ("max_num_seqs", "budget"),
    [(1, None), (1, Budget(6, 3, 1)), (4, None), (4, Budget(30, 8, 8)), (4, Budget(4, 4, 4)), (4, Budget(1, 1, 1))],
    ids=str,
)
def test_texts_are_the_models_own(max_num_seqs: int, budget: Budget | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts reach the end of the context. Requests of other methods, and one with a prediction, share the batch.

    The clock stands still, so that no load of the machine stops the drafts.
    """
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    runtime = make_runtime(max_num_seqs=max_num_seqs, max_model_len=64, options={"lookahead": OPTIONS})
    ways = [SpeculationParams("lookahead", budget=budget)] * 3 + [
        "ngram", SpeculationParams("lookahead", prediction=[97, 98, 99] * 9, budget=budget), "lookahead",
    ]  # fmt: skip
    found = runtime.generate(PROMPTS, greedy(200), ways)
    assert [list(one.token_ids) for one in found] == [
        plain(mixing_rule, prompt, 64 - len(prompt)) for prompt in PROMPTS
    ]
    assert all(one.metrics.num_draft_tokens > 0 for one in found)


def test_a_text_without_repetitions_takes_fewer_steps() -> None:
    """Each token follows from the one before, and no pair of tokens comes twice, so there is no text to look up.

    The prompt has tokens of the text to come. What follows them is in the pool before the text gets there.
    """

    def rule(tokens: list[int]) -> int:
        return (tokens[-1] * 6 + 7) % 251

    prompt = plain(rule, [1], 120)[100::-20]
    runtime = make_runtime(rule, options={"lookahead": OPTIONS})
    steps = {}
    for method in ("ngram", "lookahead"):
        (found,) = runtime.generate([prompt], greedy(120), SpeculationParams(method, budget=Budget(30, 8, 8)))
        assert list(found.token_ids) == plain(rule, prompt, 120)
        steps[method] = found.metrics.num_steps
    assert steps["ngram"] > 110
    assert steps["lookahead"] < 100


def test_a_window_that_loses_is_paused() -> None:
    """Verifying a node costs a whole step, so the controller decodes plainly but for a few trials."""
    dear = CostCurve.from_points({1: 1.0, 32: 32.0})
    runtime = make_runtime(curve=dear, max_model_len=500, options={"lookahead": OPTIONS})
    (found,) = runtime.generate([PROMPTS[1]], greedy(400), "lookahead")
    assert list(found.token_ids) == plain(mixing_rule, PROMPTS[1], 400)
    assert 0 < found.metrics.num_spec_steps < 40


@pytest.fixture
def opened(lyanna_bundle: Path) -> Iterator[Runtime]:
    """A runtime over real engines, with three slots."""
    options = {"lookahead": OPTIONS}
    with Runtime.open(lyanna_bundle, threads=1, max_num_seqs=3, verify=False, drafter_options=options) as runtime:
        yield runtime


SAMPLED = {
    "greedy": SamplingParams(max_tokens=40),
    "sampled": SamplingParams(max_tokens=40, temperature=1.0, seed=4, ignore_eos=True),
    "processed": SamplingParams(max_tokens=40, temperature=0.7, seed=5, top_p=0.9, repetition_penalty=1.2),
}


def test_texts_of_engines_are_plain_decodings(opened: Runtime) -> None:
    """At temperature 0, and at others with the same seed."""
    prompts = [[5, 6, 7], [8, 9, 5, 6] * 3, [3, 4] * 10, [7], [9, 9, 4]]
    how = SpeculationParams("lookahead", budget=Budget(16, 6, 6))
    for params in SAMPLED.values():
        expected = [one.token_ids for one in opened.generate(prompts, params, "none")]
        for way in ("lookahead", how):
            found = opened.generate(prompts, params, way)
            assert [one.token_ids for one in found] == expected
        assert sum(one.metrics.num_accepted_draft_tokens for one in found) > 0
    rejected = SamplingParams(max_tokens=40, temperature=1.0, acceptance="rejection")
    found = opened.generate(prompts, rejected, how)
    assert sum(one.metrics.num_accepted_draft_tokens for one in found) > 0


def test_it_takes_branching_trees_of_a_verifier_that_prefers_chains(
    lyanna_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget of width 1 leaves one chain a step: an n-gram, or the first column."""
    monkeypatch.setenv(OPERATORS_VARIABLE, OFF)  # ONNX Runtime's kernels have a graph for chains
    with Runtime.open(lyanna_bundle, threads=1, verify=False, drafter_options={"lookahead": OPTIONS}) as runtime:
        assert runtime.verifier.steps.prefers_chains
        assert not runtime.verifier.branches
        for way in (SpeculationParams("lookahead", budget=Budget(9, 9, 1)), "lookahead"):
            trace = io.StringIO()
            (found,) = runtime.generate([[5, 6, 7]], greedy(40), way, trace=trace)
            steps = [json.loads(line) for line in trace.getvalue().splitlines() if "position" in line]
            branching = [step for step in steps if step["parents"] != list(range(-1, len(step["parents"]) - 1))]
            assert bool(branching) == (way == "lookahead") == runtime.verifier.branches
            assert found.metrics.num_draft_tokens > 0


# --- options and names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_window_size": 0}, "max_window_size must be at least 1, not 0"),
        ({"max_ngram_size": 1}, r"max_ngram_size must be at least 2 \(a token and the one after it\), not 1"),
        ({"max_verification_set_size": -2}, "max_verification_set_size must be at least 1, not -2"),
        ({"max_window_size": 2.5}, "max_window_size must be a whole number, not 2.5"),
        ({"max_window_size": 257}, r"a window of 257 .* too large: expected \(max_ngram_size - 1\) \* max_window_size"),
        ({"max_window_size": 1, "max_ngram_size": 300}, "n-grams of 300 tokens are too large"),
        ({"max_verification_set_size": 300}, "a verification set of 300 .* too large"),
        ({"W": 3}, "unknown key W; known keys are max_ngram_size, max_verification_set_size, max_window_size"),
    ],
)
def test_impossible_sizes_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_drafter("lookahead", fake_verifier(FakeEngine(), 64), options)


def test_it_drafts_without_another_drafter_and_keeps_nothing_for_others(opened: Runtime) -> None:
    assert "lookahead" in opened.methods
    assert not [name for name in opened.methods if "lookahead" in name and "+" in name]
    for method in ("lookahead+lyanna", "ngram+lookahead"):
        with pytest.raises(UsageError, match=r"this bundle has no .*; choose one of none, ngram"):
            opened.generate([[5]], greedy(4), method)
    with pytest.raises(UsageError, match="lookahead keeps no earlier outputs"):
        opened.generate([[5]], greedy(4), SpeculationParams("lookahead", tenant="me"))
