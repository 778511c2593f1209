"""Simulated batches: requests of high and of low acceptance share calls whose cost is known.

No engine runs. A step takes the time of its rows, of its lookups, and of the host.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import count
from math import exp
from random import Random

import pytest

from redraft.runtime.controllers.adaptive import Adaptive
from redraft.runtime.controllers.base import Controller, FixedBudget
from redraft.runtime.controllers.cost import CostCurve, VerifyCosts
from redraft.runtime.controllers.experience import Account, MethodStatistics, StepCosts
from redraft.runtime.controllers.mixed import controller_of
from redraft.runtime.requests.batch import StepTimes
from redraft.runtime.trees.offers import Offer, OfferKey, Plan, Speculation
from redraft.types import NO_SPECULATION, Budget, Costs, OfferKind
from tests.runtime.drafts import DRAFTER, MAKER, Offered, chain, offers, outcome, sequence

LENGTH, LOOKUP_MS, HOST_MS = 8, 0.02, 0.1
Acceptance = tuple[float, float]
"""The probability of a token that the lookup claims, and the true one."""
GOOD, MILD, POOR, BOASTING = (0.85, 0.85), (0.6, 0.5), (0.25, 0.25), (0.6, 0.1)
MIXED = (GOOD, POOR, BOASTING, POOR)


def row_ms(rows: int) -> float:
    """Return the time of a call: the weights are read once, then every row counts, and more so beyond 32."""
    return 10.0 + 0.4 * rows + 0.4 * max(rows - 32, 0)


def by_eights_ms(rows: int) -> float:
    """Return the time of a call whose kernels read the weights once for eight rows."""
    return 10.0 * -(-rows // 8) + rows


def costs(sequences: int, packed: bool = True, ms: Callable[[int], float] = row_ms) -> VerifyCosts:
    sizes = (1, 2, 3, 4, 6, 8, 12, 16, 32)
    return VerifyCosts({n: CostCurve.from_points({size: ms(n * size) for size in sizes}) for n in {1, sequences}},
                       packed=packed)  # fmt: skip


def tokens_a_ms(
    controllers: Sequence[Controller], kinds: Sequence[Acceptance], verifying: VerifyCosts, steps: int,
    ms: Callable[[int], float] = row_ms, length: int = sys.maxsize,
) -> float:  # fmt: skip
    """Return the speed of a batch whose request i has controller i and the acceptance `kinds[i]`.

    length: tokens of a request, after which another one takes its place.
    """
    random, tokens, spent = Random(0), 0, 0.0
    requests, left = [sequence() for _ in kinds], [length] * len(kinds)
    for request, controller, kind in zip(requests, controllers, kinds, strict=True):
        request.speculation = Speculation(request.speculation.drafter, controller, f"lookup {kind}")
    controller = controller_of(Offered.of(requests, [None] * len(requests)))
    for _ in range(steps):
        found = [chain(*[claimed] * random.randrange(LENGTH + 1)) for claimed, _ in kinds]
        batch = Offered.of(requests, [offers(tree, fresh=False) for tree in found])
        controller.plan(batch)
        speculating = sum(step.plan.speculates for step in batch.steps)
        if speculating:
            controller.cut(batch)
        for slot, (step, (_, true)) in enumerate(zip(batch.steps, kinds, strict=True)):
            accepted = next((n for n in range(len(step.tree) - 1) if random.random() >= true), len(step.tree) - 1)
            step.outcome = outcome(step.tree, accepted)  # type: ignore[arg-type]
            step.tokens = step.outcome.tokens
            tokens += 1 + accepted
            left[slot] -= 1 + accepted
            if left[slot] <= 0:
                requests[slot], left[slot] = sequence(), length
                requests[slot].speculation = step.request.speculation
        rows = verifying.rows([len(step.tree) for step in batch.steps])
        offers_ms, verified_ms = LOOKUP_MS * speculating, ms(rows)
        batch.times = StepTimes(offers_ms, {}, verified_ms, HOST_MS + offers_ms)
        verifying.observe(len(requests), rows, verified_ms)
        controller.observe(batch)
        spent += verified_ms + batch.times.host_ms
    return tokens / spent


def adapted(kinds: Sequence[Acceptance], verifying: VerifyCosts, steps: int) -> float:
    controller = Adaptive(verifying)
    return tokens_a_ms([controller] * len(kinds), kinds, verifying, steps)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("sequences", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("kinds", [MIXED, (BOASTING,)], ids=["mixed", "boasting"])
def test_speculation_is_never_slower_than_plain_steps(
    kinds: tuple[Acceptance, ...], sequences: int, packed: bool
) -> None:
    """Probes and tries after pauses cost a little."""
    batch = [kinds[slot % len(kinds)] for slot in range(sequences)]
    plain = sequences / (row_ms(sequences) + HOST_MS)
    found = adapted(batch, costs(sequences, packed), 1000)
    assert found > 0.98 * plain


@pytest.mark.parametrize("sequences", [2, 4, 8, 16])
@pytest.mark.parametrize("kinds", [MIXED, (MILD,), (BOASTING,)], ids=["mixed", "mild", "boasting"])
def test_noise_and_load_do_not_make_speculation_slower(kinds: tuple[Acceptance, ...], sequences: int) -> None:
    """Calls vary by a tenth, one in a hundred is interrupted, the load doubles at times, and a ninth row is dear.

    Estimates of such costs are wrong for long: only whole steps, measured, tell a loss.
    """
    random, calls, plain_ms = Random(3), count(), []

    def noisy_ms(rows: int) -> float:
        load = exp(random.gauss(0.0, 0.1)) * (2 if random.random() < 0.01 else 1) * (1 + next(calls) // 150 % 2)
        plain_ms.append(by_eights_ms(sequences) * load + HOST_MS)
        return by_eights_ms(rows) * load

    verifying, batch = costs(sequences, ms=by_eights_ms), [kinds[slot % len(kinds)] for slot in range(sequences)]
    found = tokens_a_ms([Adaptive(verifying)] * sequences, batch, verifying, 600, noisy_ms, length=64)
    assert found > 0.98 * sequences * len(plain_ms) / sum(plain_ms)


@pytest.mark.parametrize("sequences", [4, 8, 16])
def test_sizes_that_are_chosen_together_earn_more_than_one_size_for_all(sequences: int) -> None:
    batch = [MIXED[slot % len(MIXED)] for slot in range(sequences)]
    found = adapted(batch, costs(sequences), 500)
    for nodes in (1, 2, 3, 5, LENGTH):
        fixed = FixedBudget(Budget(nodes, nodes, 1))
        assert found > 1.1 * tokens_a_ms([fixed] * sequences, batch, costs(sequences), 300)


def test_a_request_that_gains_is_not_paused_by_the_rows_of_others() -> None:
    """Next to a fixed budget that loses, its own few rows still pay."""
    fixed, verifying = FixedBudget(Budget(3, 3, 1)), costs(4)
    adaptive = Adaptive(verifying)
    both = tokens_a_ms([fixed, fixed, fixed, adaptive], [BOASTING, BOASTING, BOASTING, GOOD], verifying, 500)
    plain = FixedBudget(NO_SPECULATION)
    without = tokens_a_ms([fixed, fixed, fixed, plain], [BOASTING, BOASTING, BOASTING, GOOD], costs(4), 300)
    assert both > 1.25 * without


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("sequences", [1, 2, 8])
@pytest.mark.parametrize("kind", [GOOD, BOASTING], ids=["good", "boasting"])
def test_the_gain_is_that_of_the_speed_over_plain_steps(kind: Acceptance, sequences: int, packed: bool) -> None:
    verifying = costs(sequences, packed)
    controller = Adaptive(verifying)
    speed = tokens_a_ms([controller] * sequences, [kind] * sequences, verifying, 400)
    plain = sequences / (row_ms(sequences) + HOST_MS)
    assert controller.gain.plain_ms / controller.gain.spent_ms == pytest.approx(speed / plain, rel=0.02)


def test_the_gain_counts_the_hosts_time_in_plain_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "HOST_MS", 4.0)
    controller, verifying = Adaptive(costs(2)), costs(2)
    speed = tokens_a_ms([controller] * 2, [GOOD] * 2, verifying, 400)
    gain = controller.gain.plain_ms / controller.gain.spent_ms
    assert gain == pytest.approx(speed / 2 * (row_ms(2) + 4.0), rel=0.03)


@pytest.mark.parametrize(("sequences", "level"), [(1, 1.0), (1, 4.0), (4, 1.0)])
def test_load_and_wrong_levels_change_the_gain_little(sequences: int, level: float) -> None:
    """The costs that are known at first are `level` times the true ones, and the machine is twice as slow at times."""
    random, calls, plain_ms = Random(3), count(), []

    def loaded_ms(rows: int) -> float:
        load = exp(random.gauss(0.0, 0.1)) * (1 + next(calls) // 150 % 2)
        plain_ms.append(row_ms(sequences) * load + HOST_MS)
        return row_ms(rows) * load

    verifying = costs(sequences, ms=lambda rows: level * row_ms(rows))
    controller = Adaptive(verifying)
    speed = tokens_a_ms([controller] * sequences, [GOOD] * sequences, verifying, 400, loaded_ms)
    true = speed * sum(plain_ms) / len(plain_ms) / sequences
    assert 0.92 * true < controller.gain.plain_ms / controller.gain.spent_ms < 1.02 * true


@pytest.mark.parametrize(("nodes", "counts"), [(0, True), (2, False)])
def test_steps_in_which_another_controller_drafts_have_no_gain(nodes: int, counts: bool) -> None:
    """Nothing measures plain steps of that controller. A request without drafts is part of a plain step."""
    verifying = costs(2)
    adaptive, fixed = Adaptive(verifying), FixedBudget(Budget(nodes, nodes, 1))
    speed = tokens_a_ms([adaptive, fixed], [GOOD, GOOD], verifying, 200)
    spent_ms, plain_ms = adaptive.gain
    if counts:
        assert plain_ms / spent_ms == pytest.approx(speed * (row_ms(2) + HOST_MS) / 2, rel=0.02)
    else:
        assert spent_ms < 0.2 * 200 * row_ms(2)  # those without a found chain for the other


def drafting(sequences: int, draft_ms: float, share: float, steps: int = 600) -> float:
    """Return the speed of requests of 64 tokens over plain steps, if each node of a draft is accepted with `share`."""
    verifying, random = costs(sequences), Random(1)
    controller, call = Adaptive(verifying), (DRAFTER, OfferKind.FRESH)
    controller.expect(DRAFTER, Costs(draft_ms, 0.0))
    requests, tokens, spent = [sequence() for _ in range(sequences)], [0] * sequences, 0.0
    for _ in range(steps):
        for request in requests:
            request.speculation = Speculation(request.speculation.drafter, controller, "method")
        batch = Offered.of(requests, [offers() for _ in requests])
        controller.plan(batch)
        drafted = [step for step in batch.steps if step.plan.make]
        for step in drafted:
            step.made = [(offer, chain(*[share] * 4)) for offer in step.plan.make]
        if batch.speculates:
            controller.cut(batch)
        for slot, step in enumerate(batch.steps):
            accepted = next((n for n in range(len(step.tree) - 1) if random.random() >= share), len(step.tree) - 1)
            step.outcome = outcome(step.tree, accepted)  # type: ignore[arg-type]
            tokens[slot] += 1 + accepted
            if tokens[slot] % 64 < 1 + accepted:
                requests[slot] = sequence()
        rows = verifying.rows([len(step.tree) for step in batch.steps])
        made_ms = {call: draft_ms} if drafted else {}
        batch.times = StepTimes(0.0, made_ms, row_ms(rows), HOST_MS)
        verifying.observe(sequences, rows, row_ms(rows))
        controller.observe(batch)
        spent += row_ms(rows) + HOST_MS + sum(made_ms.values())
    return sum(tokens) / spent / (sequences / (row_ms(sequences) + HOST_MS))


@pytest.mark.parametrize("sequences", [2, 4, 8, 16])
def test_drafts_that_do_not_pay_are_seldom_made_for_a_batch(sequences: int) -> None:
    """All requests wait for a draft, and new ones know what earlier ones have learned. Good drafts are made always."""
    assert drafting(sequences, 8.0, 0.3) > 0.985
    assert drafting(sequences, 2.0, 0.8) > 1.15


def test_a_drafter_call_is_priced_by_its_users() -> None:
    """Calls of eight do not make one's dear."""
    found, call = StepCosts(), (DRAFTER, OfferKind.FRESH)
    found.expect(call, 5.0)
    requests = [sequence() for _ in range(8)]
    for _ in range(40):
        batch = Offered.of(requests, [offers() for _ in requests])
        Adaptive(costs(8)).plan(batch)
        for step in batch.steps:
            step.plan = Plan(step.plan.limits, step.plan.found, (Offer(OfferKey(*call)),))
        batch.times = StepTimes(0.0, {call: 32.0}, 10.0, HOST_MS)
        assert found.shares_ms(batch)[0] >= 0.5
    assert found.call_ms(call, 8) == pytest.approx(32.0, rel=0.2)
    assert found.call_ms(call, 1) == 5.0
    assert 5.0 < found.call_ms(call, 2) < 10.0


