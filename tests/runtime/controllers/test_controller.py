"""The controllers: trees have the size with the largest expected gain, and speculation pauses if it does not pay."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from redraft.errors import UsageError
from redraft.runtime.controllers.adaptive import LONGEST_PAUSE, Adaptive
from redraft.runtime.controllers.base import FixedBudget
from redraft.runtime.controllers.cost import CostCurve, VerifyCosts
from redraft.runtime.controllers.experience import MOST_METHODS, CallTimes
from redraft.runtime.requests.batch import Call, StepTimes, fit
from redraft.runtime.requests.request import Request
from redraft.runtime.trees.offers import Plan
from redraft.runtime.trees.tree import make_tree
from redraft.types import NO_SPECULATION, Budget, Costs, DraftTree, OfferKind
from tests.runtime.drafts import (
    DRAFTER,
    FREE,
    Offered,
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
    assert taken.kind in (OfferKind.LOOKUP, OfferKind.NONE)
    return taken, cut(controller, seq, taken)


def run(
    controller: Adaptive, seq: Request, tree: DraftTree, accepted: int, steps: int, propose: Propose = looked_up
) -> int:
    """Return in how many of `steps` steps speculation was allowed."""
    tries = 0
    for _ in range(steps):
        taken, verified = propose(controller, seq, tree)
        tries += taken.speculates
        observe(controller, seq, taken, verified, outcome(verified, min(accepted, len(verified) - 1)))
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
    assert len(looked_up(controller, seq, chain(*shares))[1]) - 1 == nodes


def test_a_new_request_starts_with_the_experience_of_others() -> None:
    controller = Adaptive(VerifyCosts({1: CURVE}))
    for _ in range(60):
        run(controller, sequence(), chain(0.9, 0.9), accepted=0, steps=100, propose=drafted)
    assert len(drafted(controller, sequence(), chain(0.9, 0.9))[1]) == 1


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
        cut(controller, seq, plan(kind, steps=steps), tree)
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
            cut(controller, seq, taken, chain(0.9))
    assert [later - sooner for sooner, later in pairwise(tried)][:7] == [3, 5, 9, 17, 33, 33, 33]
    assert LONGEST_PAUSE == 32
    controller._costs._calls.get(FRESH, CallTimes)._means[1].ms = 0.0  # drafts are now free
    while (taken := planned(controller, seq)).kind is not OfferKind.FRESH:
        pass
    cut(controller, seq, taken, chain(0.9))
    assert seq.control.tries.patience == 1


def test_gains_of_one_request_serve_the_next() -> None:
    controller, _ = experienced(Costs(fresh_ms=1.4, resample_ms=0.1))
    assert planned(controller, sequence(), chain(0.3), 1).kind is OfferKind.RESAMPLE
    assert planned(controller, sequence(), chain(0.4), 1).kind is OfferKind.LOOKUP


def test_a_new_tree_is_merged_with_the_looked_up_one() -> None:
    controller, seq = Adaptive(VerifyCosts({1: FREE})), sequence()
    found, made = make_tree([0, 7], [-1, 0], [1.0, 0.6]), make_tree([0, 8], [-1, 0], [1.0, 0.4])
    planned(controller, seq, found)
    assert cut(controller, seq, plan(OfferKind.FRESH, found), made).tokens.tolist() == [0, 7, 8]
    planned(controller, seq, found)
    assert cut(controller, seq, plan(OfferKind.LOOKUP, found)).tokens.tolist() == [0, 7]


def test_a_fixed_budget_verifies_half_as_many_nodes_of_a_resampled_tree() -> None:
    """Rounded up. Nodes of a lookup's tree come on top, up to the budget."""
    made, nothing = chain(*[0.9] * 5), make_tree([0], [-1], [1.0])
    for nodes, resampled in ((4, 2), (3, 2), (1, 1)):
        controller = FixedBudget(Budget(nodes, 5, 5))
        for kind, expected in ((OfferKind.RESAMPLE, resampled), (OfferKind.FRESH, nodes)):
            assert len(cut(controller, sequence(), plan(kind, nothing), made)) - 1 == expected
    found = make_tree([0, 7], [-1, 0], [1.0, 0.6])
    tree = cut(FixedBudget(Budget(3, 5, 5)), sequence(), plan(OfferKind.RESAMPLE, found), made)
    assert (len(tree) - 1, 7 in tree.tokens) == (3, True)


