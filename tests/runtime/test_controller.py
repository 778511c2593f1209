"""Speculation follows what it yields: nodes by expected gain, pauses while it loses, resumption."""

from __future__ import annotations

import random
import time

import pytest

from redraft.runtime.controller import LONGEST_PAUSE, Adaptive
from redraft.runtime.cost import CostCurve
from redraft.runtime.cycle import fit
from redraft.runtime.metrics import Clock
from redraft.runtime.sampler import Greedy
from redraft.runtime.sequence import Sequence
from redraft.runtime.tree import make_tree
from redraft.types import NO_SPECULATION, Budget, DraftTree, Outcome

from .fakes import CURVE, FakeEngine, greedy, make_runtime, plain

FREE = CostCurve.from_points({1: 1.0, 32: 1.0})
LINEAR = CostCurve.from_points({1: 1.0, 32: 32.0})


def sequence(limit: int = 1000) -> Sequence:
    return Sequence([1], 1, limit, frozenset(), Greedy())


def chain(*shares: float) -> DraftTree:
    probs = [1.0]
    for share in shares:
        probs.append(probs[-1] * share)
    return make_tree(list(range(len(probs))), list(range(-1, len(probs) - 1)), probs)


def outcome(tree: DraftTree, accepted: int) -> Outcome:
    path = tuple(range(1, accepted + 1))
    return Outcome(tree.tokens, path, 0, tuple([0] * (accepted + 1)))


def run(controller: Adaptive, seq: Sequence, tree: DraftTree, accepted: int, steps: int) -> int:
    """Steps out of `steps` in which speculation was allowed."""
    tries = 0
    for _ in range(steps):
        budget = controller.budget(seq)
        tries += budget.nodes > 0
        verified = controller.choose(seq, tree) if budget.nodes else chain()
        controller.observe(seq, verified, outcome(verified, min(accepted, len(verified) - 1)))
    return tries


@pytest.mark.parametrize(
    ("curve", "shares", "nodes"),
    [
        (FREE, (0.9, 0.5, 0.1), 3),
        (LINEAR, (0.9, 0.5, 0.1), 0),
        (CURVE, (0.9, 0.9, 0.9, 0.9), 4),
        (CURVE, (0.9, 0.9, 0.05, 0.9), 2),
        (CURVE, (0.05,), 0),
    ],
)
def test_the_tree_is_cut_where_a_node_costs_more_than_it_brings(
    curve: CostCurve, shares: tuple[float, ...], nodes: int
) -> None:
    controller, seq = Adaptive(curve, Clock()), sequence()
    controller.budget(seq)
    assert len(controller.choose(seq, chain(*shares))) - 1 == nodes


def test_pauses_double_while_speculation_loses_and_end_when_it_pays() -> None:
    """The promise of the drafter (0.9) is not kept: nothing is accepted; later everything is."""
    controller, seq = Adaptive(CURVE, Clock()), sequence()
    tree = chain(0.9, 0.9, 0.9)
    run(controller, seq, tree, accepted=0, steps=400)
    assert run(controller, seq, tree, accepted=0, steps=10 * LONGEST_PAUSE) <= 11
    run(controller, seq, tree, accepted=3, steps=4 * LONGEST_PAUSE)
    assert run(controller, seq, tree, accepted=3, steps=50) == 50
    assert seq.control.pause == 0  # the next loss begins with a short pause again


def test_drafting_that_costs_more_than_it_brings_pauses_too() -> None:
    clock = Clock(proposal=1.0)
    controller, seq = Adaptive(CURVE, clock), sequence()
    run(controller, seq, chain(0.9), accepted=1, steps=200)
    assert run(controller, seq, chain(0.9), accepted=1, steps=100) < 10


def test_a_new_request_starts_with_the_experience_of_others() -> None:
    controller = Adaptive(CURVE, Clock())
    for _ in range(60):
        run(controller, sequence(), chain(0.9, 0.9), accepted=0, steps=100)
    fresh = sequence()
    controller.budget(fresh)
    assert len(controller.choose(fresh, chain(0.9, 0.9))) == 1


def test_promises_that_are_not_kept_are_discounted() -> None:
    controller, seq = Adaptive(FREE, Clock()), sequence()
    tree = chain(0.9, 0.9)
    run(controller, seq, tree, accepted=0, steps=60)
    controller._table = CURVE.table_ms
    assert len(controller.choose(seq, tree)) == 1


@pytest.mark.parametrize(
    ("remaining", "room", "expected"),
    [
        (100, 100, Budget(12, 4, 3)),
        (3, 100, Budget(12, 2, 3)),
        (100, 5, Budget(4, 4, 3)),
        (1, 100, NO_SPECULATION),
        (100, 1, NO_SPECULATION),
    ],
)
def test_budgets_end_where_the_text_or_the_buffer_does(remaining: int, room: int, expected: Budget) -> None:
    seq = sequence(limit=1 + remaining)
    assert fit(Budget(12, 4, 3), seq, room) == expected


def test_speculation_stops_on_random_text_and_resumes_on_repetitive_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole runtime: noise for 300 tokens, then a loop; few calls above one node, then few calls.

    Drafting counts as free, so that the outcome does not depend on how busy this machine is.
    """
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    rng = random.Random(3)
    noise = [rng.randrange(97, 110) for _ in range(300)]

    def rule(tokens: list[int]) -> int:
        return noise[len(tokens)] if len(tokens) < 300 else 97 + len(tokens) % 5

    runtime = make_runtime(rule, context=700)
    engine: FakeEngine = runtime.verifier._engine
    first = runtime.generate([[97]], greedy(299))[0]
    wide = sum(width > 1 for _, width in engine.sizes[1:])
    assert list(first.token_ids) == plain(rule, [97], 299)
    assert wide < 30
    both = runtime.generate([[97]], greedy(600))[0]
    assert both.metrics.num_steps < 299 + 150
