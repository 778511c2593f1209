"""The adaptive controller ends drafts inside: where one more level costs more time than it promises to save."""

from __future__ import annotations

import pytest

from redraft.noise_spec import COUPLED, DRAWN
from redraft.runtime.adaptive import MAX_DEPTH, Adaptive
from redraft.runtime.cost import CostCurve, VerifyCosts
from redraft.runtime.offers import Offer, OfferKey, Plan, StepLimits
from redraft.runtime.sampling.noise import DraftNoise
from redraft.runtime.sequence import Sequence
from redraft.types import Budget, OfferKind
from tests.runtime.drafts import DRAFTER, MAKER, chain, outcome, sequence

CURVE = CostCurve.from_points({1: 10.0, 21: 30.0})
"""One more node costs 1 ms. A plain step takes 10 ms, and a new method has 17/16 tokens of a plain step's credit."""
FULL = Budget(20, MAX_DEPTH, 20)


def fresh(step_ms: float) -> Offer:
    return Offer(OfferKey(DRAFTER, OfferKind.FRESH), maker=MAKER, step_ms=step_ms)  # type: ignore[arg-type]


def planned(controller: Adaptive, seq: Sequence, step_ms: float) -> Plan:
    return controller.plan([seq], [(fresh(step_ms),)], [StepLimits(FULL)])[0]


@pytest.mark.parametrize(("step_ms", "share"), [(2.0, 0.6375), (0.5, 0.319), (50.0, 0.9)])
def test_what_a_node_brings_below_it_pays_for_a_level_and_a_node(step_ms: float, share: float) -> None:
    """Before drafts went on below nodes, half a node's joint probability is assumed to come. At 0.9 drafts go on."""
    found = planned(Adaptive(VerifyCosts.of(CURVE)), sequence(), step_ms)
    assert found.limits.budget.share == pytest.approx(share, abs=1e-3)
    assert (found.limits.budget.depth, found.limits.budget.nodes) == (MAX_DEPTH, 20)


@pytest.mark.parametrize(("tokens", "share"), [((1, 2, 3, 4), 0.1169 * 2.196 / 3), ((1, 0), 0.9)])
def test_a_draft_goes_on_below_fewer_nodes_if_they_brought_little(tokens: tuple[int, ...], share: float) -> None:
    """Three nodes have children, with joint probabilities of 2.196 together. A level and a node cost 0.1169 tokens."""
    controller = Adaptive(VerifyCosts.of(CURVE))
    for _ in range(400):
        controller._depths_of(fresh(0.1), "none").observe(chain(0.9, 0.8, 0.8, 0.8), tokens)
    assert planned(controller, sequence(), 0.1).limits.budget.share == pytest.approx(share, rel=1e-3)


def test_what_greedy_drafts_brought_says_nothing_of_sampled_ones() -> None:
    controller, sampled = Adaptive(VerifyCosts.of(CURVE)), sequence()
    sampled.noise = DraftNoise(1.0, 0, COUPLED)
    for _ in range(400):
        controller._depths_of(fresh(0.1), "none").observe(chain(0.9, 0.8, 0.8, 0.8), (1, 0))
    assert planned(controller, sampled, 2.0).limits.budget.share == pytest.approx(0.6375, abs=1e-3)


def test_a_drafter_that_cannot_stop_gets_the_whole_budget() -> None:
    assert planned(Adaptive(VerifyCosts.of(CURVE)), sequence(), 0.0).limits.budget == FULL


def test_draws_get_a_depth_that_no_draw_decides() -> None:
    """After drafts of which one token was accepted each time, a draft has the paying level and one more."""
    controller, seq = Adaptive(VerifyCosts.of(CURVE)), sequence()
    seq.noise = DraftNoise(1.0, 0, DRAWN)
    tree = chain(*[0.5] * 8)
    for _ in range(40):
        controller.budget(seq)
        plan = planned(controller, seq, 2.0)
        drawn = Drawn(tree)
        made = controller.cut([seq], [plan], [drawn])[0]  # type: ignore[list-item]
        controller.timed(0.0, {}, len(made))
        controller.observe(seq, plan, made, outcome(tree, min(1, len(made) - 1)))
    found = planned(controller, seq, 2.0).limits.budget
    assert (found.depth, found.share) == (2, 0.0)


class Drawn:
    """A chain whose nodes may be cut only at the end."""

    on_device, cut_at_end, draws = False, True, None

    def __init__(self, tree: object, nodes: int = 0) -> None:
        self._tree = tree
        self.tokens, self.parents, self.log_probs = tree.tokens, tree.parents, tree.log_probs  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, nodes: int) -> Drawn:
        return Drawn(self._tree.first(nodes))  # type: ignore[attr-defined]
