"""The controllers: trees have the size with the largest expected gain, and speculation pauses if it does not pay."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import pairwise

import pytest

from redraft.runtime.controllers.adaptive import LONGEST_PAUSE, Adaptive
from redraft.runtime.controllers.base import Call, FixedBudget
from redraft.runtime.controllers.cost import CostCurve, VerifyCosts
from redraft.runtime.loop.decode_loop import fit
from redraft.runtime.requests.request import Request
from redraft.runtime.trees.offers import NO_TREE, Plan
from redraft.runtime.trees.tree import make_tree
from redraft.types import NO_SPECULATION, Budget, Costs, DraftTree, OfferKind
from tests.runtime.drafts import DRAFTER, FREE, LIMITS, chain, drafted, offers, outcome, plan, planned, sequence
from tests.runtime.fakes import CURVE, engine_of, greedy, make_runtime, plain

Propose = Callable[[Adaptive, Request, DraftTree], tuple[Plan, DraftTree]]
FRESH: Call = (DRAFTER, OfferKind.FRESH)
LINEAR = CostCurve.from_points({1: 1.0, 32: 32.0})


def lookup_only(curve: CostCurve) -> Adaptive:
    """Return the controller of n-gram lookup alone."""
    return Adaptive(VerifyCosts({1: curve}))


def looked_up(controller: Adaptive, seq: Request, tree: DraftTree) -> tuple[Plan, DraftTree]:
    """Return the plan and the verified part of a looked-up tree, without a drafter."""
    taken = planned(controller, seq, tree, fresh=False)
    assert taken.kind is OfferKind.LOOKUP
    return taken, controller.cut([seq], [taken], [None])[0]


def run(
    controller: Adaptive, seq: Request, tree: DraftTree, accepted: int, steps: int, propose: Propose = looked_up
) -> int:
    """Return in how many of `steps` steps speculation was allowed."""
    tries = 0
    for _ in range(steps):
        budget = controller.budget(seq)
        tries += budget.nodes > 0
        taken, verified = propose(controller, seq, tree) if budget.nodes else (plan(OfferKind.NONE), chain())
        controller.timed(0.0, {}, len(verified))
        controller.observe(seq, taken, verified, outcome(verified, min(accepted, len(verified) - 1)))
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
def test_the_tree_is_cut_to_nodes_that_gain_more_than_they_cost(
    curve: CostCurve, shares: tuple[float, ...], nodes: int
) -> None:
    controller, seq = lookup_only(curve), sequence()
    controller.budget(seq)
    assert len(looked_up(controller, seq, chain(*shares))[1]) - 1 == nodes


def test_a_new_request_starts_with_the_experience_of_others() -> None:
    controller = Adaptive(VerifyCosts({1: CURVE}))
    for _ in range(60):
        run(controller, sequence(), chain(0.9, 0.9), accepted=0, steps=100, propose=drafted)
    fresh = sequence()
    controller.budget(fresh)
    assert len(drafted(controller, fresh, chain(0.9, 0.9))[1]) == 1


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
    """The whole runtime decodes 300 tokens of noise, with few trees. Then it decodes a loop in few steps.

    Drafting counts as free, so that the outcome does not depend on the machine's load.
    """
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    rng = random.Random(3)
    noise = [rng.randrange(97, 110) for _ in range(300)]

    def rule(tokens: list[int]) -> int:
        return noise[len(tokens)] if len(tokens) < 300 else 97 + len(tokens) % 5

    runtime = make_runtime(rule, max_model_len=700)
    engine = engine_of(runtime.verifier)
    first = runtime.generate([[97]], greedy(299))[0]
    wide = sum(width > 1 for _, width in engine.sizes[1:])
    assert list(first.token_ids) == plain(rule, [97], 299)
    assert wide < 30
    both = runtime.generate([[97]], greedy(600))[0]
    assert both.metrics.num_steps < 299 + 150


# --- the source of a tree --------------------------------------------------------------------------------------------


def experienced(costs: Costs) -> tuple[Adaptive, Request]:
    """Return a controller that knows the gains of a two-token draft and of one token resampled with one step left."""
    controller, seq = Adaptive(VerifyCosts({1: FREE})), sequence()
    controller.expect(DRAFTER, costs)
    for kind, steps, tree in ((OfferKind.RESAMPLE, 1, chain(0.5)), (OfferKind.FRESH, 0, chain(0.9, 0.9))):
        planned(controller, seq, steps=steps)
        controller.cut([seq], [plan(kind, steps=steps)], [tree])
    return controller, seq


@pytest.mark.parametrize(
    ("fresh_ms", "resample_ms", "found", "remaining", "expected"),
    [
        (0.5, 0.1, 0.3, 1, OfferKind.FRESH),
        (1.4, 0.1, 0.3, 1, OfferKind.RESAMPLE),
        (1.4, 0.1, 0.3, 0, OfferKind.LOOKUP),
        (1.4, 0.2, 0.3, 1, OfferKind.LOOKUP),
        (1.4, 0.1, 0.4, 1, OfferKind.LOOKUP),
        (0.5, 0.1, 0.99, 1, OfferKind.FRESH),
        (0.7, 0.1, 0.99, 1, OfferKind.LOOKUP),
    ],
)
def test_the_source_of_a_tree_has_the_largest_gain_less_cost(
    fresh_ms: float, resample_ms: float, found: float, remaining: int, expected: OfferKind
) -> None:
    """The rate is one token a millisecond. A new record corrects 0.9 and 0.81 to 0.85 and 0.72, and 0.5 to 0.43."""
    controller, seq = experienced(Costs(fresh_ms, resample_ms))
    assert planned(controller, seq, chain(found), remaining).kind is expected


def test_a_draft_that_does_not_pay_is_tried_again_after_twice_as_long() -> None:
    controller, seq = Adaptive(VerifyCosts({1: FREE})), sequence()
    controller.expect(DRAFTER, Costs(fresh_ms=10.0))
    tried = []
    for step in range(200):
        if (taken := planned(controller, seq)).kind is OfferKind.FRESH:
            tried.append(step)
            controller.cut([seq], [taken], [chain(0.9)])
    assert [later - sooner for sooner, later in pairwise(tried)][:7] == [3, 5, 9, 17, 33, 33, 33]
    assert LONGEST_PAUSE == 32
    controller._made_ms[DRAFTER, OfferKind.FRESH] = 0.0  # drafts are now free
    while (taken := planned(controller, seq)).kind is not OfferKind.FRESH:
        pass
    controller.cut([seq], [taken], [chain(0.9)])
    assert seq.control.patience == 1


def test_gains_of_one_request_serve_the_next() -> None:
    controller, _ = experienced(Costs(fresh_ms=1.4, resample_ms=0.1))
    assert planned(controller, sequence(), chain(0.3), 1).kind is OfferKind.RESAMPLE
    assert planned(controller, sequence(), chain(0.4), 1).kind is OfferKind.LOOKUP


def test_a_new_tree_is_merged_with_the_looked_up_one() -> None:
    controller, seq = Adaptive(VerifyCosts({1: FREE})), sequence()
    found, made = make_tree([0, 7], [-1, 0], [1.0, 0.6]), make_tree([0, 8], [-1, 0], [1.0, 0.4])
    planned(controller, seq, found)
    assert controller.cut([seq], [plan(OfferKind.FRESH, found)], [made])[0].tokens.tolist() == [0, 7, 8]
    planned(controller, seq, found)
    assert controller.cut([seq], [plan(OfferKind.LOOKUP, found)], [None])[0].tokens.tolist() == [0, 7]


def test_a_fixed_budget_verifies_half_as_many_nodes_of_a_resampled_tree() -> None:
    """Rounded up. Nodes of a lookup's tree come on top, up to the budget."""
    made, nothing = chain(*[0.9] * 5), make_tree([0], [-1], [1.0])
    for nodes, resampled in ((4, 2), (3, 2), (1, 1)):
        controller = FixedBudget(Budget(nodes, 5, 5))
        for kind, expected in ((OfferKind.RESAMPLE, resampled), (OfferKind.FRESH, nodes)):
            (tree,) = controller.cut([sequence()], [plan(kind, nothing)], [made])
            assert len(tree) - 1 == expected
    found = make_tree([0, 7], [-1, 0], [1.0, 0.6])
    (tree,) = FixedBudget(Budget(3, 5, 5)).cut([sequence()], [plan(OfferKind.RESAMPLE, found)], [made])
    assert (len(tree) - 1, 7 in tree.tokens) == (3, True)


