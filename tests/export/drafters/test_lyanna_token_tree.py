"""The reference of Algorithm 1 against an enumeration of every path over a tiny vocabulary, and rows of tables."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from redraft import names
from redraft.methods.chains import whole_tree
from redraft.methods.lyanna_token_info import lookup

from .token_tree import Tree, build_subtree

VOCABULARY, STEPS, WIDTH, ROOT = 5, 3, 2, 4
Path = tuple[int, ...]


def numbers(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Step logits [N, V], and the numbers that each token adds [V, V]."""
    generator = np.random.default_rng(seed)
    shapes = (STEPS, VOCABULARY), (VOCABULARY, VOCABULARY)
    logits, info = (generator.normal(scale=2.0, size=shape).astype(np.float32) for shape in shapes)
    return logits, info


def joint_log_probs(logits: np.ndarray, info: np.ndarray, root: int) -> dict[Path, float]:
    """Every path of every length with its joint log probability: the product of softmax(l_i + info[previous])."""
    found: dict[Path, float] = {(): 0.0}
    for depth in range(1, len(logits) + 1):
        for path in product(range(VOCABULARY), repeat=depth):
            before = (root, *path)[-2]
            scores = np.exp((logits[depth - 1] + info[before]).astype(np.float64))
            found[path] = found[path[:-1]] + float(np.log(scores[path[-1]] / scores.sum()))
    return found


def chosen_paths(joint: dict[Path, float], steps: int, width: int) -> set[Path]:
    """The paths of Algorithm 1: the `width` best children of each of the `width` best nodes of a level."""
    chosen, going_on = {()}, [()]
    for depth in range(1, steps + 1):
        level = []
        for parent in going_on:
            children = [path for path in joint if len(path) == depth and path[:-1] == parent]
            level += sorted(children, key=lambda path: -joint[path])[:width]
        chosen |= set(level)
        going_on = sorted(level, key=lambda path: -joint[path])[:width]
    return chosen


def paths_of(tree: Tree) -> list[Path]:
    """Every node's tokens, without the root's. A parent must come before its children."""
    paths: list[Path] = [()]
    for node in range(1, len(tree.tokens)):
        assert 0 <= tree.parents[node] < node
        paths.append((*paths[tree.parents[node]], tree.tokens[node]))
    assert tree.parents[0] == -1
    assert len(set(paths)) == len(paths)
    return paths


def check(tree: Tree, joint: dict[Path, float], steps: int, width: int) -> None:
    paths = paths_of(tree)
    assert set(paths) == chosen_paths(joint, steps, width)
    assert tree.log_probs == pytest.approx([joint[path] for path in paths], abs=1e-5)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("width", [1, WIDTH, 4])
def test_a_subtree_is_the_algorithms_own(seed: int, width: int) -> None:
    logits, info = numbers(seed)
    tree = build_subtree(logits, ROOT, info.__getitem__, width)
    assert tree.tokens[0] == ROOT
    assert len(tree.tokens) == whole_tree(STEPS, width)
    check(tree, joint_log_probs(logits, info, ROOT), STEPS, width)


@pytest.mark.parametrize("seed", range(4))
def test_top_nodes_are_a_tree_in_order_of_probability(seed: int) -> None:
    logits, info = numbers(seed)
    tree = build_subtree(logits, ROOT, info.__getitem__, WIDTH)
    joint = joint_log_probs(logits, info, ROOT)
    ranked = sorted(chosen_paths(joint, STEPS, WIDTH), key=lambda path: -joint[path])
    for nodes in range(1, len(tree.tokens) + 1):
        assert paths_of(tree.top_nodes(nodes)) == ranked[:nodes]


def test_tables_are_read_in_their_form() -> None:
    """Dense values, scaled codes and factors, for the whole vocabulary or with a row for the tokens outside of it."""

    def found(token: int, **tables: np.ndarray) -> list[float]:
        named = {f"{names.TOKEN_INFO}{name}": table for name, table in tables.items()}
        return lookup({**named, names.DRAFT_VOCABULARY: np.array([7])}, token).tolist()

    assert found(1, table=np.arange(9, dtype=np.float16).reshape(3, 3)) == [3, 4, 5]
    codes, scales = np.array([[1, -2], [3, 4]], np.int8), np.array([[0.5], [2.0]], np.float32)
    assert found(0, table=codes, scales=scales) == [0.5, -1.0]
    left, right = np.array([[1, 2], [3, 4]], np.float32), np.array([[1, 0], [0, 10]], np.float32)
    assert found(1, left=left, right=right) == [3, 40]
    pruned, index = np.array([[1, 2], [3, 4], [5, 6]], np.float16), np.array([1, 2, 2, 0])
    assert [found(token, table=pruned, index=index) for token in range(4)] == [[3, 4], [5, 6], [5, 6], [1, 2]]
