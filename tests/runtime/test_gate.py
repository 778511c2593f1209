"""The gate of the adaptive controller: speculation pauses while it loses, is tried again, and resumes when it pays.

Traces are worked by hand. Verifying one node takes 1 ms, two to four take 2 ms. So a step of four nodes costs two plain
steps. It loses if it brings one token, and pays if it brings four.
"""

from __future__ import annotations

from itertools import pairwise

from redraft.runtime.adaptive import LONGEST_PAUSE, Adaptive
from redraft.runtime.cost import CostCurve, VerifyCosts
from redraft.runtime.sequence import Sequence
from redraft.types import OfferKind
from tests.runtime.drafts import chain, outcome, plan, sequence

STEEP = CostCurve.from_points({1: 1.0, 2: 2.0, 4: 2.0, 32: 30.0})
TREE = chain(0.9, 0.9, 0.9)


def gated() -> Adaptive:
    return Adaptive(VerifyCosts.of(STEEP))


def step(controller: Adaptive, seq: Sequence, accepted: int) -> bool:
    """Take a step, and return whether it speculated. Such a step verifies three drafted nodes."""
    speculates = controller.budget(seq).nodes > 0
    tree = TREE if speculates else chain()
    controller.timed(0.0, {}, len(tree))
    taken = plan(OfferKind.LOOKUP if speculates else OfferKind.NONE, TREE)
    controller.observe(seq, taken, tree, outcome(tree, accepted if speculates else 0))
    return speculates


def tries(controller: Adaptive, seq: Sequence, accepted: int, count: int) -> list[int]:
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


def test_speculation_that_pays_never_pauses() -> None:
    assert tries(gated(), sequence(), accepted=3, count=50) == [1] * 50


def test_speculation_that_breaks_even_never_pauses() -> None:
    """Two tokens for two plain steps: the yield stays above the cost by what is left of the credit."""
    assert tries(gated(), sequence(), accepted=1, count=50) == [1] * 50


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
