"""Draft trees as pure functions of small arrays: the NumPy reference of mask, depths, acceptance and pruning.

A tree of n nodes is `parents[n]`: node 0 is the root (parent -1) and every parent comes before its children.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from redraft.runtime.offers import StepLimits
from redraft.types import BoolArray, Budget, DraftTree, IntArray, Tree

_ROOT_PARENT = np.array([-1], dtype=np.int64)
_ROOT_LOG_PROB = np.zeros(1, dtype=np.float32)
_CHAIN = np.arange(-1, 1023)
"""Parents of a chain as long as most."""


@dataclass(frozen=True, eq=False)
class Layout:
    """What a tree's shape alone decides: `mask` bool[n, n] (ancestor or self) and `depths` int64[n] (root 0)."""

    mask: BoolArray
    depths: IntArray


@lru_cache(maxsize=4096)
def root_only(token: int) -> DraftTree:
    """The tree of plain decoding: nothing but the last committed token. Tokens recur: read only."""
    return DraftTree(np.array([token], dtype=np.int64), _ROOT_PARENT, _ROOT_LOG_PROB)


def chain(tokens: IntArray) -> DraftTree:
    """The tree in which every token follows the one before it, each of them certain."""
    return DraftTree(tokens, _chain_parents(len(tokens)), np.zeros(len(tokens), dtype=np.float32))


def _chain_parents(nodes: int) -> IntArray:
    return _CHAIN[:nodes] if nodes <= len(_CHAIN) else np.arange(-1, nodes - 1)


def make_tree(tokens: list[int], parents: list[int], probs: list[float]) -> DraftTree:
    """The tree of these nodes, `probs` joint and positive, its children chosen deterministically."""
    log_probs = np.log(np.array(probs, dtype=np.float32))
    return DraftTree(np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64), log_probs)


def layout(parents: IntArray) -> Layout:
    """Mask and depths of a tree. Shapes recur from step to step, so the last few thousand are kept: read only."""
    return _layout(parents.tobytes())


@lru_cache(maxsize=4096)
def _layout(parents: bytes) -> Layout:
    chain = np.frombuffer(parents, dtype=np.int64)
    mask = ancestor_mask(chain)
    return Layout(mask, mask.sum(axis=1, dtype=np.int64) - 1)


def ancestor_mask(parents: IntArray) -> BoolArray:
    """bool[n, n]: entry (i, j) is true where node j is i or an ancestor of i."""
    mask = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents.tolist()):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def accepted_path(tokens: Sequence[int], parents: Sequence[int], target_token_ids: Sequence[int]) -> tuple[int, ...]:
    """Nodes that agree with the verifier, root excluded, from the top: a node is accepted when its parent is and its
    token is the verifier's token after that parent. Siblings carry distinct tokens, so the path is unique.
    """
    path = []
    last = 0
    for node in range(1, len(tokens)):
        if parents[node] == last and tokens[node] == target_token_ids[last]:
            path.append(node)
            last = node
    return tuple(path)


def prune(tree: Tree, nodes: int) -> Tree:
    """The `nodes` likeliest nodes of `tree` beside its root, in their old order.

    A child is never likelier than its parent and comes after it, so what is kept is a tree.
    """
    if len(tree) <= nodes + 1:
        return tree
    if tree.on_device:
        return tree.first(nodes)
    log_probs = tree.log_probs.tolist()
    keep = sorted(sorted(range(len(tree)), key=log_probs.__getitem__, reverse=True)[: nodes + 1])
    if keep[-1] == nodes:
        return tree.first(nodes)
    renumbered = np.empty(len(tree), dtype=np.int64)
    renumbered[keep] = np.arange(len(keep))
    parents = renumbered[tree.parents[keep]]
    parents[0] = -1
    return DraftTree(tree.tokens[keep], parents, tree.log_probs[keep])