# --- batches ---------------------------------------------------------------------------------------------------------


def sizes(controller: Adaptive, trees: list[DraftTree], waiting: int = 0, rows: int = 0) -> list[int]:
    """Return how many nodes are verified of each looked-up tree, if `waiting` more sequences decode plainly.

    rows: of the trees of four further sequences with another controller.
    """
    batch = Offered.of([sequence() for _ in range(len(trees) + waiting)],
                    [*[offers(tree, fresh=False) for tree in trees], *[None] * waiting])  # fmt: skip
    if rows:
        batch.sequences, batch.rows, batch.widest = len(batch.steps) + 4, rows, rows - 3
    controller.plan(batch)
    controller.cut(batch)
    return [len(step.tree) - 1 for step in batch.steps]


def test_the_next_row_goes_to_the_likeliest_node_of_all_trees() -> None:
    """A row takes 0.1 ms and a plain step 1 ms. Four requests lose 0.4 tokens by it, and a little more with credit."""
    costs = {4: CostCurve.from_points({1: 1.0, 32: 1 + 31 * 0.4})}
    trees = [chain(0.1), chain(0.6, 0.8, 0.8), chain(0.9, 0.9), chain()]
    assert sizes(Adaptive(VerifyCosts(costs)), trees) == [0, 2, 2, 0]
    assert sizes(Adaptive(VerifyCosts(costs)), trees[1:2], waiting=3) == [2, 0, 0, 0]
    assert sizes(Adaptive(VerifyCosts(costs)), [chain(0.3)] * 4) == [0] * 4


def test_trees_shrink_to_nothing_as_a_batch_fills() -> None:
    """A row takes 0.1 ms, which one request loses for itself, and sixteen each for all."""
    costs = {1: CostCurve.from_points({1: 1.0, 32: 4.1}), 16: CostCurve.from_points({1: 2.5, 32: 2.5 + 31 * 1.6})}
    found = [sum(sizes(Adaptive(VerifyCosts(costs)), [chain(0.6, 0.7)] * count)) / count for count in (1, 2, 4, 16)]
    assert found == sorted(found, reverse=True)
    assert (found[0], found[-1]) == (2, 0)


def test_a_call_that_pads_pays_for_its_largest_tree_so_all_are_cut_to_one_size() -> None:
    """Alone, three nodes pay. With three sequences that have no tree, a node must gain four times as much."""
    likely = chain(0.6, 0.8, 0.8)

    def padded() -> Adaptive:
        return Adaptive(VerifyCosts({1: CURVE, 4: CURVE}, packed=False))

    assert sizes(padded(), [likely]) == [3]
    for others in ([chain(), chain(), chain()], []):
        assert sizes(padded(), [likely, *others], waiting=3 - len(others)) == [2, 0, 0, 0]
    assert sizes(padded(), [likely, likely, likely, chain(0.1, 0.1, 0.1)]) == [3, 3, 3, 3]


def test_trees_of_other_controllers_decide_what_the_next_row_costs() -> None:
    """Ten rows cost as much as five, later ones far more. Padded, nodes within the largest other tree are free."""
    costs = {5: CostCurve.from_points({1: 1.0, 2: 1.0, 32: 150.0})}
    for rows, packed, padded in ((4, 3, 1), (7, 2, 3), (8, 1, 3), (9, 0, 3)):
        for packs, expected in ((True, packed), (False, padded)):
            found = sizes(Adaptive(VerifyCosts(costs, packed=packs)), [chain(0.9, 0.9, 0.9)], rows=rows)
            assert found == [expected], (rows, packs)


# --- pinned nodes ----------------------------------------------------------------------------------------------------


def window(*shares: float) -> DraftTree:
    """Return siblings with these shares, and two pinned ones that are hardly ever right."""
    probs = [1.0, 0.001, 0.001, *shares]
    nodes = range(len(probs))
    return make_tree(list(nodes), [min(node, 1) - 1 for node in nodes], probs, [node in (1, 2) for node in nodes])


