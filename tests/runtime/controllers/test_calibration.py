"""Statistics of trees follow acceptance: by probability, and by rank for trees on a device."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from redraft.runtime.controllers.adaptive import Adaptive
from redraft.runtime.controllers.calibration import DepthCalibration, RankCalibration
from redraft.runtime.controllers.cost import VerifyCosts
from redraft.runtime.controllers.probes import Probes
from redraft.runtime.requests.request import Request
from redraft.runtime.trees.tree import make_tree
from redraft.types import DraftTree, OfferKind, Outcome
from tests.runtime.drafts import (
    FREE,
    OTHER,
    chain,
    cut,
    drafted,
    observe,
    offers,
    outcome,
    plan,
    planned,
    planned_batch,
    sequence,
)  # fmt: skip
from tests.runtime.fakes import CURVE


def shares(tree: DraftTree) -> list[float]:
    """Return the probabilities of a chain's nodes given their parents."""
    return [math.exp(child - parent) for parent, child in pairwise(tree.log_probs.tolist())]


def test_a_new_record_starts_with_the_drafted_probabilities() -> None:
    probabilities = [0.85, 0.6, 0.43, 0.2]
    assert shares(DepthCalibration().calibrated(chain(*probabilities))) == pytest.approx(probabilities, rel=0.2)


def test_rates_are_learned_by_depth() -> None:
    """Two tokens are both likely, but the first is always correct and the second never."""
    record, tree = DepthCalibration(), chain(0.9, 0.9, 0.9)
    for _ in range(300):
        record.observe(tree, (1, OTHER))
    found = shares(record.calibrated(tree))
    assert found[0] > 0.99
    assert found[1] < 0.02
    assert found[2] == pytest.approx(shares(DepthCalibration().calibrated(tree))[2])  # nothing is known of the third
    assert record.calibrated(tree).tokens.tolist() == tree.tokens.tolist()


@pytest.mark.parametrize(
    ("tokens", "brought"), [((1, 2, 3, OTHER), 2 / 1.62), ((1, 2, OTHER), 1 / 1.62), ((1, OTHER), 0.0)]
)
def test_what_nodes_bring_below_them_is_learned(tokens: tuple[int, ...], brought: float) -> None:
    """Two nodes have children, with joint probabilities of 0.9 and 0.72."""
    record = DepthCalibration()
    assert record.tokens_below == 0.5
    for _ in range(400):
        record.observe(chain(0.9, 0.8, 0.8), tokens)
    assert record.tokens_below == pytest.approx(brought, abs=1e-3)


def test_siblings_share_what_is_below_them() -> None:
    """Only the second node has a child. Trees of one level tell nothing."""
    record = DepthCalibration()
    for _ in range(400):
        record.observe(make_tree([0, 1, 2, 3], [-1, 0, 0, 2], [1.0, 0.5, 0.4, 0.2]), (2, 3))
        record.observe(make_tree([0, 1, 2], [-1, 0, 0], [1.0, 0.7, 0.1]), (1,))
    assert record.tokens_below == pytest.approx(1 / 0.4, rel=1e-3)


def test_nothing_is_learned_after_the_text_leaves_the_tree() -> None:
    record, tree = DepthCalibration(), chain(0.9, 0.9)
    before = shares(record.calibrated(tree))[1]
    for _ in range(100):
        record.observe(tree, (OTHER, 1, 1))
    assert shares(record.calibrated(tree))[1] == pytest.approx(before, abs=1e-5)


def test_likely_and_unlikely_siblings_have_rates_of_their_own() -> None:
    record, tree = DepthCalibration(), make_tree([0, 1, 2], [-1, 0, 0], [1.0, 0.7, 0.1])
    for _ in range(300):
        record.observe(tree, (2,))
    probs = np.exp(record.calibrated(tree).log_probs)
    assert probs[1] < 0.02
    assert probs[2] > 0.98


def test_a_calibrated_child_is_never_likelier_than_its_parent_nor_impossible() -> None:
    record, tree = DepthCalibration(), chain(0.9, 1.0, 0.9, 1e-9)
    for _ in range(300):
        record.observe(tree, (OTHER,))
    found = record.calibrated(tree).log_probs
    assert (np.diff(found) < 0).all()
    assert np.isfinite(found).all()