def test_batches_with_requests_of_other_controllers_have_accounts_of_their_own() -> None:
    """Their plain steps take the time of the others' trees, too."""
    statistics, requests = MethodStatistics(), [sequence() for _ in range(3)]
    batch = Offered.of(requests, [None] * 3)
    statistics.account(batch).audited(20.0, 10.0)
    assert statistics.account(batch).plain == 2.0
    assert statistics.account(batch.part(batch.steps[:2])).plain == 1.0


def test_a_new_size_of_batches_begins_with_the_balance_of_the_nearest_but_without_debt() -> None:
    statistics, requests = MethodStatistics(), [sequence() for _ in range(8)]

    def account(sequences: int) -> Account:
        return statistics.account(Offered.of(requests[:sequences], [None] * sequences))

    assert account(2).balance == 1.0
    account(2).balance = 0.4
    account(8).balance = -0.7
    assert account(3).balance == 0.4
    assert account(7).balance == 0.0
    account(7).balance = 5.0
    assert account(6).balance == 1.0


def test_a_slow_first_step_costs_nothing_since_no_plain_step_says_what_is_usual() -> None:
    account = Account()
    account.speculative(20.0, 1.0, estimate_ms=10.0, added_ms=0.0)
    assert account.closed
    account.audited(20.0, 10.0)
    assert not account.closed
    account.speculative(20.0, 1.5, estimate_ms=10.0, added_ms=0.0)
    assert account.balance > 1.4


