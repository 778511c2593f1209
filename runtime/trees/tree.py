"""Draft trees as pure functions of small arrays. They are the NumPy reference of mask, depths, acceptance and pruning.

A tree of n nodes is `parents[n]`: node 0 is the root (parent -1) and every parent comes before its children.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from redraft.runtime.trees.offers import StepLimits
from redraft.types import BoolArray, Budget, DraftTree, Draws, IntArray, Tree

_ROOT_PARENT = np.array([-1], dtype=np.int64)
_ROOT_LOG_PROB = np.zeros(1, dtype=np.float32)
_CHAIN = np.arange(-1, 1023)
"""Parents of a chain that is longer than most drafts."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Arrays of a tree's shape: `mask` bool[n, n] (ancestor or self) and `depths` int64[n] (root 0)."""

    mask: BoolArray
    depths: IntArray


@lru_cache(maxsize=4096)
def root_only(token: int) -> DraftTree:
    """Return the tree of plain decoding: the last committed token alone. Calls share results, so they are read only."""
    return DraftTree(np.array([token], dtype=np.int64), _ROOT_PARENT, _ROOT_LOG_PROB)


def chain(tokens: IntArray) -> DraftTree:
    """Return the tree in which every token follows the one before it, each with probability 1."""
    return DraftTree(tokens, _chain_parents(len(tokens)), np.zeros(len(tokens), dtype=np.float32))


def _chain_parents(nodes: int) -> IntArray:
    return _CHAIN[:nodes] if nodes <= len(_CHAIN) else np.arange(-1, nodes - 1)


def make_tree(tokens: list[int], parents: list[int], probs: list[float], pinned: list[bool] | None = None) -> DraftTree:
    """Return the tree of these nodes. `probs` are joint and positive, and its children are chosen deterministically."""
    log_probs = np.log(np.array(probs, dtype=np.float32))
    pins = np.array(pinned, np.bool_) if pinned is not None and any(pinned) else None
    return DraftTree(np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64), log_probs, pinned=pins)


def layout(parents: IntArray) -> Layout:
    """Return mask and depths of a tree. The last few thousand shapes are cached, so results are read only."""
    return _layout(parents.tobytes())


@lru_cache(maxsize=4096)
def _layout(parents: bytes) -> Layout:
    chain = np.frombuffer(parents, dtype=np.int64)
    mask = ancestor_mask(chain)
    return Layout(mask, mask.sum(axis=1, dtype=np.int64) - 1)