# --- batches ---------------------------------------------------------------------------------------------------------


def cut(controller: Adaptive, trees: list[DraftTree], waiting: int = 0) -> list[int]:
    """Return how many nodes are verified of each looked-up tree, if `waiting` more sequences decode plainly."""
    batch = [sequence() for _ in range(len(trees) + waiting)]
    controller.begin(len(batch), "")
    for seq in batch:
        controller.budget(seq)
    offered = [*[offers(tree, fresh=False) for tree in trees], *[()] * waiting]
    plans = controller.plan(batch, offered, [*[LIMITS] * len(trees), *[NO_TREE] * waiting])
    return [len(tree) - 1 for tree in controller.cut(batch, plans, [None] * len(batch))]


def test_a_call_pays_for_its_largest_tree_so_all_are_cut_to_one_size() -> None:
    """Alone, three nodes pay. With three sequences that have no tree, a node must gain four times as much."""
    likely = chain(0.6, 0.8, 0.8)
    alone = Adaptive(VerifyCosts({1: CURVE, 4: CURVE}))
    assert cut(alone, [likely]) == [3]
    for others in ([chain(), chain(), chain()], []):
        controller = Adaptive(VerifyCosts({1: CURVE, 4: CURVE}))
        assert cut(controller, [likely, *others], waiting=3 - len(others)) == [2, 0, 0, 0]
    both = Adaptive(VerifyCosts({1: CURVE, 4: CURVE}))
    assert cut(both, [likely, likely, likely, chain(0.1, 0.1, 0.1)]) == [3, 3, 3, 3]