def test_an_account_is_audited_often_until_it_is_half_full() -> None:
    account, audits = Account(plain_steps=1), []
    while len(audits) < 6:
        speculated = 0
        while not account.closed:
            account.speculative(10.0, 1.06, estimate_ms=10.0, added_ms=0.0)
            speculated += 1
        audits.append(speculated)
        account.audited(10.0, 10.0)
    assert audits == [8, 8, 8, 8, 8, 8]
    account.balance = 4.0
    account.audited(10.0, 10.0)
    while not account.closed:
        account.speculative(10.0, 1.06, estimate_ms=10.0, added_ms=0.0)
    account.audited(10.0, 10.0)
    assert account.audit == 16


def test_steps_that_gain_less_than_the_margin_use_the_account_up() -> None:
    account, steps = Account(plain_steps=1), 0
    while account.balance > 0:
        account.speculative(10.0, 1.0, estimate_ms=10.0, added_ms=0.0)
        steps += 1
    assert 90 < steps < 110


def test_an_account_pays_for_steps_whose_estimates_are_far_too_low() -> None:
    account, steps = Account(plain_steps=1), 0
    while not account.closed:
        account.speculative(50.0, 3.0, estimate_ms=10.0, added_ms=2.0)
        steps += 1
    assert steps < 8


