"""Small parts of Lyanna's runtime: the part of a tree that fits a budget."""

from __future__ import annotations

import numpy as np
import pytest

from redraft.errors import UsageError
from redraft.runtime.drafters import load_drafter
from redraft.runtime.tree import within
from redraft.types import Budget, DraftTree
from tests.runtime.fakes import FakeEngine, fake_verifier


def ranked_tree(seed: int, nodes: int) -> DraftTree:
    """The order is likeliest first, parents before children."""
    generator = np.random.default_rng(seed)
    parents = np.array([-1] + [int(generator.integers(0, node)) for node in range(1, nodes)])
    return DraftTree(np.arange(100, 100 + nodes), parents, -np.arange(nodes, dtype=np.float32))


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("budget", [Budget(4, 9, 9), Budget(30, 2, 9), Budget(30, 9, 1), Budget(5, 3, 2)], ids=str)
def test_within_a_budget_the_likeliest_nodes_stay(seed: int, budget: Budget) -> None:
    """A node is missing only if it is too deep, its parent is missing, its level is full, or the tree is full."""
    tree = ranked_tree(seed, 14)
    found = within(tree, budget)
    kept: dict[int, int] = {0: 0}  # old node -> depth
    for node in range(1, len(tree)):
        depth = kept.get(int(tree.parents[node]), 99) + 1
        level = sum(other == depth for other in kept.values())
        if depth <= budget.depth and level < budget.width and len(kept) <= budget.nodes:
            kept[node] = depth
    assert found.tokens.tolist() == [100 + node for node in kept]
    assert found.log_probs.tolist() == [-float(node) for node in kept]
    order = list(kept)
    assert found.parents.tolist() == [-1, *(order.index(int(tree.parents[node])) for node in order[1:])]


def test_a_tree_that_fits_is_given_as_it_is() -> None:
    tree = ranked_tree(1, 8)
    assert within(tree, Budget(7, 8, 8)) is tree


def test_without_a_bundle_there_is_no_drafter() -> None:
    with pytest.raises(
        UsageError, match="no drafter 'lyanna'; choose one of none, ngram, suffix, lookahead, or build it with"
    ):
        load_drafter("lyanna", fake_verifier(FakeEngine(), 64))