# --- pinned nodes ----------------------------------------------------------------------------------------------------


def window(*shares: float) -> DraftTree:
    """Return siblings with these shares, and two pinned ones that are hardly ever right."""
    probs = [1.0, 0.001, 0.001, *shares]
    nodes = range(len(probs))
    return make_tree(list(nodes), [min(node, 1) - 1 for node in nodes], probs, [node in (1, 2) for node in nodes])


@pytest.mark.parametrize(("shares", "nodes"), [((), 2), ((0.05,), 2), ((0.9,), 3), ((0.05, 0.9), 3), ((0.9, 0.9), 4)])
def test_pinned_nodes_are_verified_whatever_they_bring(shares: tuple[float, ...], nodes: int) -> None:
    """Others are verified if they pay in addition, or if the nodes of another sequence's tree make them free."""
    for batch, sizes in (
        ([window(*shares)], [nodes]),
        ([window(*shares)] * 2, [nodes] * 2),
        ([window(), chain(0.01, 0.9, 0.9, 0.9)], [2, 2]),
    ):
        assert cut(Adaptive(VerifyCosts({1: CURVE, 4: CURVE})), batch) == sizes


def test_the_cost_of_pinned_nodes_counts_in_the_gain_of_a_tree() -> None:
    gains = {}
    for name, tree in (("pinned", window(0.3)), ("free", make_tree([0, 3], [-1, 0], [1.0, 0.3]))):
        controller, seq = lookup_only(CURVE), sequence()
        controller.budget(seq)
        planned(controller, seq, tree, fresh=False)
        gains[name] = seq.control.gains[OfferKind.LOOKUP]
    assert gains["free"] - gains["pinned"] == pytest.approx(CURVE.table_ms[4] - CURVE.table_ms[2], abs=0.05)