def test_an_account_takes_steps_that_took_no_time() -> None:
    """A coarse clock, or a device that nobody waited for."""
    account = Account(plain_steps=1)
    account.audited(0.0, 10.0)
    account.speculative(0.0, 1.0, estimate_ms=10.0, added_ms=1.0)
    assert not account.closed


def waiting_offers(*waiting: int) -> list[list[Offer]]:
    """Return a fresh draft of each request, whose drafter has put off so many rows."""
    return [[Offer(OfferKey(DRAFTER, OfferKind.FRESH), maker=MAKER, waiting=rows)] for rows in waiting]


def test_of_a_batch_the_request_with_the_fewest_waiting_rows_tries_a_draft_that_does_not_pay() -> None:
    controller, requests, tried = Adaptive(costs(3)), [sequence() for _ in range(3)], list[int]()
    controller.expect(DRAFTER, Costs(1000.0, 0.0))
    for _ in range(40):
        batch = Offered.of(requests, waiting_offers(80, 0, 200))
        controller.plan(batch)
        drafted = [slot for slot, step in enumerate(batch.steps) if step.plan.make]
        for slot in drafted:
            batch.steps[slot].made = [(batch.steps[slot].plan.make[0], chain(0.5))]
        controller.cut(batch)
        tried += drafted
    assert len(tried) > 3
    assert set(tried) == {1}


