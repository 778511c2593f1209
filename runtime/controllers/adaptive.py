"""The adaptive controller: it chooses tree sizes from the measured cost curve and recent acceptance."""

# pylint: disable=too-many-lines  # one controller
from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from redraft.runtime.controllers.base import Call, merged_ready
from redraft.runtime.controllers.calibration import (
    FAST,
    SLOW,
    DepthCalibration,
    RankCalibration,
    best_first,
    ranked_shares,
)
from redraft.runtime.controllers.cost import VerifyCosts
from redraft.runtime.trees.offers import NO_TREE, Offer, OfferKey, Plan, StepLimits
from redraft.runtime.trees.tree import cut, merge, pinned_nodes, root_only
from redraft.types import NO_SPECULATION, Budget, Choice, Costs, OfferKind, Outcome, Tree

if TYPE_CHECKING:
    from redraft.runtime.requests.request import Request
    from redraft.runtime.sampling.noise import NoiseKind

MAX_DEPTH = 16
LONGEST_PAUSE = 32
"""Plain steps, at most, between two attempts while speculation does not pay."""
_LEARN = 1 / 8
_CREDIT = 1.0625
"""Assumed tokens of a new method's step that costs as much as a plain one: credit for a few lost steps."""
_OUTLIER, _LEAST_MS = 2.0, 0.05
_TOLERANCE = 0.99
_FIRST_PROBE, _LONGEST_PROBE = 8, 256
"""Steps between two probes of a size that does not seem to pay."""
_PROBED = (8, 4, 2)
"""Sizes to probe, root included."""
_NEAR = 0.1
_FEW = 4
"""A draft that decides whether to continue uses the mean cost of its first few nodes."""
_SURE = 0.9
"""Drafts always continue below nodes of this joint probability, so that the controller learns what follows them."""


@dataclass(slots=True)
class Experience:
    """Running means over speculative steps: tokens committed by a step, and its cost in plain steps.

    The unit is a plain step, since the machine's load changes the time of both.
    """

    tokens: float
    plain_steps: float

    def update(self, tokens: int, plain_steps: float, weight: float) -> None:
        """Move the means by `weight` towards one step."""
        self.tokens += weight * (tokens - self.tokens)
        self.plain_steps += weight * (plain_steps - self.plain_steps)


@dataclass(slots=True)
class MethodRecord:
    """Statistics of a method's requests with one kind of noise, with which its next such request starts.

    gain: expected tokens of trees beyond their cost of verification, by offer.
    """

    experience: Experience = field(default_factory=lambda: Experience(tokens=_CREDIT, plain_steps=1.0))
    gain: dict[OfferKey, float] = field(default_factory=dict)


@dataclass(slots=True)
class ControllerState:
    """The controller's state of one sequence.

    method:   the record of its method.   noise: the kind of noise of its drafts' candidates.
    gain:     gains by offer as in `MethodRecord`, learned from its own steps.
    ready:    number of this step's ready nodes that are worth verifying, and their gain.
    made:     the tree that a drafter made for this step, for `observe`.
    rate, gains, tried, probed, together, least: fields of this step's `Choice`.   weighed: its found, whole and shares.
    shares:   probability of each node after the root to be accepted in this step, by `ranked_shares`.
    waiting:  steps still to pause.   pause: length of the latest pause.
    since_fresh, patience: steps since the last fresh draft, and the number after which another is tried.
    """

    experience: Experience
    method: MethodRecord
    noise: NoiseKind
    gain: dict[OfferKey, float]
    ready: tuple[int, float] = (0, 0.0)
    made: Tree | None = None
    rate: float = 0.0
    gains: dict[OfferKind, float] = field(default_factory=dict)
    tried: bool = False
    probed: bool = False
    shares: Sequence[float] = ()
    together: tuple[float, Sequence[float]] | None = None
    least: int = 0
    weighed: tuple[Tree, Tree, Sequence[float] | None] | None = None
    waiting: int = 0
    pause: int = 0
    since_fresh: int = 0
    patience: int = 1