@pytest.mark.parametrize(("shares", "nodes"), [((), 2), ((0.05,), 2), ((0.9,), 3), ((0.05, 0.9), 3), ((0.9, 0.9), 4)])
def test_pinned_nodes_are_verified_whatever_they_bring(shares: tuple[float, ...], nodes: int) -> None:
    """Others are verified if they pay in addition, or if a padded call makes them free."""
    for packed in (True, False):
        for batch, expected in (
            ([window(*shares)], [nodes]),
            ([window(*shares)] * 2, [nodes] * 2),
            ([window(), chain(0.01, 0.9, 0.9, 0.9)], [2, 0 if packed else 2]),
        ):
            assert sizes(Adaptive(VerifyCosts({1: CURVE, 4: CURVE}, packed=packed)), batch) == expected


def test_the_cost_of_pinned_nodes_counts_in_the_gain_of_a_tree() -> None:
    gains = {}
    for name, tree in (("pinned", window(0.3)), ("free", make_tree([0, 3], [-1, 0], [1.0, 0.3]))):
        controller, seq = lookup_only(CURVE), sequence()
        planned(controller, seq, tree, fresh=False)
        gains[name] = seq.control.gains[OfferKind.LOOKUP]
    assert gains["free"] - gains["pinned"] == pytest.approx(CURVE.table_ms[4] - CURVE.table_ms[2], abs=0.05)


def test_pinned_nodes_that_bring_nothing_end_in_pauses() -> None:
    controller, seq = lookup_only(CURVE), sequence()
    run(controller, seq, window(), accepted=0, steps=100)
    assert run(controller, seq, window(), accepted=0, steps=10 * LONGEST_PAUSE) <= 11


# --- the costs of making trees ---------------------------------------------------------------------------------------


def step(
    controller: Adaptive, batch: list[Request], offers_ms: float, made_ms: dict[Call, float],
    kinds: tuple[OfferKind, ...] = (), accepted: int = 0,
) -> None:  # fmt: skip
    """Run a step that verifies one drafted node of every sequence. kinds: the plans' own, if not the controller's."""
    planned = planned_batch(controller, batch, [offers() for _ in batch])
    for one, kind in zip(planned.steps, kinds, strict=False):
        one.plan = plan(kind)
    for one in planned.steps:
        one.tree, one.outcome = chain(0.9), outcome(chain(0.9), accepted)
    planned.times = StepTimes(offers_ms, made_ms)
    controller.observe(planned)


def drafting(curve: CostCurve, fresh_ms: float) -> Adaptive:
    controller = Adaptive(VerifyCosts({1: curve}))
    controller.expect(DRAFTER, Costs(fresh_ms=fresh_ms))
    return controller


def test_a_call_for_a_whole_batch_is_learned_from_once() -> None:
    for sequences in (1, 4):
        controller = drafting(FREE, 1.0)
        step(controller, [sequence() for _ in range(sequences)], 0.5, {FRESH: 2.0})
        assert controller._costs.call_ms(FRESH) == pytest.approx(1.0 + 1 / 32)


@pytest.mark.parametrize("waiting", [0, 2])
def test_requests_pay_for_what_they_add_to_a_plain_step(waiting: int) -> None:
    """A lookup of 1 ms is shared by those that speculate, a draft of 100 ms by the two that use it. All wait for both.

    A row costs 0.5 ms. The unit is a plain step.
    """
    count = 3 + waiting
    controller = Adaptive(VerifyCosts({count: CostCurve.from_points({1: 4.0, 2: 4.0 + 0.5 * count, 3: 40.0})}))
    controller.expect(DRAFTER, Costs(fresh_ms=100.0))
    batch = [sequence() for _ in range(count)]
    kinds = OfferKind.LOOKUP, OfferKind.FRESH, OfferKind.FRESH, *[OfferKind.NONE] * waiting
    step(controller, batch, 1.0, {FRESH: 100.0}, kinds, accepted=1)
    for one, ms in zip(batch, (0.5 + 1 / 3, *[0.5 + 1 / 3 + 50.0] * 2), strict=False):
        assert one.control.experience.plain_steps == pytest.approx(1 + count * ms / 4.0 / 32)
        assert one.control.experience.tokens == pytest.approx(1.0625 + (2 - 1.0625) / 32)
    assert [one.control.experience.plain_steps for one in batch[3:]] == [1.0] * waiting