def ancestor_mask(parents: IntArray) -> BoolArray:
    """Return bool[n, n]: entry (i, j) is true if node j is i or an ancestor of i."""
    mask = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents.tolist()):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def depths_of(parents: Sequence[int]) -> list[int]:
    """Return the depth of each node, 0 for the root."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


def accepted_path(tokens: Sequence[int], parents: Sequence[int], target_token_ids: Sequence[int]) -> tuple[int, ...]:
    """Return the nodes that agree with the verifier, root excluded, from the top.

    A node is accepted if its parent is and its token is the parent's target token. Siblings have distinct tokens, so
    the path is unique.
    """
    path = []
    last = 0
    for node in range(1, len(tokens)):
        if parents[node] == last and tokens[node] == target_token_ids[last]:
            path.append(node)
            last = node
    return tuple(path)


def pinned_nodes(tree: Tree) -> int:
    """Return the number of pinned nodes."""
    return 0 if tree.pinned is None else int(tree.pinned.sum())


def _ranks(tree: Tree, nodes: int) -> list[float]:
    """Return the logarithms by which a cut to `nodes` nodes selects. Pinned nodes count as certain if all fit."""
    pinned = tree.pinned
    ranks: list[float] = tree.log_probs.tolist()
    if pinned is None or pinned_nodes(tree) > nodes:
        return ranks
    return [0.0 if pin else rank for pin, rank in zip(pinned.tolist(), ranks, strict=True)]


def prune(tree: Tree, nodes: int) -> Tree:
    """Return the `nodes` likeliest nodes of `tree` after its root, in their old order. Pinned nodes come first.

    A child is never likelier than its parent and comes after it, so the result is a tree. Of a tree that may be cut
    only at its end, the result is the first nodes.
    """
    if len(tree) <= nodes + 1:
        return tree
    if tree.cut_at_end:
        return tree.first(nodes)
    ranks = _ranks(tree, nodes)
    keep = sorted(sorted(range(len(tree)), key=ranks.__getitem__, reverse=True)[: nodes + 1])
    if keep[-1] == nodes:
        return tree.first(nodes)
    return part_of(tree, keep)


def part_of(tree: Tree, keep: list[int]) -> DraftTree:
    """Return the nodes `keep` of a tree on the host, in their order: the root, and nodes whose parents stay too."""
    place = np.zeros(len(tree), np.int64)
    place[keep] = np.arange(len(keep))
    parents = place[tree.parents[keep]]
    parents[0] = -1
    if isinstance(tree, DraftTree):
        return tree.part(keep, parents)
    return DraftTree(tree.tokens[keep], parents, tree.log_probs[keep])


def merge(first: Tree, second: Tree) -> Tree:
    """Merge both trees at their root. Nodes with the same path become one, with the larger probability of the two.

    Nodes of `second` that `first` lacks come after all of `first`. A child is still never likelier than its parent.
    Nodes that either pins are pinned. Draws of `second` are kept, also of nodes that `first` has. Raises ValueError if
    nodes of `first` were drawn.
    """
    if first.draws is not None:
        raise ValueError("a tree of draws must come second in a merge, since its nodes come last in a cut")
    if len(second) == 1:
        return first
    if len(first) == 1:
        return second
    tokens, parents, log_probs = first.tokens.tolist(), first.parents.tolist(), first.log_probs.tolist()
    known = {(parents[node], tokens[node]): node for node in range(1, len(tokens))}
    place = [0] * len(second)
    repeats = second.draws is not None and second.draws.repeats  # each draw needs a node of its own
    others = zip(second.tokens.tolist(), second.parents.tolist(), second.log_probs.tolist(), strict=True)
    for node, (token, parent, log_prob) in enumerate(others):
        if node == 0:
            continue
        above = place[parent]
        same = None if repeats else known.get((above, token))
        if same is None:
            same = known[above, token] = len(tokens)
            tokens.append(token)
            parents.append(above)
            log_probs.append(log_prob)
        elif log_prob > log_probs[same]:
            log_probs[same] = log_prob
        place[node] = same
    draws = second.draws and _moved(second.draws, place, len(first), len(tokens))
    arrays = np.array(tokens, np.int64), np.array(parents, np.int64), np.array(log_probs, np.float32)
    return DraftTree(*arrays, draws, _pinned_of_both(first, second, place, len(tokens)))


def shared_nodes(tree: Tree, other: Tree) -> list[int]:
    """Return the nodes of `tree` after its root whose paths `other` has too."""
    known = {key: node for node, key in enumerate(zip(other.parents.tolist(), other.tokens.tolist(), strict=True))}
    place = [0]
    for parent, token in zip(tree.parents.tolist()[1:], tree.tokens.tolist()[1:], strict=True):
        place.append(known.get((place[parent], token), len(other)))
    return [node for node in range(1, len(tree)) if place[node] < len(other)]


def _pinned_of_both(first: Tree, second: Tree, place: list[int], nodes: int) -> BoolArray | None:
    """Return the pinned nodes of a merged tree: node i of `second` is now place[i]."""
    if first.pinned is None and second.pinned is None:
        return None
    pinned = np.zeros(nodes, np.bool_)
    if first.pinned is not None:
        pinned[: len(first)] = first.pinned
    if second.pinned is not None:
        pinned[place] |= second.pinned
    return pinned


def _moved(draws: Draws, place: list[int], chosen: int, nodes: int) -> Draws:
    """Return the draws of a tree of `nodes` nodes: node i is now place[i], and the first `chosen` were chosen too."""
    order, also_chosen = np.full(nodes, -1), np.arange(nodes) < chosen
    order[place] = draws.order
    also_chosen[place] |= draws.chosen
    return Draws(draws.proposal, order, also_chosen, draws.repeats)


def is_chain(tree: Tree) -> bool:
    """True if every node but the first follows the one before it."""
    return len(tree) < 3 or tree.parents.tobytes() == _chain_parents(len(tree)).tobytes()


def cut(tree: Tree, limits: StepLimits, nodes: int) -> Tree:
    """Return the `nodes` likeliest nodes of `tree` after its root that a step can verify, at most those in `limits`.

    Only this function selects the part of a tree that is verified.
    """
    budget = limits.budget
    if budget.width < len(tree) - 1 and not tree.on_device:  # two trees within a budget may be wider when merged
        tree = within(tree, Budget(len(tree), budget.depth, budget.width))
    likeliest = prune(tree, min(nodes, budget.nodes))
    return exact_part(likeliest, limits.cache_len, limits.branches, limits.block_rows)


def join(found: Tree, made: Tree | None, limits: StepLimits, nodes: int) -> Tree:
    """Merge a ready tree and a new one, and cut the result as `cut` does.

    A merged tree of draws has fewer nodes if draws equal chosen nodes. So the number of draws to keep is decided before
    the merge, from the sizes of both trees alone. If a step may not verify that many nodes, the new tree stays alone.
    A tree on a device is copied to the host first, unless the other is a root alone.
    """
    if made is None or made.draws is None:
        joined = found if made is None else made if len(found) == 1 else merge(found, made)
        return cut(joined, limits, nodes)
    made = cut(made, limits, nodes)
    space = min(nodes, limits.budget.nodes) - (len(found) - 1)
    if space < 1 or len(made) == 1:
        return cut(found, limits, nodes)
    rows = len(found) + min(space, len(made) - 1)
    fits = limits.block_rows is None or limits.cache_len % limits.block_rows + rows <= limits.block_rows
    if len(found) == 1 or not (limits.branches and fits and _level_bound(found, made) <= limits.budget.width):
        return made
    return merge(found, made.first(space))


def _level_bound(first: Tree, second: Tree) -> int:
    """Return an upper bound of the nodes on a level of two merged trees."""
    counts: list[int] = np.bincount(
        np.concatenate([layout(tree.parents).depths[1:] for tree in (first, second)])
    ).tolist()
    return max(counts)


def within(tree: Tree, budget: Budget) -> Tree:
    """Return the likeliest nodes of a tree within a budget (depth, width of a level, nodes), in their old order.

    Pinned nodes come first. Of a tree that may be cut only at its end, the first nodes take the place of the likeliest.
    """
    if min(budget.nodes, budget.depth, budget.width) >= len(tree) - 1:
        return tree
    parents, ranks = tree.parents.tolist(), _ranks(tree, budget.nodes)
    depths, levels, stays = [0] * len(tree), [0] * (len(tree) + 1), {0}
    nodes = range(1, len(tree))
    for node in nodes if tree.cut_at_end else sorted(nodes, key=ranks.__getitem__, reverse=True):
        parent = parents[node]
        depth = depths[node] = depths[parent] + 1
        if parent in stays and depth <= budget.depth and levels[depth] < budget.width and len(stays) <= budget.nodes:
            levels[depth] += 1
            stays.add(node)
    if len(stays) == len(tree):
        return tree
    return part_of(tree, sorted(stays))


def exact_part(tree: Tree, cache_len: int, branches: bool, block_rows: int | None) -> Tree:
    """Return the part of a tree whose logits equal a chain's to the bit: all of it, unless it branches.

    branches: True if the verifier accepts such trees; otherwise the result is the likeliest chain.
    block_rows: rows in a block of the kernels' sums (`redraft.engines.lowering.order`). Node i is row cache_len + i of
    the KV buffers. If a tree's rows would be in two blocks, two parts are possible: the likeliest nodes that fit
    into the first block, and the likeliest chain. The result is the part with more expected tokens.
    """
    within = block_rows is None or cache_len % block_rows + len(tree) <= block_rows
    if within and (branches or tree.on_device):  # one on the device is copied first unless it may be verified there
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
    fitting = prune(tree, block_rows - cache_len % block_rows - 1)
    return max(fitting, longest, key=len if tree.cut_at_end else _promised)


def _promised(tree: Tree) -> float:
    """Return the expected tokens of a tree, the bonus included. Each pinned node counts as one."""
    return float(np.exp(_ranks(tree, len(tree))).sum())


def likeliest_chain(tree: Tree) -> DraftTree:
    """Return the root, its likeliest child, the likeliest child of that one, and so on. Of draws, return the first."""
    parents, log_probs = tree.parents.tolist(), tree.log_probs.tolist()
    path = [0]
    while children := [node for node in range(path[-1] + 1, len(parents)) if parents[node] == path[-1]]:
        path.append(children[0] if tree.cut_at_end else max(children, key=log_probs.__getitem__))
    return part_of(tree, path)