def test_probabilities_of_a_lookup_are_not_corrected() -> None:
    controller, seq = Adaptive(VerifyCosts({1: FREE})), sequence()
    for _ in range(100):
        taken, tree = drafted(controller, seq, chain(0.9))
        observe(controller, seq, taken, tree, outcome(chain(0.9), 0))
    controller._verifying, controller._probes = VerifyCosts({1: CURVE}), Probes()
    planned(controller, seq, chain(0.9))
    assert len(cut(controller, seq, plan(OfferKind.LOOKUP, chain(0.9)))) == 2
    planned(controller, seq)
    assert len(cut(controller, seq, plan(OfferKind.FRESH), chain(0.9))) == 1


# --- trees that stay on a device -------------------------------------------------------------------------------------


class OnDevice(DraftTree):
    """A tree of this many nodes whose fields must not be read."""

    on_device = cut_at_end = True

    def __init__(self, nodes: int) -> None:
        object.__setattr__(self, "nodes", nodes)

    def __len__(self) -> int:
        nodes: int = self.__dict__["nodes"]
        return nodes

    def __getattr__(self, name: str) -> None:
        raise AssertionError(f"{name} was copied from the device")

    def first(self, nodes: int) -> DraftTree:
        return OnDevice(min(nodes + 1, len(self)))


def kept(path: tuple[int, ...]) -> Outcome:
    return Outcome(np.zeros(1, np.int64), path, OTHER, (*path, OTHER))


def settle(controller: Adaptive, seq: Request, nodes: int, path: tuple[int, ...], steps: int) -> list[int]:
    """Return the sizes of the verified trees, if the verifier accepts the nodes of `path` that it verifies."""
    sizes = []
    for _ in range(steps):
        batch = planned_batch(controller, [seq], [offers()])
        (step,) = batch.steps
        if step.plan.speculates:
            step.made = [(offer, OnDevice(nodes)) for offer in step.plan.make]
            controller.cut(batch)
            sizes.append(len(step.tree))
        step.outcome = kept(tuple(node for node in path if node < len(step.tree)))
        controller.observe(batch)
    return sizes


def test_rates_of_ranks_follow_acceptance() -> None:
    ranks = RankCalibration()
    assert ranks.shares(4) == [0.25] * 4
    for _ in range(200):
        ranks.observe(5, (1, 3))
    assert ranks.shares(4) == pytest.approx([1.0, 0.0, 1.0, 0.0], abs=0.01)


def test_rates_of_ranks_that_are_not_verified_slowly_return_to_the_assumed_one() -> None:
    ranks = RankCalibration()
    for _ in range(50):
        ranks.observe(4, (1,))
    low = ranks.shares(3)[2]
    for _ in range(40):
        ranks.observe(2, (1,))
    some = ranks.shares(3)[2]
    for _ in range(2000):
        ranks.observe(2, ())
    assert low < some < ranks.shares(3)[2] == pytest.approx(0.25, abs=0.01)


def test_a_tree_on_a_device_is_cut_to_the_ranks_that_pay() -> None:
    """Nothing is copied: the controller knows only which of the verified nodes were accepted."""
    seq, controller = sequence(), Adaptive(VerifyCosts({1: CURVE}))
    sizes = settle(controller, seq, 13, (1, 3), 300)
    assert sizes[0] == 13
    assert np.mean(sizes[-100:]) == pytest.approx(4, abs=0.5)


def test_trees_that_are_never_accepted_are_given_up() -> None:
    seq, controller = sequence(), Adaptive(VerifyCosts({1: CURVE}))
    sizes = settle(controller, seq, 13, (), 400)
    assert sizes[0] == 13
    assert sum(size > 1 for size in sizes) < 30


def test_the_better_of_a_tree_on_a_device_and_a_looked_up_one_is_verified() -> None:
    """Merging them would need a copy."""
    seq, controller = sequence(), Adaptive(VerifyCosts({1: FREE}))
    good, poor = chain(*[0.99] * 12), chain(0.02)
    taken = []
    for found in (good, poor):
        planned(controller, seq, found)
        taken.append(cut(controller, seq, plan(OfferKind.FRESH, found), OnDevice(5)))
    assert taken[0].tokens.tolist() == good.tokens.tolist()
    assert isinstance(taken[1], OnDevice)
