"""What the adaptive controller learns from steps: tokens and costs, by request, by method, and by kind of call.

All of it is bounded: what was not used for longest is dropped.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from redraft.lru import LruCache
from redraft.runtime.controllers.calibration import FAST, DepthCalibration, RankCalibration
from redraft.runtime.trees.offers import OfferKey
from redraft.types import OfferKind, Together, Tree

if TYPE_CHECKING:
    from redraft.runtime.requests.batch import Batch, Call, RequestStep
    from redraft.runtime.requests.request import Request
    from redraft.runtime.sampling.noise import NoiseKind

MOST_METHODS = 256
"""Methods and kinds of noise, kinds of calls, and mixes of methods in a batch, whose statistics are kept."""
_CREDIT = 1.0625
"""Assumed tokens of a new method's step that costs as much as a plain one: credit for a few lost steps."""
_OUTLIER, _LEAST_MS = 2.0, 0.05
_PREMIUM, _MARGIN, _FIRST_BALANCE, _MOST_SAVED, _MOST_OWED = 0.005, 0.01, 1.0, 8.0, 1.0
"""Of a batch's account, in plain steps: the premium of a plain step, the least gain of a speculative one, and the first
balance, the largest, and the debt."""
_SETTLED = 4
"""Latest plain steps whose mean time gains are compared with. The machine's speed drifts within seconds."""
_FIRST_AUDIT, _LONGEST_AUDIT = 8, 256
"""Speculative steps of a batch before a plain one, whose time corrects what gains are compared with."""


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
class Tries:
    """Fresh drafts although they do not seem to pay. The delay doubles each time that one does not.

    since: steps of requests since the latest draft.   patience: steps before the next one.
    """

    since: int = 0
    patience: int = 1

    def made(self, pays: bool, longest: int) -> None:
        """Note a fresh draft."""
        self.since, self.patience = 0, 1 if pays else min(2 * self.patience, longest)


@dataclass(slots=True)
class Mean:
    """A running mean of milliseconds; None before the first.

    An interrupted call would make its kind look expensive, and delay the next. So the times of outliers are limited.
    """

    ms: float | None = None

    def add(self, taken_ms: float) -> float:
        """Move the mean towards a time. Returns the time that counted."""
        known_ms = taken_ms if self.ms is None else self.ms
        counted_ms = min(taken_ms, _OUTLIER * max(known_ms, _LEAST_MS))
        self.ms = known_ms + FAST * (counted_ms - known_ms)
        return counted_ms


class Gain(NamedTuple):
    """Measured time of steps, and the time in which plain steps would have brought their tokens, in milliseconds.

    A plain step of the same batch takes the part of the verifier's call that one row a sequence would take, and the
    host's mean time in such steps. Where measured and estimated costs differ, the smaller time counts.
    """

    spent_ms: float = 0.0
    plain_ms: float = 0.0

    def after(self, spent_ms: float, plain_ms: float) -> Gain:
        """Return the sums after one more step."""
        return Gain(self.spent_ms + spent_ms, self.plain_ms + plain_ms)


@dataclass(slots=True)
class Account:
    """Gains of speculation in batches of one size, in plain steps of such a batch. It must not be overdrawn.

    Tokens and time of whole steps are measured, and compared with measured plain steps. If the balance is used up,
    steps are plain, and each earns a small premium until speculation can be tried again. So where estimates are wrong,
    too, speculation loses little more than the premium. Nothing is counted before the first plain step, which is the
    second at the latest, since estimates may be far off. Speculation that gains is audited: now and then a step is
    plain, since the machine's load changes, less often the longer the account is at least half full. A speculative step
    has to gain a small margin, since noise would otherwise keep steps that gain nothing.

    balance: in plain steps.   speculated: speculative steps since the latest plain one.   audit: those before the next.
    plain:   mean time of plain steps over its estimate, which follows the machine's load.   plain_steps: their number.
    speculative_ms: mean time of the others.
    """

    balance: float = _FIRST_BALANCE
    speculated: int = 0
    audit: int = _FIRST_AUDIT
    plain: float = 1.0
    plain_steps: int = 0
    speculative_ms: Mean = field(default_factory=Mean)

    @property
    def closed(self) -> bool:
        """True if the next step has to be a plain one."""
        return self.balance <= 0 or self.speculated >= (self.audit if self.plain_steps else 1)

    def audited(self, ms: float, estimate_ms: float) -> None:
        """Learn the time of a plain step, and add its premium."""
        gains = self.balance >= _MOST_SAVED / 2
        self.audit = min(2 * self.audit, _LONGEST_AUDIT) if gains and self.speculated else _FIRST_AUDIT
        self.speculated, self.plain_steps = 0, min(self.plain_steps + 1, _SETTLED)
        counted = min(max(ms, _LEAST_MS) / estimate_ms, _OUTLIER * self.plain)
        self.plain += (counted - self.plain) / self.plain_steps
        self._add(_PREMIUM)

    def speculative(
        self, ms: float, tokens: float, estimate_ms: float, added_ms: float, catch_up_ms: float = 0.0
    ) -> None:
        """Add the gain of a speculative step, which brought `tokens` tokens a request.

        estimate_ms, added_ms: estimates of a plain step, and of what this one takes longer. An interrupted step counts
        as twice what such a step should take, or others have taken.   catch_up_ms: of rows put off, beside `ms`.
        """
        self.speculated += 1
        plain_ms = self.plain * estimate_ms
        usual_ms = max(self.speculative_ms.ms or 0.0, plain_ms + added_ms)
        self.speculative_ms.add(ms)
        if self.plain_steps:
            self._add(tokens - (min(ms, _OUTLIER * usual_ms) + catch_up_ms) / plain_ms - _MARGIN)

    def _add(self, plain_steps: float) -> None:
        self.balance = min(max(self.balance + plain_steps, -_MOST_OWED), _MOST_SAVED)