class Adaptive:
    """Maximises tokens per millisecond.

    A tree of its n likeliest nodes yields 1 + (the sum of their joint probabilities) tokens in t(n + 1) ms. A lookup
    estimates its own probabilities. Those of a drafter's trees are corrected by depth (`DepthCalibration`), or learned
    by rank if the trees stay on a device (`RankCalibration`). The best n has the largest yield less `rate` tokens for
    every millisecond, and this difference is the tree's gain. `rate` is the sequence's present rate, at least that of
    plain decoding (Dinkelbach's method for a ratio of sums). The ratio of one step alone would make trees too small.
    In a batch, all trees are cut to one number of nodes, since the largest tree determines a call's cost. The batch's
    yield is then the sum of their yields, and its rate the sum of their rates. Pinned nodes are verified at any gain,
    since they bring tokens to later steps. Their costs count, so a tree's gain may be negative.

    The controller uses the offer with the largest gain, less the cost of making its tree. The gain of a ready tree is
    known. The gains of a fresh draft, and of resampling by remaining steps, are learned from recent steps. If a fresh
    draft does not pay, the next one is delayed, and the delay doubles each time. A drafter that can stop inside a draft
    ends it where a node's joint probability no longer pays for one more level of drafting and verification.

    Speculation pauses if speculative steps yield less per millisecond than plain ones, the host's time included. The
    pause is one step at first, and doubles each time. A step after a pause counts more than others, as such steps are
    few. A new request starts with its method's experience, and a new method with some credit. What greedy requests
    taught says little of sampled ones, so the controller keeps its statistics of acceptance by `DraftNoise.kind`.
    """

    weighs = True

    def __init__(self, verifying: VerifyCosts) -> None:
        self._verifying = verifying
        self._table: Sequence[float] = verifying.table_ms(1)
        self._priced = self._table
        """The cost table of this step. No size costs less than the largest tree of other controllers."""
        self._made_ms: dict[Call, float] = {}
        self._offers_ms: dict[str, float] = {}
        self._step_ms: dict[Call, float] = {}
        self._looked_up_ms = 0.0
        self._verified_ms = 0.0
        self._full = Budget(nodes=verifying.largest - 1, depth=MAX_DEPTH, width=verifying.largest - 1)
        self._host_ms: dict[tuple[int, str, bool], float] = {}
        self._steps, self._probe_at, self._probe_patience = 0, _FIRST_PROBE, _FIRST_PROBE
        self._probed: dict[int, tuple[int, float]] = {}
        self._probes = 0
        self._sequences, self._methods = 1, ""
        self._records: defaultdict[tuple[str, NoiseKind], MethodRecord] = defaultdict(MethodRecord)
        self._depths: defaultdict[tuple[str, OfferKind, NoiseKind], DepthCalibration] = defaultdict(DepthCalibration)
        self._ranks: defaultdict[tuple[OfferKey, NoiseKind], RankCalibration] = defaultdict(RankCalibration)

    def expect(self, drafter: str, costs: Costs) -> None:
        """Use these costs of a drafter's calls until its calls have been timed."""
        self._made_ms.setdefault((drafter, OfferKind.FRESH), costs.fresh_ms)
        self._made_ms.setdefault((drafter, OfferKind.RESAMPLE), costs.resample_ms)

    def begin(self, sequences: int, methods: str) -> None:
        """Begin a step with the costs for `sequences` sequences."""
        self._steps += 1
        table = self._verifying.table_ms(sequences)
        if table is not self._table:
            self._table = table
            probed = self._probed.pop(sequences, None)
            if probed is not None and not _near(table[probed[0]] / table[1], probed[1]):
                self._probe_patience = _FIRST_PROBE
                self._probe_at = self._steps
        self._priced = self._table
        self._sequences, self._methods = sequences, methods

    def budget(self, seq: Request) -> Budget:
        """Return the full budget, or none while speculation pauses."""
        state = self._state_of(seq)
        state.weighed, state.probed = None, False
        if state.waiting == 0:
            return self._full
        state.waiting -= 1
        return NO_SPECULATION

    def plan(
        self, batch: Sequence[Request], offers: Sequence[Sequence[Offer]], limits: Sequence[StepLimits]
    ) -> list[Plan]:
        """Select the offer with the largest gain for each sequence."""
        return [
            Plan(limit, root_only(seq.tokens[-1])) if limit is NO_TREE else self._plan(seq, offered, limit)
            for seq, offered, limit in zip(batch, offers, limits, strict=True)
        ]

    def _plan(self, seq: Request, offers: Sequence[Offer], limits: StepLimits) -> Plan:
        state = self._state_of(seq)
        experience = state.experience
        rate = state.rate = max(experience.tokens / experience.plain_steps, 1.0) / self._table[1]
        found = merged_ready(seq, offers)
        state.shares = ranked_shares(found.log_probs, found.pinned) if len(found) > 1 else ()
        state.least = pinned_nodes(found)
        state.ready = best_first(state.shares, rate, self._table, state.least)
        best, taken, fresh = state.ready[1], None, None
        state.gains = gains = {OfferKind.LOOKUP: best}
        for offer in offers:
            if offer.maker is not None:
                kind = offer.key.kind
                known = state.gain.get(offer.key)
                gain = max(gains.values()) + 1.0 if known is None else known
                gain -= rate * self._made_ms.get((offer.key.drafter, kind), 0.0)
                gains[kind] = max(gain, gains.get(kind, gain))
                if gain > best:
                    best, taken = gain, offer
                if kind is OfferKind.FRESH:
                    fresh = offer
        if fresh is not None:
            state.since_fresh += 1
        state.tried = fresh is not None and state.since_fresh > state.patience
        if state.tried:
            taken = fresh
        if taken is not None and taken.step_ms:
            limits = limits._replace(budget=self._stopping(limits.budget, taken, rate, state.noise))
        return Plan(limits, found, taken.key.kind if taken else OfferKind.LOOKUP, taken)

    def _stopping(self, budget: Budget, offer: Offer, rate: float, noise: NoiseKind) -> Budget:
        """Return a budget that ends a draft where one more level would cost more tokens than it adds.

        A stop must not read tokens that were drawn, so draws get a depth, by the acceptance of earlier ones.
        """
        table = self._table
        few = min(_FEW, len(table) - 2)
        node_ms = (table[1 + few] - table[1]) / max(few, 1)
        least = min(rate * (offer.step_ms + node_ms), 1.0)
        if noise != "drawn":
            below = self._depths_of(offer, noise).tokens_below
            return replace(budget, share=min(least / max(below, least), _SURE))
        shares = self._ranks[offer.key, noise].shares(budget.depth)
        paying = next((rank for rank, share in enumerate(shares) if share < least), len(shares))
        return replace(budget, depth=min(budget.depth, paying + 1))

    def cut(
        self, batch: Sequence[Request], plans: Sequence[Plan], made: Sequence[Tree | None], widest: int = 1
    ) -> list[Tree]:
        """Cut all trees to the number of nodes with the largest gain."""
        self._price(widest)
        table = self._priced
        wholes, shares, states = [], [], []
        others = self._sequences - len(batch)
        rate = others / table[1] if others else 0.0
        for seq, plan, tree in zip(batch, plans, made, strict=True):
            if plan.speculates:
                state = self._state_of(seq)
                states.append((state, plan, tree))
                if table is not self._table:
                    state.rate *= self._table[1] / table[1]
                wholes.append(self._weigh(state, plan, tree))
                shares.append(state.shares)
                rate += state.rate
            else:
                wholes.append(plan.found)
                rate += 1 / table[1]
        if not states:
            return wholes
        alone = self._sequences == 1
        each = shares[0] if alone else [sum(ranked) for ranked in zip_longest(*shares, fillvalue=0.0)]
        least = max([state.least for state, _, _ in states])
        paying, gain = states[0][0].ready if alone and not plans[0].make else best_first(each, rate, table, least)
        nodes, probed = paying, widest == 1 and self._steps >= self._probe_at and len(each) > paying
        if probed:
            wider = self._probe(min(len(each) + 1, len(table) - 1))
            probed, nodes = wider > paying, max(paying, wider)
        for state, plan, tree in states:
            state.probed, state.least, state.together = probed, least, None if alone else (rate, each)
            if plan.make is not None and tree is not None:
                self._learn_gain(state, plan.make.key, gain if alone else self._own_gain(state, paying))
        return [
            cut(whole, plan.limits, nodes) if plan.speculates else whole
            for whole, plan in zip(wholes, plans, strict=True)
        ]

    def _price(self, widest: int) -> None:
        """Set this step's cost table, given the largest tree of other controllers."""
        if widest > 1:
            paid = self._table[min(widest, len(self._table) - 1)]
            self._priced = [0.0, *[max(ms, paid) for ms in self._table[1:]]]

    def _own_gain(self, state: ControllerState, nodes: int) -> float:
        """Return the gain of one sequence of a batch if all trees have `nodes` nodes, at least 0."""
        expected = sum(state.shares[:nodes]) - state.rate * (self._priced[nodes + 1] - self._priced[1])
        return max(expected, 0.0)

    def _weigh(self, state: ControllerState, plan: Plan, made: Tree | None) -> Tree:
        """Return all nodes that could be verified for a sequence. Sets the probability of each node to be accepted."""
        tree = plan.found
        if made is not None and made.cut_at_end:
            return self._weigh_by_rank(state, plan, made)
        if made is not None and len(made) > 1:
            state.made = made
            assert plan.make is not None
            tree = merge(tree, self._depths_of(plan.make, state.noise).calibrated(made))
            state.shares = ranked_shares(tree.log_probs, tree.pinned)
        state.weighed = plan.found, tree, None
        return tree

    def _weigh_by_rank(self, state: ControllerState, plan: Plan, made: Tree) -> Tree:
        """Return the better of two trees, where the new one may be cut only at its end. Otherwise as `_weigh`.

        Merging them would copy a tree from the device, and would let the size of a tree of draws depend on its draws.
        """
        assert plan.make is not None
        shares = self._ranks[plan.make.key, state.noise].shares(len(made) - 1)
        _, gain = best_first(shares, state.rate, self._priced)
        tree = made if gain >= state.ready[1] else plan.found
        if tree is made:
            state.shares, state.least = shares, 0
        state.weighed = plan.found, tree, shares if tree is made else None
        state.made = made if tree is made else None
        return tree

    def _probe(self, largest: int) -> int:
        """Return how many nodes to verify although they do not seem to pay. Sizes take turns, up to `largest`.

        A size that is never verified is never timed, so its estimate could stay too high. The delay until the next
        probe doubles, unless this probe finds the estimate wrong.
        """
        size = min(_PROBED[self._probes % len(_PROBED)], largest)
        self._probes += 1
        self._probe_patience = min(2 * self._probe_patience, _LONGEST_PROBE)
        self._probe_at = self._steps + self._probe_patience
        self._probed[self._sequences] = size, self._table[size] / self._table[1]
        return size - 1

    def _depths_of(self, offer: Offer, noise: NoiseKind) -> DepthCalibration:
        return self._depths[offer.key.drafter, offer.key.kind, noise]

    def explain(self, seq: Request) -> Choice | None:
        """Return the inputs of the sequence's latest choice."""
        state = self._state_of(seq)
        if state.weighed is None:
            return None
        weighed = *state.weighed, self._priced
        return Choice(state.rate, state.gains, state.tried, *weighed, state.probed, state.together, state.least)

    def timed(self, offers_ms: float, made_ms: Mapping[Call, float], nodes: int) -> None:
        """Update the estimated costs of drafter calls and offers."""
        known_ms = self._offers_ms.setdefault(self._methods, offers_ms)
        counted_ms = self._looked_up_ms = _without_outlier(offers_ms, known_ms)
        self._offers_ms[self._methods] = known_ms + FAST * (counted_ms - known_ms)
        self._verified_ms = self._priced[min(nodes, len(self._priced) - 1)]
        self._step_ms = {}
        for call, taken_ms in made_ms.items():
            known_ms = self._made_ms.setdefault(call, taken_ms)
            counted_ms = self._step_ms[call] = _without_outlier(taken_ms, known_ms)
            self._made_ms[call] = known_ms + FAST * (counted_ms - known_ms)

    def observe(self, seq: Request, plan: Plan, tree: Tree, outcome: Outcome) -> None:
        """Update the state of the sequence and the statistics of its method."""
        if not plan.speculates:
            return
        state: ControllerState = seq.control
        ms = self._verified_ms + self._extra_ms()
        if plan.make is not None:
            if (made := state.made) is not None:
                if made.cut_at_end:
                    self._ranks[plan.make.key, state.noise].observe(len(tree), outcome.path)
                else:
                    self._depths_of(plan.make, state.noise).observe(made, outcome.tokens)
                state.made = None
            ms += self._step_ms.get((plan.make.key.drafter, plan.kind), 0.0)
        experience = state.experience
        if not state.probed:
            steps = ms / self._priced[1]
            experience.update(len(outcome.path) + 1, steps, _LEARN if state.pause > 1 else FAST)
            state.method.experience.update(len(outcome.path) + 1, steps, SLOW)
        if experience.tokens < _TOLERANCE * experience.plain_steps:
            state.pause = min(max(2 * state.pause, 1), LONGEST_PAUSE)
            state.waiting = state.pause
        else:
            state.pause = 0

    def ended(self, speculated: bool, host_ms: float) -> None:
        """Update the estimated host time of plain and of speculative steps."""
        key = self._sequences, self._methods, speculated
        known_ms = self._host_ms.setdefault(key, host_ms)
        self._host_ms[key] += FAST * (_without_outlier(host_ms, known_ms) - known_ms)

    def _extra_ms(self) -> float:
        """Return the host's extra milliseconds in a speculative step, compared with a plain one.

        The result is at least the time of lookups.
        """
        plain, speculated = (self._host_ms.get((self._sequences, self._methods, kind)) for kind in (False, True))
        known = plain is not None and speculated is not None
        return max(speculated - plain, self._looked_up_ms) if known else self._looked_up_ms  # type: ignore[operator]

    def _learn_gain(self, state: ControllerState, key: OfferKey, gain: float) -> None:
        """Record the gain of a new tree, and delay the next fresh draft if this one did not pay."""
        for known, weight in ((state.gain, _LEARN), (state.method.gain, FAST)):
            before = known.get(key, gain)
            known[key] = before + weight * (gain - before)
        if key.kind is OfferKind.FRESH:
            pays = gain - state.rate * self._made_ms.get((key.drafter, key.kind), 0.0) > state.gains[OfferKind.LOOKUP]
            state.since_fresh, state.patience = 0, 1 if pays else min(2 * state.patience, LONGEST_PAUSE)

    def _state_of(self, seq: Request) -> ControllerState:
        state: ControllerState | None = seq.control
        if state is None:
            noise = seq.noise.kind
            record = self._records[seq.speculation.method, noise]
            known = record.experience
            state = ControllerState(Experience(known.tokens, known.plain_steps), record, noise, dict(record.gain))
            seq.control = state
        return state


def _without_outlier(taken_ms: float, known_ms: float) -> float:
    """Return the time of a call, limited if it is an outlier.

    An interrupted call would make the size look expensive, and delay its next use.
    """
    return min(taken_ms, _OUTLIER * max(known_ms, _LEAST_MS))


def _near(ratio: float, other: float) -> bool:
    return abs(ratio / other - 1) < _NEAR
