"""Tree functions equal simple, slow definitions, over every small tree."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

from redraft.runtime.sampling.sampler import Greedy
from redraft.runtime.trees.device_tree import DeviceTree
from redraft.runtime.trees.offers import StepLimits
from redraft.runtime.trees.tree import (
    accepted_path,
    ancestor_mask,
    chain,
    cut,
    exact_part,
    is_chain,
    layout,
    likeliest_chain,
    make_tree,
    merge,
    pinned_nodes,
    prune,
    within,
)
from redraft.types import Budget, DraftTree

SMALL_TREES = [[-1, *parents] for n in range(5) for parents in product(*(range(i + 1) for i in range(n)))]


def ancestors(parents: list[int], node: int) -> list[int]:
    return [node] if parents[node] < 0 else [*ancestors(parents, parents[node]), node]


@pytest.mark.parametrize("parents", SMALL_TREES, ids=str)
def test_mask_and_depths(parents: list[int]) -> None:
    found = layout(np.array(parents))
    for node in range(len(parents)):
        assert np.flatnonzero(found.mask[node]).tolist() == ancestors(parents, node)
        assert found.depths[node] == len(ancestors(parents, node)) - 1
    assert np.array_equal(found.mask, ancestor_mask(np.array(parents)))


def test_accepted_path_is_the_longest_one_that_agrees() -> None:
    """All trees of four drafted nodes over a vocabulary of two, with all target tokens."""
    count = 0
    for parents in SMALL_TREES:
        for tokens in product(range(2), repeat=len(parents)):
            siblings = list(zip(parents, tokens, strict=True))
            if len(set(siblings)) < len(siblings):
                continue
            for said in product(range(2), repeat=len(parents)):
                lines = [ancestors(parents, node) for node in range(len(parents))]
                agreeing = [line for line in lines if all(tokens[b] == said[a] for a, b in pairwise(line))]
                assert list(accepted_path(tokens, parents, said)) == max(agreeing, key=len)[1:]
                count += 1
    assert count > 1000


@pytest.mark.parametrize("parents", SMALL_TREES, ids=str)
def test_pruning_keeps_the_likeliest_nodes_and_their_ancestors(parents: list[int]) -> None:
    rng = np.random.default_rng(len(parents))
    probs = [1.0]
    for parent in parents[1:]:
        probs.append(probs[parent] * rng.uniform(0.1, 1.0))
    tree = make_tree(list(range(10, 10 + len(parents))), parents, probs)
    for nodes in range(len(parents) + 1):
        kept = prune(tree, nodes)
        best = sorted(range(len(parents)), key=lambda node: -probs[node])[: nodes + 1]
        assert kept.tokens.tolist() == [10 + node for node in sorted(best)]
        for token, parent in zip(kept.tokens[1:] - 10, kept.parents[1:], strict=True):
            assert kept.tokens[parent] - 10 == parents[token]
        assert np.array_equal(np.exp(kept.log_probs), np.float32(np.exp(tree.log_probs[sorted(best)])))


def test_greedy_accepts_a_path() -> None:
    """Root 5 has children 6 and 7. The target tokens are 7, then 9: node 2 is accepted, 9 is the bonus."""
    logits = np.zeros((3, 10), np.float32)
    logits[[0, 1, 2], [7, 1, 9]] = [3.0, 2.0, 1.0]
    sampler = Greedy(record_logit_margins=True)
    outcome = sampler.verify(logits, make_tree([5, 6, 7], [-1, 0, 0], [1, 0.5, 0.5]), [1, 2, 3, 4, 5])
    assert (outcome.path, outcome.bonus, outcome.tokens) == ((2,), 9, (7, 9))
    assert outcome.target_token_ids == [7, 1, 9]
    assert sampler.logit_margins == [3.0, 1.0]


# --- merging two trees -----------------------------------------------------------------------------------------------


def random_tree(generator: np.random.Generator, nodes: int) -> DraftTree:
    """Siblings are distinct tokens out of three, and no child is likelier than its parent."""
    tokens, parents, probs, taken = [9], [-1], [1.0], set()
    while len(tokens) < nodes:
        parent, token = int(generator.integers(len(tokens))), int(generator.integers(3))
        if (parent, token) not in taken:
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            probs.append(probs[parent] * float(generator.uniform(0.1, 1)))
    return make_tree(tokens, parents, probs)


def by_path(tree: DraftTree) -> dict[tuple[int, ...], float]:
    """Return log probabilities by the tokens below the root. A parent must come before its children."""
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree)):
        parent = int(tree.parents[node])
        assert 0 <= parent < node
        paths.append((*paths[parent], int(tree.tokens[node])))
    assert len(set(paths)) == len(paths)
    return dict(zip(paths, tree.log_probs.tolist(), strict=True))


@pytest.mark.parametrize("seed", range(30))
def test_merged_trees_have_every_path_once_as_likely_as_the_likelier(seed: int) -> None:
    generator = np.random.default_rng(seed)
    first, second = (random_tree(generator, int(generator.integers(1, 9))) for _ in range(2))
    merged, one, other = by_path(merge(first, second)), by_path(first), by_path(second)
    assert merged == {path: max(one.get(path, -99), other.get(path, -99)) for path in one.keys() | other.keys()}
    assert all(merged[path] <= merged[path[:-1]] for path in merged if path)
    tree = merge(first, second)
    assert (tree.tokens[0], tree.parents[0], tree.log_probs[0]) == (9, -1, 0.0)
    for nodes in range(len(tree)):
        by_path(prune(tree, nodes))


BRANCHED = DraftTree(
    np.array([5, 6, 7, 8, 9]), np.array([-1, 0, 0, 2, 1]), np.array([0, -2.0, -1.0, -1.5, -2.5], np.float32)
)


def test_a_tree_within_a_block_or_a_chain_across_two_is_verified_whole() -> None:
    line = chain(np.arange(5))
    assert exact_part(BRANCHED, 123, True, 128) is BRANCHED
    assert exact_part(BRANCHED, 128, True, 128) is BRANCHED
    assert exact_part(line, 126, True, 128) is line
    assert exact_part(line, 126, False, 128) is line
    assert exact_part(BRANCHED, 126, True, None) is BRANCHED
    drafted = DeviceTree(None, 0, 4)  # type: ignore[arg-type] - of no drafts
    assert exact_part(drafted, 126, False, None) is exact_part(drafted, 120, False, 128) is drafted


@pytest.mark.parametrize(("past", "left"), [(124, [5, 6, 7, 8]), (126, [5, 7, 8]), (127, [5, 7, 8])])
def test_a_tree_in_two_blocks_is_cut_to_the_better_of_likeliest_nodes_and_likeliest_chain(
    past: int, left: list[int]
) -> None:
    assert exact_part(BRANCHED, past, True, 128).tokens.tolist() == left


def test_without_branches_a_tree_is_cut_to_the_likeliest_chain() -> None:
    left = exact_part(BRANCHED, 0, False, 128)
    assert left.tokens.tolist() == [5, 7, 8]
    assert left.parents.tolist() == [-1, 0, 1]
    assert left.log_probs.tolist() == [0, -1.0, -1.5]
    assert is_chain(left)
    assert not is_chain(BRANCHED)


def test_a_chain_may_be_of_any_length() -> None:
    long = chain(np.arange(1500))
    assert is_chain(long)
    assert likeliest_chain(long).parents.tolist() == long.parents.tolist()


def test_two_merged_trees_are_cut_to_the_likelier_branch() -> None:
    """The unlikely branch comes first. A budget of width 1 takes one of them."""
    both = merge(make_tree([5, 6, 7], [-1, 0, 1], [1.0, 0.2, 0.1]), make_tree([5, 8, 9], [-1, 0, 1], [1.0, 0.9, 0.8]))
    kept = cut(both, StepLimits(Budget(4, 4, 1)), 4)
    assert kept.tokens.tolist() == [5, 8, 9]
    assert kept.parents.tolist() == [-1, 0, 1]


# --- pinned nodes ----------------------------------------------------------------------------------------------------


def pinning(tree: DraftTree, *nodes: int) -> DraftTree:
    return replace(tree, pinned=np.isin(np.arange(len(tree)), nodes))


def kept(tree: DraftTree) -> tuple[list[int], list[int]]:
    """Return the tokens after the root, and those of them that are pinned."""
    pinned = [] if tree.pinned is None else tree.tokens[tree.pinned].tolist()
    return tree.tokens[1:].tolist(), pinned


PINNED = pinning(make_tree([9, 1, 2, 3, 4, 5], [-1, 0, 1, 0, 3, 0], [1.0, 0.9, 0.8, 0.02, 0.01, 0.5]), 3, 4)
"""A likely chain 1, 2, an unlikely pinned chain 3, 4, and a likely leaf 5."""


@pytest.mark.parametrize(
    ("nodes", "left", "pinned"),
    [
        (5, [1, 2, 3, 4, 5], [3, 4]),
        (4, [1, 2, 3, 4], [3, 4]),
        (3, [1, 3, 4], [3, 4]),
        (2, [3, 4], [3, 4]),
        (1, [1], []),
        (0, [], []),
    ],
)
def test_a_cut_keeps_all_pinned_nodes_or_releases_them(nodes: int, left: list[int], pinned: list[int]) -> None:
    for part in (
        prune(PINNED, nodes), cut(PINNED, StepLimits(Budget(9, 9, 9)), nodes),
        cut(PINNED, StepLimits(Budget(nodes, 9, 9)), 9), within(PINNED, Budget(nodes, 9, 9)),
    ):  # fmt: skip
        assert kept(part) == (left, pinned)
        by_path(part)


def test_pinned_nodes_take_the_places_of_likelier_ones_on_a_level() -> None:
    assert kept(within(PINNED, Budget(9, 9, 2))) == ([1, 2, 3, 4], [3, 4])
    assert kept(within(PINNED, Budget(9, 9, 1))) == ([3, 4], [3, 4])
    assert kept(within(PINNED, Budget(9, 1, 9))) == ([1, 3, 5], [])  # node 4 is too deep


def test_a_chain_or_a_block_that_lacks_a_pinned_node_releases_all() -> None:
    assert kept(exact_part(PINNED, 0, False, None)) == ([1, 2], [])
    assert kept(exact_part(PINNED, 124, True, 128)) == ([1, 3, 4], [3, 4])
    assert kept(exact_part(PINNED, 126, True, 128)) == ([1, 2], [])
    line = pinning(make_tree([9, 1, 2], [-1, 0, 1], [1.0, 0.1, 0.1]), 1, 2)
    assert kept(exact_part(line, 127, False, 128)) == ([1, 2], [1, 2])


@pytest.mark.parametrize("seed", range(20))
def test_merged_trees_pin_the_paths_that_either_pins(seed: int) -> None:
    generator = np.random.default_rng(seed)
    trees = []
    for _ in range(2):
        tree = random_tree(generator, int(generator.integers(2, 9)))
        end = int(generator.integers(len(tree)))
        trees.append(pinning(tree, *ancestors(tree.parents.tolist(), end)[1:]) if generator.random() < 0.7 else tree)
    merged = merge(*trees)
    pinned = [{path for path, pin in zip(by_path(tree), pins(tree), strict=True) if pin} for tree in (*trees, merged)]
    assert pinned[2] == pinned[0] | pinned[1]
    assert pinned_nodes(merged) == len(pinned[2])


def pins(tree: DraftTree) -> list[bool]:
    return [False] * len(tree) if tree.pinned is None else tree.pinned.tolist()


# --- within a budget -------------------------------------------------------------------------------------------------


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