@dataclass(slots=True)
class MethodRecord:
    """Statistics of a method's requests with one kind of noise, with which its next such request starts.

    gain: expected tokens of trees beyond their cost of verification, by offer.
    tries: of fresh drafts whose calls other requests may wait for.
    """

    experience: Experience = field(default_factory=lambda: Experience(tokens=_CREDIT, plain_steps=1.0))
    gain: dict[OfferKey, float] = field(default_factory=dict)
    tries: Tries = field(default_factory=Tries)


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
    tries:    of fresh drafts that no other request can wait for.
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
    together: Together | None = None
    least: int = 0
    weighed: tuple[Tree, Tree, Sequence[float] | None] | None = None
    waiting: int = 0
    pause: int = 0
    tries: Tries = field(default_factory=Tries)


class MethodStatistics:
    """Experience and acceptance of methods, by the kind of noise of their requests.

    What greedy requests taught says little of sampled ones.
    """

    def __init__(self, most: int = MOST_METHODS) -> None:
        self._records: LruCache[tuple[str, NoiseKind], MethodRecord] = LruCache(most)
        self._depths: LruCache[tuple[str, OfferKind, NoiseKind], DepthCalibration] = LruCache(most)
        self._ranks: LruCache[tuple[OfferKey, NoiseKind], RankCalibration] = LruCache(most)
        self._accounts: LruCache[tuple[int, int, str], Account] = LruCache(most)

    def record(self, method: str, noise: NoiseKind) -> MethodRecord:
        """Return a method's statistics; a new method has some credit."""
        return self._records.get((method, noise), MethodRecord)

    def depths(self, key: OfferKey, noise: NoiseKind) -> DepthCalibration:
        """Return the acceptance rates of such an offer's trees by depth."""
        return self._depths.get((key.drafter, key.kind, noise), DepthCalibration)

    def ranks(self, key: OfferKey, noise: NoiseKind) -> RankCalibration:
        """Return the acceptance rates of such an offer's trees by rank."""
        return self._ranks.get((key, noise), RankCalibration)

    def account(self, batch: Batch) -> Account:
        """Return the account of batches of this size and these methods, with as many requests of this controller."""
        key = batch.sequences, len(batch.steps), batch.methods
        return self._accounts.get(key, lambda: self._opened(*key))

    def forget(self, drafter: str) -> None:
        """Forget what a drafter's trees, and the methods with it, have taught."""
        self._records.drop(lambda key: drafter in _words(key[0]))
        self._depths.drop(lambda key: key[0] == drafter)
        self._ranks.drop(lambda key: key[0].drafter == drafter)
        self._accounts.drop(lambda key: drafter in _words(key[2]))

    def _opened(self, sequences: int, own: int, methods: str) -> Account:
        """Return an account for a new size of batches, with no larger a balance than that of the nearest size.

        It has no debt: one plain step, and speculation is tried.
        """
        known = [
            (abs(number - sequences), account.balance)
            for (number, others, names), account in self._accounts.items()
            if names == methods and number - others == sequences - own
        ]
        return Account(min(max(min(known)[1], 0.0), _FIRST_BALANCE) if known else _FIRST_BALANCE)

    def state_of(self, request: Request) -> ControllerState:
        """Return the state of a request, which begins with its method's experience."""
        state: ControllerState | None = request.control
        if state is None:
            noise = request.noise.kind
            record = self.record(request.speculation.method, noise)
            known = record.experience
            state = ControllerState(Experience(known.tokens, known.plain_steps), record, noise, dict(record.gain))
            request.control = state
        return state