def test_pinned_nodes_that_bring_nothing_end_in_pauses() -> None:
    controller, seq = lookup_only(CURVE), sequence()
    run(controller, seq, window(), accepted=0, steps=100)
    assert run(controller, seq, window(), accepted=0, steps=10 * LONGEST_PAUSE) <= 11


# --- the costs of making trees ---------------------------------------------------------------------------------------


def step(controller: Adaptive, batch: list[Request], offers_ms: float, made_ms: dict[Call, float]) -> None:
    """Run a step in which every sequence speculates and the verifier accepts nothing."""
    plans = []
    for seq in batch:
        controller.budget(seq)
        plans.append(drafted(controller, seq, chain(0.9))[0])
    controller.timed(offers_ms, made_ms, 2)
    for seq, taken in zip(batch, plans, strict=True):
        controller.observe(seq, taken, chain(0.9), outcome(chain(0.9), 0))


def test_a_call_for_a_whole_batch_is_learned_from_once() -> None:
    known = []
    for sequences in (1, 4):
        controller = Adaptive(VerifyCosts({1: FREE}))
        controller.expect(DRAFTER, Costs(fresh_ms=1.0))
        step(controller, [sequence() for _ in range(sequences)], 0.5, {FRESH: 2.0})
        known.append(controller._made_ms[FRESH])
    assert known[0] == known[1] == pytest.approx(1.0 + 1 / 32)


def test_a_sequence_pays_for_the_lookup_and_for_the_call_that_made_its_own_tree() -> None:
    """A fresh draft of another sequence in the batch must not change the gain of lookups here."""
    controller, seq, other = Adaptive(VerifyCosts({1: FREE})), sequence(), sequence()
    controller.expect(DRAFTER, Costs(fresh_ms=100.0))
    for one in (seq, other):
        controller.budget(one)
        planned(controller, one)
    before, plain = seq.control.experience.plain_steps, FREE.table_ms[1]
    controller.timed(1.0, {FRESH: 100.0}, 2)
    for one, kind in ((seq, OfferKind.LOOKUP), (other, OfferKind.FRESH)):
        controller.observe(one, plan(kind), chain(0.9), outcome(chain(0.9), 1))
    for one, ms in ((seq, FREE.table_ms[2] + 1.0), (other, FREE.table_ms[2] + 101.0)):
        assert one.control.experience.plain_steps == pytest.approx(before + (ms / plain - before) / 32)


@pytest.mark.parametrize(("offers_ms", "fresh_ms"), [(20.0, 0.1), (0.05, 20.0)])
def test_a_call_that_was_interrupted_once_does_not_end_speculation(offers_ms: float, fresh_ms: float) -> None:
    """The interruption is like a garbage collection, a hundred times as long as the call."""
    controller, seq = Adaptive(VerifyCosts({1: CURVE})), sequence()
    controller.expect(DRAFTER, Costs(fresh_ms=0.1))
    tries = 0
    for turn in range(40):
        budget, taken = controller.budget(seq), plan(OfferKind.NONE)
        tries += budget.nodes > 0
        if budget.nodes:
            taken, _ = drafted(controller, seq, chain(0.9, 0.9, 0.9))
            controller.timed(*((offers_ms, {FRESH: fresh_ms}) if turn == 10 else (0.05, {FRESH: 0.1})), 4)
        controller.observe(seq, taken, chain(0.9, 0.9, 0.9), outcome(chain(0.9, 0.9, 0.9), 2))
    assert tries == 40


def test_a_step_without_rows_for_a_tree_does_not_count_as_speculation() -> None:
    """The controller would have speculated, but the end of the text or of the buffer left no rows for a tree."""
    controller, seq = Adaptive(VerifyCosts({1: FREE})), sequence()
    step(controller, [seq], 0.1, {FRESH: 0.1})
    before = (seq.control.experience.tokens, seq.control.experience.plain_steps, dict(controller._made_ms))
    assert controller.budget(seq).nodes
    controller.observe(seq, plan(OfferKind.NONE), chain(), outcome(chain(), 0))
    assert (seq.control.experience.tokens, seq.control.experience.plain_steps, controller._made_ms) == before
