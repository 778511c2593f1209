"""Rejection sampling keeps the verifier's distribution: every draw and every decision is enumerated."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from redraft.runtime.controllers.base import FixedBudget
from redraft.runtime.sampling import rejection
from redraft.runtime.sampling.rejection import verify_block, verify_tree
from redraft.runtime.trees.offers import Offer, OfferKey, Plan, StepLimits
from redraft.runtime.trees.tree import is_chain, layout, merge, prune, within
from redraft.types import NOT_REACHED, Budget, DraftTree, Draws, OfferKind, Tree
from tests.runtime.drafts import cut, sequence
from tests.runtime.sampling.laws import (
    Model,
    Proposed,
    chosen,
    closed_form,
    draft,
    drawn_trees,
    every_branch,
    farthest,
    law_of,
    model,
    outputs,
)

EXACT = 1e-12
WRONG = 1e-3
P, Q = model(1), model(2)
SHAPES = {
    "chain": [-1, 0, 1, 2],
    "siblings": [-1, 0, 0, 0],
    "two levels": [-1, 0, 0, 1, 1, 2],
    "three levels": [-1, 0, 0, 1, 1, 3],
    "branches": [-1, 0, 0, 1, 2],
}


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_trees_keep_the_distribution(shape: str, repeats: bool) -> None:
    law = law_of(drawn_trees(Q, SHAPES[shape], repeats), P, 4)
    assert farthest(law, closed_form(P, 4)) < EXACT


@pytest.mark.parametrize("verify", [verify_tree, verify_block])
@pytest.mark.parametrize("p", [P, model(5, sharp=8.0)], ids=["flat", "sharp"])
def test_chains(verify: rejection.Target, p: Model) -> None:
    assert farthest(law_of(drawn_trees(Q, SHAPES["chain"]), p, 4, verify), closed_form(p, 4)) < EXACT


@pytest.mark.parametrize("verify", [verify_tree, verify_block])
def test_a_drafter_that_equals_the_verifier_loses_nothing(verify: rejection.Target) -> None:
    def p(text: tuple[int, ...]) -> rejection.Probs:
        return Q((len(text), text[-1] if text else 0))

    for _, tree in drawn_trees(Q, SHAPES["chain"]):
        assert sum(share for text, share in outputs(tree, p, verify).items() if len(text) == 4) > 1 - EXACT


def test_block_verification_accepts_more() -> None:
    gains = []
    for seed in range(4):
        p, q = model(seed), model(100 + seed)
        by_token, by_block = (
            sum(share * length for share, length in _lengths(p, q, verify)) for verify in (verify_tree, verify_block)
        )
        gains.append(by_block - by_token)
    assert min(gains) > -EXACT
    assert max(gains) > 0.01


def _lengths(p: Model, q: Model, verify: rejection.Target) -> Iterator[tuple[float, int]]:
    for share, tree in drawn_trees(q, SHAPES["chain"]):
        for text, probability in outputs(tree, p, verify).items():
            yield share * probability, len(text)


@pytest.mark.parametrize("verify", [verify_tree, verify_block])
def test_chosen_chains(verify: rejection.Target) -> None:
    law = law_of(iter([(1.0, chosen([(2, 0, 1)]))]), P, 4, verify)
    assert farthest(law, closed_form(P, 4)) < EXACT


@pytest.mark.parametrize("shape", ["chain", "siblings"])
@pytest.mark.parametrize("path", [(0,), (0, 1)])
def test_blocks_are_chosen_without_reading_draws(shape: str, path: tuple[int, ...]) -> None:
    """A merged tree is a chain for some draws only."""

    def block(tree: Tree, target: rejection.Target, chance: rejection.Chance) -> rejection.Accepted:
        return rejection.verify(tree, target, chance, True)

    trees = ((share, merge(chosen([path]), tree.first(2))) for share, tree in drawn_trees(Q, SHAPES[shape]))
    assert farthest(law_of(trees, P, 3, block), closed_form(P, 3)) < EXACT


@pytest.mark.parametrize("verify", [verify_tree, verify_block])
def test_a_node_that_no_token_may_follow(verify: rejection.Target) -> None:
    """The verification ends there, as often as it gets there."""
    found = every_branch(
        lambda chance: verify(chosen([(2, 0, 1)]), lambda node: None if node == 1 else P((2,) * (node > 0)), chance)
    )
    ended = {path: share for share, (path, token) in found if token == NOT_REACHED}
    assert ended == {(1,): pytest.approx(P(())[2], abs=EXACT)}


def test_chosen_trees() -> None:
    law = law_of(iter([(1.0, chosen([(2, 0, 1), (0,), (2, 1)]))]), P, 4)
    assert farthest(law, closed_form(P, 4)) < EXACT


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("shape", ["chain", "two levels"])
def test_draws_merged_with_chosen_nodes(shape: str, repeats: bool) -> None:
    ready = chosen([(0, 1), (2,)])
    trees = ((share, merge(ready, tree)) for share, tree in drawn_trees(Q, SHAPES[shape], repeats))
    assert farthest(law_of(trees, P, 3), closed_form(P, 3)) < EXACT


@pytest.mark.parametrize("ready", [None, chosen([(0, 1)])], ids=["draws", "with a lookup"])
@pytest.mark.parametrize(
    "limits",
    [
        StepLimits(Budget(9, 9, 9)),
        StepLimits(Budget(9, 1, 9)),
        StepLimits(Budget(9, 9, 1)),
        StepLimits(Budget(9, 9, 9), branches=False),
        StepLimits(Budget(9, 9, 2)),
        StepLimits(Budget(9, 9, 9), cache_len=4, block_rows=8),
        StepLimits(Budget(9, 9, 9), cache_len=5, block_rows=8),
    ],
    ids=["all", "depth", "width 1", "chains", "width 2", "half a block", "less of a block"],
)
@pytest.mark.parametrize("nodes", [1, 2, 9])
def test_cuts_keep_the_distribution(limits: StepLimits, nodes: int, ready: Tree | None) -> None:
    trees = (
        (share, _cut(tree, ready, limits, nodes))
        for shape in ("branches", "chain")
        for share, tree in drawn_trees(Q, SHAPES[shape])
    )
    law = law_of(trees, P, 3)
    assert farthest({text: share / 2 for text, share in law.items()}, closed_form(P, 3)) < EXACT


def _cut(made: DraftTree, ready: Tree | None, limits: StepLimits, nodes: int) -> Tree:
    made = within(made, limits.budget)  # as drafters do
    found = within(ready, limits.budget) if ready else made.first(0)
    plan = Plan(limits, found, (Offer(OfferKey("drafter", OfferKind.FRESH)),))
    tree = cut(FixedBudget(Budget(nodes, 9, 9)), sequence(), plan, made)
    assert len(tree) <= nodes + 1
    depths, budget = layout(tree.parents).depths, limits.budget
    assert depths.max() <= budget.depth
    assert np.bincount(depths).max() <= budget.width
    rows = limits.cache_len + len(tree)
    assert is_chain(tree) or (limits.branches and rows <= (limits.block_rows or rows))
    return tree


RIGHT = rejection.residual, rejection.acceptance
MISTAKES = {
    "p and q swapped": ("residual", lambda p, q: RIGHT[0](q, p)),
    "an acceptance of q over p": ("acceptance", lambda p, q, token: RIGHT[1](q, p, token)),
    "no normalisation": ("residual", lambda p, q: np.maximum(p - q, 0)),
    "a sibling that stays in q": ("without", lambda p, token: p),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, *MISTAKES[mistake])
    assert farthest(law_of(drawn_trees(Q, SHAPES["two levels"]), P, 3), closed_form(P, 3)) > WRONG


def test_pruning_by_drawn_values_is_found() -> None:
    def pruned(tree: DraftTree) -> Tree:
        kept = prune(DraftTree(tree.tokens, tree.parents, tree.log_probs), 1)
        child = tree.tokens.tolist().index(kept.tokens[1], 1)
        return draft(kept.tokens.tolist(), kept.parents.tolist(), Q) if child else tree

    trees = ((share, pruned(tree)) for share, tree in drawn_trees(Q, SHAPES["siblings"]))
    assert farthest(law_of(trees, P, 3), closed_form(P, 3)) > WRONG


def test_a_stop_at_an_unlikely_draw_is_found() -> None:
    trees = ((share, tree.first(3 if tree.log_probs[3] > -2 else 2)) for share, tree in drawn_trees(Q, SHAPES["chain"]))
    assert farthest(law_of(trees, P, 4), closed_form(P, 4)) > WRONG


def test_a_cut_may_not_drop_the_first_of_two_draws() -> None:
    (_, tree), *_ = drawn_trees(Q, SHAPES["siblings"])
    with pytest.raises(ValueError, match="drops one that was drawn before"):
        tree.part([0, 2], np.array([-1, 0]))


def test_cuts_do_not_read_the_likelihood_of_draws() -> None:
    (_, tree), *_ = drawn_trees(Q, SHAPES["three levels"])
    other = DraftTree(tree.tokens, tree.parents, tree.log_probs[::-1].copy(), tree.draws)
    for nodes in range(1, 6):
        assert prune(tree, nodes).parents.tolist() == prune(other, nodes).parents.tolist()


def test_a_draft_vocabulary() -> None:
    """q has columns for some tokens only: the others have probability 0."""
    proposal = Proposed(lambda text: np.array([0.3, 0.7]), np.array([0, 2]))
    trees = [
        (share, DraftTree(np.array([0, token]), np.array([-1, 0]), np.zeros(2, np.float32), Draws.of(proposal, 2)))
        for share, token in ((0.3, 0), (0.7, 2))
    ]
    assert farthest(law_of(iter(trees), P, 2), closed_form(P, 2)) < EXACT
    np.testing.assert_allclose(rejection.drawn_from(trees[0][1], 0, 3), [0.3, 0, 0.7])