@dataclass(slots=True)
class HostTimes:
    """The host's own time in plain and in speculative steps. speculating: mean of requests in the latter that did."""

    plain: Mean = field(default_factory=Mean)
    speculative: Mean = field(default_factory=Mean)
    speculating: float = 0.0


class CallTimes:
    """Times of one kind of drafter call, by the number of requests that it drafts for."""

    def __init__(self) -> None:
        self._means: dict[int, Mean] = {}

    def expect(self, ms: float) -> None:
        """Use this time for one request until a call was timed."""
        if not self._means:
            self._means[1] = Mean(ms)

    def add(self, users: int, ms: float) -> float:
        """Learn from a call. Returns the part of its time that counts for each of its users.

        The first call for a number of requests counts as at most twice as long as one for each of them would take.
        """
        if users not in self._means:
            known = [mean.ms / number for number, mean in self._means.items() if mean.ms]
            self._means[users] = Mean(min(ms, _OUTLIER * users * max(known)) if known else None)
        return self._means[users].add(ms) / users

    def ms(self, users: int) -> float:
        """Return the time of a call for so many requests, between those of the nearest known numbers; 0 if unknown."""
        if not self._means:
            return 0.0
        known = sorted(self._means)
        return float(np.interp(users, known, [self._means[number].ms or 0.0 for number in known]))


class StepCosts:
    """Milliseconds of drafter calls, of offers, and of the host's own work in steps."""

    def __init__(self, most: int = MOST_METHODS) -> None:
        self._calls: LruCache[Call, CallTimes] = LruCache(most)
        self._rows: LruCache[str, Mean] = LruCache(most)
        self._offers: LruCache[str, Mean] = LruCache(most)
        self._host: LruCache[tuple[int, str], HostTimes] = LruCache(most)

    def expect(self, call: Call, ms: float) -> None:
        """Use this time of a kind of calls for one request until one was timed."""
        self._calls.get(call, CallTimes).expect(ms)

    def forget(self, drafter: str) -> None:
        """Forget the times of a drafter's calls."""
        self._calls.drop(lambda call: call[0] == drafter)
        self._rows.drop(lambda name: name == drafter)

    def call_ms(self, call: Call, users: int = 1) -> float:
        """Return the expected time of a drafter call for so many requests; 0 if it is unknown."""
        return self._calls.get(call, CallTimes).ms(users)

    def row_ms(self, drafter: str) -> float:
        """Return the time of a row that a drafter had put off; 0 if it is unknown."""
        return self._rows.get(drafter, Mean).ms or 0.0

    def plain_host_ms(self, batch: Batch) -> float:
        """Return the host's mean time in plain steps of such a batch; 0 before the first one."""
        return self._host.get((batch.sequences, batch.methods), HostTimes).plain.ms or 0.0

    def shares_ms(self, batch: Batch) -> list[float]:
        """Learn from the times of a step, and return what each of the batch's speculating requests caused.

        The requests whose trees a drafter call made share its time. All that speculated share the host's extra time
        compared with a plain step, which is at least that of the offers.
        """
        times, host = batch.times, self._host.get((batch.sequences, batch.methods), HostTimes)
        everyone = [step for step in batch.everyone if step.plan.speculates]
        if not everyone:
            host.plain.add(times.host_ms)
            return []
        count = len(everyone)
        extra_ms = self._offers.get(batch.methods, Mean).add(times.offers_ms) / count
        if host.plain.ms is not None and host.speculative.ms is not None:
            extra_ms = max((host.speculative.ms - host.plain.ms) / host.speculating, extra_ms)
        users = Counter([call for step in everyone for call in _calls_of(step)])
        made_ms = {
            call: self._calls.get(call, CallTimes).add(max(users[call], 1), ms) for call, ms in times.made_ms.items()
        }
        waited = [offer for step in everyone for offer in step.plan.make if offer.waiting]
        for drafter in {offer.key.drafter for offer in waited}:
            self._rows.get(drafter, Mean).add(times.catch_up_ms / sum([offer.waiting for offer in waited]))
        host.speculative.add(times.host_ms)
        host.speculating += (FAST if host.speculating else 1.0) * (count - host.speculating)
        speculating = [step for step in batch.steps if step.plan.speculates]
        return [extra_ms + sum([made_ms.get(call, 0.0) for call in _calls_of(step)]) for step in speculating]


def _calls_of(step: RequestStep) -> list[Call]:
    return [(offer.key.drafter, offer.key.kind) for offer in step.plan.make]


def _words(methods: str) -> list[str]:
    """Return the words in names of methods, ids of drafters among them."""
    return re.findall(r"[\w-]+", methods)
