"""The best static tree of heads' accuracies, by enumeration of all trees, and options that cannot be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from redraft.errors import UsageError
from redraft.methods.static_tree import StaticTreeBuild, best_tree


def all_trees(accuracies: Sequence[Sequence[float]], nodes: int) -> list[frozenset[tuple[int, ...]]]:
    """Every set of so many nodes that has the parent of each of its nodes."""
    every = [
        path
        for depth in range(1, len(accuracies) + 1)
        for path in product(*(range(len(shares)) for shares in accuracies[:depth]))
    ]
    trees = {frozenset[tuple[int, ...]]()}
    for _ in range(nodes):
        trees = {
            tree | {path}
            for tree in trees
            for path in every
            if path not in tree and (len(path) == 1 or path[:-1] in tree)
        }
    return list(trees)


@pytest.mark.parametrize("nodes", [2, 5])
@pytest.mark.parametrize("seed", range(4))
def test_no_tree_of_this_size_has_more_expected_tokens(nodes: int, seed: int) -> None:
    """By enumeration of all trees. Ties and shares of 0 and 1 are among the accuracies."""
    accuracies = np.random.default_rng(seed).choice([0, 0.1, 0.2, 0.3, 0.5, 0.9, 1], (3, 2)).tolist()
    ranked = [sorted(shares, reverse=True) for shares in accuracies]

    def promised(tree: frozenset[tuple[int, ...]]) -> float:
        return sum(np.prod([ranked[depth][rank] for depth, rank in enumerate(path)]) for path in tree)

    found = best_tree(accuracies, nodes)
    assert len(found) == nodes
    assert sum(found.values()) == pytest.approx(max(map(promised, all_trees(ranked, nodes))))
    assert list(found.values()) == sorted(found.values(), reverse=True)
    for place, path in enumerate(found):  # a parent and a better sibling come first
        before = {(), *list(found)[:place]}
        assert path[:-1] in before
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in before


def test_a_tree_has_no_more_nodes_than_there_are_candidates() -> None:
    assert list(best_tree([[0.5, 0.2], [0.6]], 99)) == [(0,), (0, 0), (1,), (1, 0)]


def test_options_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="nodes must be a number from 1 to 255, not 256"):
        StaticTreeBuild(nodes=256)
    with pytest.raises(UsageError, match="steps must be a number from 1 to 16, not 17"):
        StaticTreeBuild(steps=17)
