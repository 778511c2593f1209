"""The adaptive controller: it chooses tree sizes from the measured cost curve and recent acceptance."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from redraft.runtime.controllers.base import Controller, merged_ready
from redraft.runtime.controllers.calibration import FAST, SLOW
from redraft.runtime.controllers.cost import VerifyCosts
from redraft.runtime.controllers.experience import (
    ControllerState,
    Experience,
    Gain,
    MethodStatistics,
    StepCosts,
    Tries,
)
from redraft.runtime.controllers.probes import Probes
from redraft.runtime.controllers.sizes import Ranking, TreeShares, best_first, ranked_shares
from redraft.runtime.trees.offers import NO_TREE, Offer, OfferKey, Plan, StepLimits
from redraft.runtime.trees.tree import cut, merge, pinned_nodes
from redraft.types import NO_SPECULATION, Budget, Choice, Costs, OfferKind, Outcome, Together, Tree

if TYPE_CHECKING:
    from redraft.runtime.requests.batch import Batch, Call, RequestStep
    from redraft.runtime.requests.request import Request

MAX_DEPTH = 16
_SHARE = 16
"""Drafts that share the price of rows that waited."""
LONGEST_PAUSE = 32
"""Plain steps, at most, between two attempts while speculation does not pay."""
_LEARN = 1 / 8
_TOLERANCE = 0.99
_FEW = 4
"""A draft that decides whether to continue uses the mean cost of its first few nodes."""
_SURE = 0.9
"""Drafts always continue below nodes of this joint probability, so that the controller learns what follows them."""


class Adaptive(Controller):
    """Maximises tokens per millisecond.

    A tree of its n likeliest nodes yields 1 + (the sum of their joint probabilities) tokens in t(n + 1) ms. A lookup
    estimates its own probabilities. Those of a drafter's trees are corrected by depth (`DepthCalibration`), or learned
    by rank if the trees stay on a device (`RankCalibration`). The best n has the largest yield less `rate` tokens for
    every millisecond, and this difference is the tree's gain. `rate` is the sequence's present rate, at least that of
    plain decoding (Dinkelbach's method for a ratio of sums). The ratio of one step alone would make trees too small.
    Pinned nodes are verified at any gain, since they bring tokens to later steps. Their costs count, so a tree's gain
    may be negative.

    The requests of a batch share a call, so its rate is the sum of theirs, and each row costs time of all. The next row
    goes to the likeliest node of all trees, until a node brings fewer tokens than its row costs. If the verifier pads
    trees, all have one number of nodes, whose yield is the sum of the trees'.

    The controller uses the offer with the largest gain, less the cost of making its tree. It takes no resampled tree
    together with a fresh draft, since that brings few more tokens than the draft. The gain of a ready tree is known.
    The gains of a fresh draft, and of resampling by remaining steps, are learned from recent steps. If a fresh draft
    does not pay, the next one is delayed, and the delay doubles each time. A drafter that can stop inside a draft ends
    it where a node's joint probability no longer pays for one more level of drafting and verification.

    Speculation pauses if speculative steps yield less per millisecond than plain ones, the host's time included. The
    pause is one step at first, and doubles each time. A step after a pause counts more than others, as such steps are
    few. In a batch, a request pays for what it adds to the plain call: its rows, its lookup, its part of a draft. It
    pays B times that for B sequences, since all of them wait. A batch has an `Account` of its gains: without it, many
    requests that each lose a little, and learn it each, would lose too much. While it is empty, all steps are plain.
    One that is alone where others can join has an account too: it may end before it has learned.
    A new request starts with its method's experience, and a new method with some credit.
    """

    weighs = True

    def __init__(self, verifying: VerifyCosts) -> None:
        self._verifying = verifying
        self._shared = max(verifying.measured) > 1
        """True if several requests can share a call, though one may be alone at the moment."""
        self._full = Budget(nodes=verifying.largest - 1, depth=MAX_DEPTH, width=verifying.largest - 1)
        self.gain = Gain()
        """Of all steps in which no other controller drafted."""
        self._methods = MethodStatistics()
        self._costs = StepCosts()
        self._probes = Probes()
        self._known: Sequence[float] = ()
        self._table: Sequence[float] = ()
        """The cost table of this step for trees of this controller alone: by drafted nodes, of each tree if padded."""
        self._priced: Sequence[float] = ()
        """The same table, next to the trees of other controllers."""
        self._rate = 0.0
        """Tokens that a millisecond of this step's call must bring."""
        self._values: defaultdict[Call, float] = defaultdict(float)
        self._users: Counter[tuple[str, OfferKind]] = Counter()
        """Requests that could share a drafter's call in this step."""

    def expect(self, drafter: str, costs: Costs) -> None:
        """Use these costs of a drafter's calls until its calls have been timed."""
        self._costs.expect((drafter, OfferKind.FRESH), costs.fresh_ms)
        self._costs.expect((drafter, OfferKind.RESAMPLE), costs.resample_ms)

    def forget(self, drafter: str) -> None:
        """Learn anew what a drafter's calls cost and bring, since another one has its name now."""
        self._costs.forget(drafter)
        self._methods.forget(drafter)

    def plan(self, batch: Batch) -> None:
        """Select the offer with the largest gain for each request that does not pause."""
        self._begin(batch.sequences)
        closed = self._shared and self._methods.account(batch).closed
        asked = []
        for step in batch.steps:
            state = self._methods.state_of(step.request)
            state.weighed, state.probed, state.together, state.tried = None, False, None, False
            state.waiting, pauses = max(state.waiting - 1, 0), closed or state.waiting > 0
            limits, offers = batch.ask(step, NO_SPECULATION if pauses else self._full)
            if limits is not NO_TREE:
                asked.append((step, state, limits, offers))
        self._set_rate(batch.sequences, [state.experience for _, state, _, _ in asked])
        self._users = Counter([(offer.key.drafter, offer.key.kind) for *_, offers in asked for offer in offers])
        self._values.clear()
        ready = []
        for step, state, _, offers in asked:
            state.rate = self._rate / (1 if self._verifying.packed else len(asked))
            ready.append(self._ready(step.request, state, offers))
        self._set_tries([(state, offers) for _, state, _, offers in asked], batch.sequences)
        for (step, state, limits, offers), found in zip(asked, ready, strict=True):
            step.use(self._plan(state, offers, limits, found))

    def _begin(self, sequences: int) -> None:
        """Use the costs for `sequences` sequences."""
        known = self._verifying.table_ms(sequences)
        self._probes.steps += 1
        if known is not self._known:
            self._known = known
            self._table = known if self._verifying.packed else [0.0, *known[1::sequences]]
            self._probes.compare(sequences, self._table)
        self._priced = self._table

    def _set_rate(self, sequences: int, known: Sequence[Experience]) -> None:
        """Set the rate from the experience of the speculating requests. Others bring a token in each plain step."""
        others = sequences - len(known)
        tokens = sum([one.tokens for one in known]) + others
        plain_steps = sum([one.plain_steps for one in known]) + others
        self._rate = sequences * (max(tokens / plain_steps, 1.0) / self._table[1])

    def _ready(self, request: Request, state: ControllerState, offers: Sequence[Offer]) -> Tree:
        """Return the ready tree, and add what the drafters' offers promise beyond it to the values of their calls."""
        found = merged_ready(request, offers)
        state.shares = ranked_shares(found.log_probs, found.pinned) if len(found) > 1 else ()
        state.least = pinned_nodes(found)
        state.ready = best_first(state.shares, state.rate, self._table, state.least)
        for offer in offers:
            if offer.maker is not None:
                self._values[offer.key.drafter, offer.key.kind] += self._value(state, offer.key)
        return found

    def _value(self, state: ControllerState, key: OfferKey) -> float:
        """Return the tokens that an offer promises beyond the ready tree, at least 0."""
        return max(state.gain.get(key, state.ready[1] + 1.0) - state.ready[1], 0.0)

    def _set_tries(self, asked: Sequence[tuple[ControllerState, Sequence[Offer]]], sequences: int) -> None:
        """Choose the requests that draft although it may not pay: of a batch, the one with the fewest rows waiting."""
        due: dict[int, tuple[int, ControllerState]] = {}
        for state, offers in asked:
            waiting = next((offer.waiting for offer in offers if offer.key.kind is OfferKind.FRESH), None)
            if waiting is None:
                continue
            tries = self._tries(state)
            tries.since += 1
            if tries.since > tries.patience * sequences and waiting < due.get(id(tries), (sys.maxsize, state))[0]:
                due[id(tries)] = waiting, state
        for _, state in due.values():
            state.tried = True

    def _tries(self, state: ControllerState) -> Tries:
        """Return the tries of a request's method, or its own if no other request can wait for its drafts."""
        return state.method.tries if self._shared else state.tries

    def _plan(self, state: ControllerState, offers: Sequence[Offer], limits: StepLimits, found: Tree) -> Plan:
        best, taken, fresh = state.ready[1], None, None
        state.gains = gains = {OfferKind.LOOKUP: best}
        for offer in offers:
            if offer.maker is not None:
                kind = offer.key.kind
                known = state.gain.get(offer.key)
                gain = max(gains.values()) + 1.0 if known is None else known
                gain -= self._price_of(state, offer)
                gains[kind] = max(gain, gains.get(kind, gain))
                if gain > best:
                    best, taken = gain, offer
                if state.tried and kind is OfferKind.FRESH:
                    fresh = offer
        taken = fresh or taken
        if taken is not None and taken.step_ms:
            limits = limits._replace(budget=self._stopping(limits.budget, taken, state))
        return Plan(limits, found, (taken,) if taken else ())

    def _price_of(self, state: ControllerState, offer: Offer) -> float:
        """Return the tokens that a drafter's call costs one request.

        Requests share the price of a call by what it promises them, and take it if it pays for all of them together.
        Rows that wait serve later drafts too, so that each pays a part of them.
        """
        call = offer.key.drafter, offer.key.kind
        price = self._rate * self._costs.call_ms(call, self._users[call])
        value, total = self._value(state, offer.key), self._values[call]
        rows = self._rate * self._costs.row_ms(offer.key.drafter) * offer.waiting / _SHARE
        return rows + (price * value / total if value > 0 else price)

    def _stopping(self, budget: Budget, offer: Offer, state: ControllerState) -> Budget:
        """Return a budget that ends a draft where one more level would cost more tokens than it adds.

        A stop must not read tokens that were drawn, so draws get a depth, by the acceptance of earlier ones.
        """
        table, key = self._table, offer.key
        few = min(_FEW, len(table) - 2)
        node_ms = (table[1 + few] - table[1]) / max(few, 1)
        level_ms = offer.step_ms * (self._rate / state.rate) / max(self._users[key.drafter, key.kind], 1)
        least = min(state.rate * (level_ms + node_ms), 1.0)
        if state.noise != "drawn":
            below = self._methods.depths(key, state.noise).tokens_below
            return replace(budget, share=min(least / max(below, least), _SURE))
        shares = self._methods.ranks(key, state.noise).shares(budget.depth)
        paying = next((rank for rank, share in enumerate(shares) if share < least), len(shares))
        return replace(budget, depth=min(budget.depth, paying + 1))

    def cut(self, batch: Batch) -> None:
        """Cut the trees to the nodes that are worth their rows, all together."""
        self._price(batch)
        steps = [step for step in batch.steps if step.plan.speculates]
        if not steps:
            return
        states, wholes = [self._methods.state_of(step.request) for step in steps], []
        for step, state in zip(steps, states, strict=True):
            state.rate *= self._table[1] / self._priced[1]
            wholes.append(self._weigh(state, step.plan, step.made))
        ranking = Ranking([TreeShares(state.shares, state.least) for state in states], self._verifying.packed)
        together = None
        if batch.sequences > 1:
            together = Together(self._rate, self._verifying.packed, ranking.shares, ranking.least)
        if together is None and not steps[0].plan.make:
            paying, gain = states[0].ready
        else:
            paying, gain = best_first(ranking.shares, self._rate, self._priced, ranking.least)
        self._learn_gains(steps, states, ranking.sizes(paying), paying, None if together else gain, batch.sequences)
        nodes = paying
        if batch.widest == 1:
            most_ms = self._methods.account(batch).balance * self._table[1] if self._shared else inf
            nodes = self._probes.nodes(batch.sequences, self._table, paying, len(ranking.shares), most_ms)
        for step, state, whole, size in zip(steps, states, wholes, ranking.sizes(nodes), strict=True):
            state.probed, state.together = nodes > paying, together
            step.tree = cut(whole, step.plan.limits, size)

    def _price(self, batch: Batch) -> None:
        """Set this step's cost table and rate, given the trees of other controllers."""
        table, end = self._table, len(self._table) - 1
        if self._verifying.packed:
            drafted = min(max(batch.rows + len(batch.steps) - batch.sequences, 0), end - 1)
            self._priced = [0.0, *table[1 + drafted :]] if drafted else table
        elif batch.widest > 1:
            paid = table[min(batch.widest, end)]
            self._priced = [0.0, *[max(ms, paid) for ms in table[1:]]]
        self._rate *= table[1] / self._priced[1]

    def _weigh(self, state: ControllerState, plan: Plan, made: Sequence[tuple[Offer, Tree]]) -> Tree:
        """Return all nodes that could be verified for a sequence. Sets the probability of each node to be accepted."""
        tree = plan.found
        for offer, new in made:
            if new.cut_at_end:
                return self._weigh_by_rank(state, plan, offer.key, new)
            if len(new) > 1:
                state.made = new
                tree = merge(tree, self._methods.depths(offer.key, state.noise).calibrated(new))
                state.shares = ranked_shares(tree.log_probs, tree.pinned)
        state.weighed = plan.found, tree, None
        return tree

    def _weigh_by_rank(self, state: ControllerState, plan: Plan, key: OfferKey, made: Tree) -> Tree:
        """Return the better of two trees, where the new one may be cut only at its end. Otherwise as `_weigh`.

        Merging them would copy a tree from the device, and would let the size of a tree of draws depend on its draws.
        """
        shares = self._methods.ranks(key, state.noise).shares(len(made) - 1)
        _, gain = best_first(shares, state.rate, self._priced)
        tree = made if gain >= state.ready[1] else plan.found
        if tree is made:
            state.shares, state.least = shares, 0
        state.weighed = plan.found, tree, shares if tree is made else None
        state.made = made if tree is made else None
        return tree

    def _learn_gains(
        self, steps: Sequence[RequestStep], states: Sequence[ControllerState], sizes: Sequence[int], nodes: int,
        gain: float | None, sequences: int,
    ) -> None:  # fmt: skip
        """Learn from each new tree: its expected tokens less its part of the rows' cost, or `gain` if it is alone."""
        row = self._rate * (self._priced[1 + nodes] - self._priced[1]) / max(sum(sizes), 1)
        gained: dict[Call, list[tuple[ControllerState, float]]] = {}
        for step, state, size in zip(steps, states, sizes, strict=True):
            for offer, _ in step.made:
                key = offer.key
                own = sum(state.shares[:size]) - row * size if gain is None else gain
                for known, weight in ((state.gain, _LEARN), (state.method.gain, FAST)):
                    before = known.get(key, own)
                    known[key] = before + weight * (own - before)
                gained.setdefault((key.drafter, key.kind), []).append((state, own - state.gains[OfferKind.LOOKUP]))
        for call, users in gained.items():
            if call[1] is OfferKind.FRESH:
                pays = sum([max(more, 0.0) for _, more in users]) > self._rate * self._costs.call_ms(call, len(users))
                state, more = users[0]
                longest = LONGEST_PAUSE * (2 if self._shared else 1)
                self._tries(state).made(pays and (more > 0 or self._shared), longest)

    def explain(self, request: Request) -> Choice | None:
        """Return the inputs of the request's latest choice."""
        state = self._methods.state_of(request)
        if state.weighed is None:
            return None
        weighed = *state.weighed, self._priced
        return Choice(state.rate, state.gains, state.tried, *weighed, state.probed, state.together, state.least)

    def observe(self, batch: Batch) -> None:
        """Update the costs, the state of each sequence, and the statistics of its method."""
        shares_ms = self._costs.shares_ms(batch)
        steps = [step for step in batch.steps if step.plan.speculates]
        account, times = self._methods.account(batch), batch.times
        spent_ms = times.verified_ms + times.host_ms + sum(times.made_ms.values())
        table = self._priced
        if not steps:
            self._note_gain(batch, spent_ms, spent_ms)
            account.audited(spent_ms, table[1])
            return
        drafted = [len(step.tree) - 1 for step in steps]
        count = sum(drafted) if self._verifying.packed else max(drafted)
        rows_ms = table[min(1 + count, len(table) - 1)] - table[1]
        added_rows = count if self._verifying.packed else count * batch.sequences
        plain_share = self._verifying.plain_share(batch.sequences, batch.sequences + added_rows)
        plain_ms = times.verified_ms * plain_share + self._costs.plain_host_ms(batch)
        self._note_gain(batch, spent_ms + times.catch_up_ms, plain_ms)
        gained = sum([len(step.outcome.path) for step in steps if step.outcome is not None])
        tokens, added_ms = 1 + gained / batch.sequences, rows_ms + sum(shares_ms)
        account.speculative(spent_ms, tokens, table[1], added_ms, times.catch_up_ms)
        for step, nodes, ms in zip(steps, drafted, shares_ms, strict=True):
            added_ms = rows_ms * nodes / max(sum(drafted), 1) + ms
            if (outcome := step.outcome) is not None and outcome.error is None:
                self._learn(step, outcome, (table[1] + batch.sequences * added_ms) / table[1])

    def _note_gain(self, batch: Batch, spent_ms: float, plain_ms: float) -> None:
        """Add a step to the gain, given the time of a plain step of the batch."""
        others = batch.sequences - len(batch.steps)
        if not others or _nodes(batch.everyone) - _nodes(batch.steps) == others:
            tokens = sum([len(step.tokens) for step in batch.everyone]) / batch.sequences
            self.gain = self.gain.after(spent_ms, plain_ms * tokens)

    def _learn(self, step: RequestStep, outcome: Outcome, plain_steps: float) -> None:
        """Learn from a request's speculative step, whose cost counts as so many plain steps."""
        state, plan = self._methods.state_of(step.request), step.plan
        if plan.make and (made := state.made) is not None:
            key = plan.make[0].key
            if made.cut_at_end:
                self._methods.ranks(key, state.noise).observe(len(step.tree), outcome.path)
            else:
                self._methods.depths(key, state.noise).observe(made, outcome.tokens)
            state.made = None
        experience, tokens = state.experience, len(outcome.path) + 1
        if not state.probed:
            experience.update(tokens, plain_steps, _LEARN if state.pause > 1 else FAST)
            state.method.experience.update(tokens, plain_steps, SLOW)
        if experience.tokens < _TOLERANCE * experience.plain_steps:
            state.pause = min(max(2 * state.pause, 1), LONGEST_PAUSE)
            state.waiting = state.pause
        else:
            state.pause = 0


def _nodes(steps: Sequence[RequestStep]) -> int:
    return sum([len(step.tree) for step in steps])