@pytest.mark.parametrize(("slots", "most"), [(2, 1), (1, 8)])
def test_requests_that_are_alone_for_a_moment_learn_together_that_drafts_do_not_pay(slots: int, most: int) -> None:
    """Where others can join, eight requests one after the other lose one draft. Otherwise each tries for itself."""
    controller, drafts = Adaptive(costs(slots)), 0
    controller.expect(DRAFTER, Costs(1000.0, 0.0))
    for _ in range(8):
        request = sequence()
        for _ in range(3):
            batch = Offered.of([request], waiting_offers(0))
            controller.plan(batch)
            (step,) = batch.steps
            step.made = [(offer, chain(0.01)) for offer in step.plan.make]
            controller.cut(batch)
            drafts += len(step.made)
            step.outcome = outcome(step.tree, 0)
            made_ms = {(DRAFTER, OfferKind.FRESH): 1000.0} if step.made else {}
            batch.times = StepTimes(0.0, made_ms, row_ms(1), HOST_MS)
            controller.observe(batch)
    assert 1 <= drafts <= most
    assert slots > 1 or drafts == most


def test_rows_that_wait_have_a_price_which_later_drafts_share() -> None:
    """A row takes 1 ms. Drafts pay for requests that have few rows waiting, and for none that has many."""
    controller, requests = Adaptive(costs(2)), [sequence() for _ in range(2)]
    controller.expect(DRAFTER, Costs(0.5, 0.0))
    drafted = []
    for _ in range(60):
        batch = Offered.of(requests, waiting_offers(2, 900))
        controller.plan(batch)
        drafted = [bool(step.plan.make) for step in batch.steps]
        for step in batch.steps:
            step.made = [(offer, chain(0.9, 0.9)) for offer in step.plan.make]
        controller.cut(batch)
        waited = sum(offer.waiting for step in batch.steps for offer in step.plan.make)
        for step in batch.steps:
            step.outcome = outcome(step.tree, len(step.tree) - 1)  # type: ignore[arg-type]
        batch.times = StepTimes(0.0, {}, row_ms(2), HOST_MS, catch_up_ms=float(waited))
        controller._methods.account(batch).balance = 8.0
        controller.observe(batch)
    assert drafted == [True, False]


def test_an_account_pays_for_rows_that_waited() -> None:
    controller, requests = Adaptive(costs(2)), [sequence() for _ in range(2)]
    balances = []
    for caught_up_ms in (0.0, 10.8):
        batch = Offered.of(requests, waiting_offers(1, 1))
        controller._methods.account(batch).plain_steps = 1
        controller.plan(batch)
        for step in batch.steps:
            step.outcome = outcome(step.tree, 0)  # type: ignore[arg-type]
        batch.times = StepTimes(0.0, {}, row_ms(2), 0.0, caught_up_ms)
        controller.observe(batch)
        balances.append(controller._methods.account(batch).balance)
    assert balances[0] - balances[1] == pytest.approx(1.01)