def merge(first: Tree, second: Tree) -> Tree:
    """Both trees under their common root: a node of the same path is one, as likely as the likelier of the two.

    Nodes of `second` that `first` lacks come after all of `first`; a child is still never likelier than its parent.
    """
    if len(second) == 1:
        return first
    if len(first) == 1:
        return second
    tokens, parents, log_probs = first.tokens.tolist(), first.parents.tolist(), first.log_probs.tolist()
    known = {(parents[node], tokens[node]): node for node in range(1, len(tokens))}
    place = [0] * len(second)
    others = zip(second.tokens.tolist(), second.parents.tolist(), second.log_probs.tolist(), strict=True)
    for node, (token, parent, log_prob) in enumerate(others):
        if node == 0:
            continue
        above = place[parent]
        same = known.get((above, token))
        if same is None:
            same = known[above, token] = len(tokens)
            tokens.append(token)
            parents.append(above)
            log_probs.append(log_prob)
        elif log_prob > log_probs[same]:
            log_probs[same] = log_prob
        place[node] = same
    return DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64), np.array(log_probs, np.float32))


def is_chain(tree: Tree) -> bool:
    """Whether every node but the first follows the one before it."""
    return len(tree) < 3 or tree.parents.tobytes() == _chain_parents(len(tree)).tobytes()


def cut(tree: Tree, limits: StepLimits, nodes: int) -> Tree:
    """The `nodes` likeliest nodes of `tree` beside its root that a step can verify, at most those that `limits` allow.

    The only place where the part of a tree is chosen that is verified.
    """
    budget = limits.budget
    if budget.width < len(tree) - 1 and not tree.on_device:  # two trees within a budget may be wider together
        tree = within(tree, Budget(len(tree), budget.depth, budget.width))
    kept = prune(tree, min(nodes, budget.nodes))
    return exact_part(kept, limits.cache_len, limits.branches, limits.block_rows)


def within(tree: Tree, budget: Budget) -> Tree:
    """The likeliest nodes of a tree within a budget, in their old order: as deep, as wide a level, and as many."""
    if min(budget.nodes, budget.depth, budget.width) >= len(tree) - 1:
        return tree
    parents, log_probs = tree.parents.tolist(), tree.log_probs.tolist()
    depths, levels, kept = [0] * len(tree), [0] * (len(tree) + 1), {0}
    for node in sorted(range(1, len(tree)), key=log_probs.__getitem__, reverse=True):
        parent = parents[node]
        depth = depths[node] = depths[parent] + 1
        if parent in kept and depth <= budget.depth and levels[depth] < budget.width and len(kept) <= budget.nodes:
            levels[depth] += 1
            kept.add(node)
    if len(kept) == len(tree):
        return tree
    keep = sorted(kept)
    place = np.zeros(len(tree), np.int64)
    place[keep] = np.arange(len(keep))
    renumbered = place[tree.parents[keep]]
    renumbered[0] = -1
    return DraftTree(tree.tokens[keep], renumbered, tree.log_probs[keep])


def exact_part(tree: Tree, cache_len: int, branches: bool, block_rows: int | None) -> Tree:
    """The part of a tree that a verifier computes to the bit as it would a chain: all of it, unless it branches.

    branches: whether the verifier takes such trees; otherwise the likeliest chain is left.
    block_rows: rows in a block of the kernels' sums (`redraft.engines.lowering.order`). Node i is row cache_len + i of
    the KV buffers. Of a tree whose rows would lie in two blocks, the likeliest nodes that fit into the first are left,
    or the likeliest chain, whichever promises more tokens.
    """
    within = block_rows is None or cache_len % block_rows + len(tree) <= block_rows
    if branches and within:
        return tree
    if tree.on_device:
        assert block_rows is not None
        return tree.first(block_rows - cache_len % block_rows - 1)
    if is_chain(tree):
        return tree
    longest = likeliest_chain(tree)
    if not branches:
        return longest
    assert block_rows is not None
    return max(prune(tree, block_rows - cache_len % block_rows - 1), longest, key=_promised)


def _promised(tree: Tree) -> float:
    """Tokens expected of a tree, the bonus included."""
    return float(np.exp(tree.log_probs).sum())


def likeliest_chain(tree: Tree) -> DraftTree:
    """The root, its likeliest child, the likeliest child of that one, and so on."""
    parents, log_probs = tree.parents.tolist(), tree.log_probs.tolist()
    path = [0]
    while children := [node for node in range(path[-1] + 1, len(parents)) if parents[node] == path[-1]]:
        path.append(max(children, key=log_probs.__getitem__))
    return DraftTree(tree.tokens[path], _chain_parents(len(path)), tree.log_probs[path])
