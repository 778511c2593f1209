"""The adaptive controller pauses speculation while it loses, and ends drafts where a level costs more than it saves.

Traces are worked by hand.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from redraft.noise_spec import COUPLED, DRAWN
from redraft.runtime.controllers.adaptive import LONGEST_PAUSE, MAX_DEPTH, Adaptive
from redraft.runtime.controllers.cost import CostCurve, VerifyCosts
from redraft.runtime.requests.request import Request
from redraft.runtime.sampling.noise import DraftNoise
from redraft.runtime.trees.offers import Offer, OfferKey
from redraft.types import Budget, OfferKind
from tests.runtime.drafts import DRAFTER, MAKER, chain, observe, outcome, planned, planned_batch, sequence

STEEP = CostCurve.from_points({1: 1.0, 2: 2.0, 4: 2.0, 32: 30.0})
"""A step of four nodes costs two plain steps. It loses if it brings one token, and pays if it brings four."""
TREE = chain(0.9, 0.9, 0.9)


def gated() -> Adaptive:
    return Adaptive(VerifyCosts({1: STEEP}))


def step(controller: Adaptive, seq: Request, accepted: int) -> bool:
    """Take a step, and return whether it speculated. Such a step verifies three drafted nodes."""
    taken = planned(controller, seq, TREE, fresh=False)
    tree = TREE if taken.speculates else chain()
    observe(controller, seq, taken, tree, outcome(tree, accepted if taken.speculates else 0))
    return taken.speculates


def tries(controller: Adaptive, seq: Request, accepted: int, count: int) -> list[int]:
    """Return the numbers of steps between `count` steps that speculated, the first of which counts from the start."""
    found, number = [0], 0
    while len(found) <= count:
        number += 1
        if step(controller, seq, accepted):
            found.append(number)
    return [later - sooner for sooner, later in pairwise(found)]


def test_each_losing_try_doubles_the_pause_up_to_the_longest() -> None:
    """Three tries without a pause, then pauses of 1, 2, 4, 8, 16, 32 and 32 plain steps.

    After k tries without a long pause the mean cost is 2 - (31/32)^k plain steps and the mean yield, which begins with
    a credit of a sixteenth, 1 + (31/32)^k / 16 tokens. The yield is first below 0.99 of the cost for k = 3: 1.057 and
    1.091. Later tries count more, which changes nothing while all lose.
    """
    assert tries(gated(), sequence(), accepted=0, count=10) == [1, 1, 1, 2, 3, 5, 9, 17, 33, 33]
    assert LONGEST_PAUSE == 32


@pytest.mark.parametrize("accepted", [3, 1])
def test_speculation_that_pays_or_breaks_even_never_pauses(accepted: int) -> None:
    """Two tokens for two plain steps: the yield stays above the cost by what is left of the credit."""
    assert tries(gated(), sequence(), accepted, count=50) == [1] * 50


def test_the_gate_opens_again_when_tries_pay() -> None:
    """After nine losing tries the mean cost is 1.548 plain steps, and the mean yield 1.028 tokens.

    A try after a pause moves both by an eighth. So paying tries, each 32 steps of pause apart, move them to 1.605 and
    1.400, then to 1.654 and 1.725. The second has the larger yield, so the gate is open from then on.
    """
    controller, seq = gated(), sequence()
    tries(controller, seq, accepted=0, count=9)
    assert tries(controller, seq, accepted=3, count=6) == [33, 33, 1, 1, 1, 1]


def test_a_gate_that_was_open_begins_with_a_short_pause_again() -> None:
    """The yield has to fall under the cost first, which takes some tries without a pause."""
    controller, seq = gated(), sequence()
    tries(controller, seq, accepted=0, count=9)
    tries(controller, seq, accepted=3, count=20)
    losing = tries(controller, seq, accepted=0, count=60)
    paused = [gap for gap in losing if gap > 1]
    assert losing[0] == 1
    assert paused[:6] == [2, 3, 5, 9, 17, 33]


def test_a_request_pauses_alone() -> None:
    controller, seq, other = gated(), sequence(), sequence()
    step(controller, other, accepted=3)
    tries(controller, seq, accepted=0, count=5)
    assert not step(controller, seq, accepted=0)
    assert step(controller, other, accepted=3)


CURVE = CostCurve.from_points({1: 10.0, 21: 30.0})
"""One more node costs 1 ms. A plain step takes 10 ms, and a new method has 17/16 tokens of a plain step's credit."""
FULL = Budget(20, MAX_DEPTH, 20)


