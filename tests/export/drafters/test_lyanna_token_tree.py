"""Algorithms 1 and 2 against an enumeration of every path over a tiny vocabulary."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from redraft import names
from redraft.export.drafters.lyanna_token_tree import Tree, build_subtree, resample
from redraft.methods.lyanna import tree_size
from redraft.methods.lyanna_token_info import lookup

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


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("width", [1, WIDTH, 4])
def test_a_subtree_is_the_algorithms_own(seed: int, width: int) -> None:
    logits, info = numbers(seed)
    tree = build_subtree(logits, ROOT, info.__getitem__, width)
    assert tree.tokens[0] == ROOT
    assert len(tree.tokens) == tree_size(STEPS, width)
    check(tree, joint_log_probs(logits, info, ROOT), STEPS, width)


@pytest.mark.parametrize("first_step", [1, 2, 3])
def test_resampling_is_the_subtree_of_the_steps_that_are_left(first_step: int) -> None:
    logits, info = numbers(3)
    tree = resample(logits, first_step, 1, info.__getitem__, WIDTH, threshold=0)
    check(tree, joint_log_probs(logits[first_step:], info, 1), STEPS - first_step, WIDTH)


def test_too_few_steps_are_not_resampled() -> None:
    """With threshold r, more than r steps must remain."""
    logits, info = numbers(3)
    for first_step, threshold in product((1, 2), (0, 1, 2)):
        tree = resample(logits, first_step, 1, info.__getitem__, WIDTH, threshold)
        assert (len(tree.tokens) > 1) == (STEPS - first_step > threshold)
        assert (tree.tokens[0], tree.parents[0], tree.log_probs[0]) == (1, -1, 0.0)


@pytest.mark.parametrize("seed", range(10))
def test_top_nodes_are_a_tree_in_order_of_probability(seed: int) -> None:
    logits, info = numbers(seed)
    tree = build_subtree(logits, ROOT, info.__getitem__, WIDTH)
    joint = joint_log_probs(logits, info, ROOT)
    ranked = sorted(chosen_paths(joint, STEPS, WIDTH), key=lambda path: -joint[path])
    for nodes in range(1, len(tree.tokens) + 1):
        assert paths_of(tree.top_nodes(nodes)) == ranked[:nodes]


def test_of_equally_likely_nodes_the_earlier_comes_first() -> None:
    """Siblings follow ids. Of certain tokens a child is still below its parent: libraries break ties differently."""
    certain = np.full((STEPS, VOCABULARY), -np.inf, np.float32)
    certain[:, 2] = 0.0
    chain = build_subtree(certain, ROOT, lambda token: np.zeros(VOCABULARY, np.float32), 1)
    assert (chain.tokens[:3], chain.parents[:3]) == ([ROOT, 2, 2], [-1, 0, 1])
    assert np.all(np.diff(np.float32(chain.log_probs)) < 0)
    assert chain.log_probs == pytest.approx([0.0] * (STEPS + 1), abs=1e-5)
    even = build_subtree(np.zeros((1, VOCABULARY), np.float32), ROOT, lambda token: np.zeros(VOCABULARY), 3)
    assert even.tokens == [ROOT, 0, 1, 2]
    assert even.top_nodes(3).tokens == [ROOT, 0, 1]


def test_a_scale_and_a_vocabulary_apply_to_every_level() -> None:
    """The scale multiplies logits and token information. Information of a node is that of its token, not its column."""
    logits, info = numbers(2)
    vocabulary = np.array([1, 2, 4])
    tree = build_subtree(logits[:, vocabulary], ROOT, lambda token: info[token, vocabulary], WIDTH, 0.5, vocabulary)
    masked = np.full_like(logits, -np.inf)
    masked[:, vocabulary] = logits[:, vocabulary] * 0.5
    check(tree, joint_log_probs(masked, info * 0.5, ROOT), STEPS, WIDTH)


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
