"""Trees that a controller is asked about, what becomes of them, and texts that they are for."""

from __future__ import annotations

from redraft.runtime.controller import Adaptive
from redraft.runtime.cost import CostCurve
from redraft.runtime.sampler import Greedy
from redraft.runtime.sequence import Sequence
from redraft.runtime.tree import make_tree, root_only
from redraft.types import DraftTree, Outcome, Source

FREE = CostCurve.from_points({1: 1.0, 32: 1.0})
OTHER = 999
"""A token that no tree has."""


def sequence(limit: int = 1000) -> Sequence:
    return Sequence([1], 1, limit, frozenset(), Greedy())


def chain(*shares: float) -> DraftTree:
    probs = [1.0]
    for share in shares:
        probs.append(probs[-1] * share)
    return make_tree(list(range(len(probs))), list(range(-1, len(probs) - 1)), probs)


def outcome(tree: DraftTree, accepted: int) -> Outcome:
    """The first `accepted` tokens of a chain come true, then one that it has not."""
    path = tuple(range(1, accepted + 1))
    return Outcome(tree.tokens, path, OTHER, (*path, OTHER))


def drafted(controller: Adaptive, seq: Sequence, tree: DraftTree) -> DraftTree:
    """What is verified of a tree that a drafter makes whenever it is asked to, the lookup finding nothing."""
    nothing = root_only(0)
    plan = controller.plan(seq, nothing, 0)
    return controller.cut([seq], [plan], [nothing], [tree if plan is Source.FRESH else None])[0]