def fresh(step_ms: float) -> Offer:
    return Offer(OfferKey(DRAFTER, OfferKind.FRESH), maker=MAKER, step_ms=step_ms)  # type: ignore[arg-type]


def stopping(controller: Adaptive, seq: Request, step_ms: float) -> Budget:
    """Return the budget of a fresh draft whose levels take this time."""
    return planned_batch(controller, [seq], [(fresh(step_ms),)]).steps[0].plan.limits.budget


@pytest.mark.parametrize(("step_ms", "share"), [(2.0, 0.6375), (0.5, 0.319), (50.0, 0.9)])
def test_what_a_node_brings_below_it_pays_for_a_level_and_a_node(step_ms: float, share: float) -> None:
    """Before drafts went on below nodes, half a node's joint probability is assumed to come. At 0.9 drafts go on."""
    found = stopping(Adaptive(VerifyCosts({1: CURVE})), sequence(), step_ms)
    assert found.share == pytest.approx(share, abs=1e-3)
    assert (found.depth, found.nodes) == (MAX_DEPTH, 20)


@pytest.mark.parametrize(("tokens", "share"), [((1, 2, 3, 4), 0.1169 * 2.196 / 3), ((1, 0), 0.9)])
def test_a_draft_goes_on_below_fewer_nodes_if_they_brought_little(tokens: tuple[int, ...], share: float) -> None:
    """Three nodes have children, with joint probabilities of 2.196 together. A level and a node cost 0.1169 tokens."""
    controller = Adaptive(VerifyCosts({1: CURVE}))
    for _ in range(400):
        controller._methods.depths(fresh(0.1).key, "none").observe(chain(0.9, 0.8, 0.8, 0.8), tokens)
    assert stopping(controller, sequence(), 0.1).share == pytest.approx(share, rel=1e-3)


def test_what_greedy_drafts_brought_says_nothing_of_sampled_ones() -> None:
    controller, sampled = Adaptive(VerifyCosts({1: CURVE})), sequence()
    sampled.noise = DraftNoise(1.0, 0, COUPLED)
    for _ in range(400):
        controller._methods.depths(fresh(0.1).key, "none").observe(chain(0.9, 0.8, 0.8, 0.8), (1, 0))
    assert stopping(controller, sampled, 2.0).share == pytest.approx(0.6375, abs=1e-3)


def test_a_drafter_that_cannot_stop_gets_the_whole_budget() -> None:
    assert stopping(Adaptive(VerifyCosts({1: CURVE})), sequence(), 0.0) == FULL


def test_draws_get_a_depth_that_no_draw_decides() -> None:
    """After drafts of which one token was accepted each time, a draft has the paying level and one more."""
    controller, seq, other = Adaptive(VerifyCosts({1: CURVE})), sequence(), sequence()
    seq.noise = other.noise = DraftNoise(1.0, 0, DRAWN)
    tree = chain(*[0.5] * 8)
    for _ in range(40):
        batch = planned_batch(controller, [seq], [(fresh(2.0),)])
        (step,) = batch.steps
        step.made = [(offer, Drawn(tree)) for offer in step.plan.make]  # type: ignore[misc]
        controller.cut(batch)
        step.outcome = outcome(tree, min(1, len(step.tree) - 1))
        controller.observe(batch)
    found = stopping(controller, other, 2.0)
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