def test_extra_time_of_the_host_counts_for_each_request_that_speculates() -> None:
    """Steps of three requests take 0.6 ms more if two of them speculate. The third step knows it: 3 times 0.3 ms."""
    controller, batch = Adaptive(VerifyCosts({3: FREE})), [sequence() for _ in range(3)]
    for speculating, host_ms in ((0, 0.1), (2, 0.7), (2, 0.7)):
        before = batch[0].control.experience.plain_steps if batch[0].control else 1.0
        taken = planned_batch(controller, batch, [*[offers(chain(0.9), fresh=False)] * speculating,
                                                  *[None] * (3 - speculating)])  # fmt: skip
        for one in taken.steps:
            one.outcome = outcome(one.tree, min(1, len(one.tree) - 1))  # type: ignore[arg-type]
        taken.times = StepTimes(host_ms=host_ms)
        controller.observe(taken)
    plain_steps = 1 + 3 * 0.3 / FREE.table_ms[1]
    assert batch[0].control.experience.plain_steps == pytest.approx(before + (plain_steps - before) / 32)


def test_what_requests_can_share_costs_each_its_part() -> None:
    """A fresh draft for four requests, and a padded node, whose 0.6 tokens are fewer than its cost for all."""
    gains = []
    for count in (4, 1):
        controller = Adaptive(VerifyCosts({4: CostCurve.from_points({1: 1.0, 2: 1.4})}, packed=False))
        controller.expect(DRAFTER, Costs(fresh_ms=0.2))
        batch = planned_batch(controller, [sequence() for _ in range(4)],
                              [*[offers(chain(0.6))] * count, *[None] * (4 - count)])  # fmt: skip
        gains.append(batch.steps[0].request.control.gains)
    assert gains[0][OfferKind.LOOKUP] == pytest.approx(0.6 - 0.4 * 1.0625)
    assert gains[0][OfferKind.FRESH] == pytest.approx(gains[0][OfferKind.LOOKUP] + 1 - 0.2 * 1.0625)
    assert gains[1][OfferKind.LOOKUP] == 0.0
    assert gains[1][OfferKind.FRESH] == pytest.approx(1 - 0.2 * 4.0625)


@pytest.mark.parametrize(("offers_ms", "fresh_ms"), [(20.0, 0.1), (0.05, 20.0)])
def test_a_call_that_was_interrupted_once_does_not_end_speculation(offers_ms: float, fresh_ms: float) -> None:
    """The interruption is like a garbage collection, a hundred times as long as the call."""
    controller, seq, tree = drafting(CURVE, 0.1), sequence(), chain(0.9, 0.9, 0.9)
    for turn in range(40):
        taken, _ = drafted(controller, seq, tree)
        assert taken.speculates
        times = StepTimes(offers_ms, {FRESH: fresh_ms}) if turn == 10 else StepTimes(0.05, {FRESH: 0.1})
        observe(controller, seq, taken, tree, outcome(tree, 2), times)


@pytest.mark.parametrize("error", [None, UsageError("no token can follow")], ids=["no rows for a tree", "an error"])
def test_a_step_that_is_no_whole_speculation_teaches_nothing(error: UsageError | None) -> None:
    """The end of the text or of the buffer left no rows for a tree, or the request failed."""
    controller, seq = Adaptive(VerifyCosts({1: FREE})), sequence()
    step(controller, [seq], 0.1, {FRESH: 0.1})
    before = replace(seq.control.experience), controller._costs.call_ms(FRESH)
    taken = plan(OfferKind.NONE if error is None else OfferKind.FRESH)
    observe(controller, seq, taken, chain(), outcome(chain(), 0)._replace(error=error))
    assert (seq.control.experience, controller._costs.call_ms(FRESH)) == before


# --- limits of what is learned ---------------------------------------------------------------------------------------


def test_what_was_learned_of_methods_is_bounded_and_the_latest_stays() -> None:
    """Names of methods contain budgets, which requests choose."""
    controller = drafting(FREE, 1.0)
    for number in range(2 * MOST_METHODS):
        for seq in (request := sequence(), sequence()):
            seq.speculation = replace(request.speculation, method=f"x {number}")
        batch = planned_batch(controller, [request], [offers()])
        controller.cut(batch)
        batch.times = StepTimes(0.1, {(f"drafter {number}", OfferKind.FRESH): 1.0})
        controller.observe(batch)
    caches = [cache for owner in (controller._methods, controller._costs) for cache in vars(owner).values()]
    assert max(len(cache._values) for cache in caches) == MOST_METHODS
    assert (f"x {2 * MOST_METHODS - 1}", "none") in controller._methods._records._values
    assert ("x 0", "none") not in controller._methods._records._values
