"""How much to speculate: tree sizes from the measured cost curve and from what has been accepted lately."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from itertools import zip_longest
from math import exp
from typing import Protocol

from redraft.runtime.calibration import FAST, SLOW, DepthCalibration, RankCalibration
from redraft.runtime.cost import VerifyCosts
from redraft.runtime.sequence import Sequence
from redraft.runtime.tree import merge, prune
from redraft.types import NO_SPECULATION, Budget, Choice, Costs, FloatArray, Outcome, Source, Tree

MAX_DEPTH = 16
MAX_WIDTH = 16
LONGEST_PAUSE = 32
"""Steps at most between two tries while speculation loses."""
_LEARN = 1 / 8
_OUTLIER, _LEAST_MS = 2.0, 0.05
_TOLERANCE = 0.99
_FIRST_PROBE, _LONGEST_PROBE = 8, 256
"""Steps between two probes of a size that does not seem to pay."""
_PROBED = (8, 4, 2)
"""Sizes that are probed, root included."""
_NEAR = 0.1


class Controller(Protocol):
    """Decides for each sequence and step what may be drafted, where from, then what of it is verified."""

    def begin(self, sequences: int) -> None:
        """A step over so many sequences begins."""

    def budget(self, seq: Sequence) -> Budget:
        """What may be drafted now; nodes = 0 means: do not speculate."""

    def plan(self, seq: Sequence, found: Tree, remaining: int) -> Source:
        """Where the tree shall come from, given what the lookup found and how many steps could be resampled."""

    def cut(
        self, batch: Several[Sequence], plans: Several[Source], found: Several[Tree],
        made: Several[Tree | None],
    ) -> list[Tree]:  # fmt: skip
        """The part worth verifying of what the lookup found and what was made to plan, for each sequence.

        All together, since a call costs what its widest tree does. A sequence without a plan gets its root.
        """

    def explain(self, seq: Sequence) -> Choice | None:
        """What the tree of this step was chosen from; None where nothing was weighed."""

    def timed(self, ms: Mapping[Source, float], nodes: int) -> None:
        """How long making the trees of this step took, for the whole batch, by the sources that made any.

        nodes: of the largest tree that was verified, its root included.
        """

    def observe(self, seq: Sequence, tree: Tree, outcome: Outcome) -> None:
        """`tree` was verified with this outcome. Called after plain steps too."""

    def ended(self, speculated: bool, host_ms: float) -> None:
        """The step has ended. host_ms: what it took besides the calls of verifier and drafter."""


class FixedBudget:
    """The same budget at every step, resampling what can be; with NO_SPECULATION, plain decoding."""

    def __init__(self, budget: Budget, drafts: bool = True) -> None:
        self._budget = budget
        self._drafts = drafts

    def begin(self, sequences: int) -> None:
        """See `Controller.begin`."""

    def budget(self, seq: Sequence) -> Budget:
        """See `Controller.budget`."""
        return self._budget

    def plan(self, seq: Sequence, found: Tree, remaining: int) -> Source:
        """See `Controller.plan`."""
        if remaining:
            return Source.RESAMPLE
        return Source.FRESH if self._drafts else Source.LOOKUP

    def cut(
        self, batch: Several[Sequence], plans: Several[Source], found: Several[Tree],
        made: Several[Tree | None],
    ) -> list[Tree]:  # fmt: skip
        """See `Controller.cut`."""
        return [
            prune(looked_up if tree is None else tree, self._budget.nodes)
            for looked_up, tree in zip(found, made, strict=True)
        ]

    def explain(self, seq: Sequence) -> None:
        """See `Controller.explain`."""

    def timed(self, ms: Mapping[Source, float], nodes: int) -> None:
        """See `Controller.timed`."""

    def observe(self, seq: Sequence, tree: Tree, outcome: Outcome) -> None:
        """See `Controller.observe`."""

    def ended(self, speculated: bool, host_ms: float) -> None:
        """See `Controller.ended`."""


@dataclass(slots=True)
class Experience:
    """Running means over the steps that speculated: tokens committed by a step, and its cost in plain steps.

    In plain steps, since a machine that becomes busy or idle makes both slower or faster.
    """

    tokens: float
    plain_steps: float

    def update(self, tokens: int, plain_steps: float, weight: float) -> None:
        """Move the means by `weight` towards one step."""
        self.tokens += weight * (tokens - self.tokens)
        self.plain_steps += weight * (plain_steps - self.plain_steps)


@dataclass(slots=True)
class ControllerState:
    """What the controller keeps for one sequence.

    plan:     where this step's tree comes from; NONE where nothing was planned.
    found:    nodes of the lookup's tree that are worth verifying, and their gain, of this step.
    gain:     tokens that trees lately promised beyond what verifying them costs, by source and steps remaining.
    offered:  the tree that was made for this step and its source, for `observe`.
    rate, gains, tried, probed, together: as in `Choice`, of this step.   weighed: its found, whole and shares.
    shares:   how often each node after the root is expected to be kept, likeliest first, of this step.
    waiting:  steps still to pause.   pause: length of the latest pause.
    since_fresh, patience: steps since the last fresh draft, and how many may pass before one is tried again.
    """

    experience: Experience
    gain: dict[tuple[Source, int], float]
    found: tuple[int, float] = (0, 0.0)
    offered: tuple[Source, Tree] | None = None
    rate: float = 0.0
    gains: dict[Source, float] = field(default_factory=dict)
    tried: bool = False
    probed: bool = False
    shares: Several[float] = ()
    together: tuple[float, Several[float]] | None = None
    weighed: tuple[Tree, Tree, Several[float] | None] | None = None
    plan: Source = Source.NONE
    remaining: int = 0
    waiting: int = 0
    pause: int = 0
    since_fresh: int = 0
    patience: int = 1


class Adaptive:
    """Maximises tokens per millisecond.

    A tree of its n likeliest nodes yields 1 + (the sum of their joint probabilities) tokens in t(n + 1) ms. Those of a
    drafter's trees are corrected by depth (`DepthCalibration`), or known by rank if the trees stay on a device
    (`RankCalibration`); a lookup's are its own. The best n has the largest yield less `rate` tokens for every
    millisecond, `rate` being what the sequence achieves at present and at least plain decoding's (Dinkelbach's method
    for a ratio of sums; choosing by the ratio of one step alone would cut the best trees short). What remains is the
    tree's gain. In a batch all trees are cut to one number of nodes, whose yield is the sum of theirs and whose rate
    is the sum of their rates: a call costs what its largest tree does.

    The source of a tree is the one whose gain, less what making it costs, is largest: what the lookup found is known,
    what resampling with so many steps remaining and a fresh draft bring is known from the last ones. A fresh draft that
    has not paid is tried again after a while, and after twice as long each time.

    When speculating steps yield less per millisecond than plain ones, what the host does for them included, speculation
    pauses, at first for a step and for twice as long each time, and then tries again. A new request starts with the
    experience of all requests before it.
    """

    def __init__(self, verifying: VerifyCosts, drafts: bool = True, costs: Costs | None = None) -> None:
        """drafts: whether there is a drafter beside the lookup.   costs: of its calls, until they have been timed."""
        self._verifying = verifying
        self._table: Several[float] = verifying.table_ms(1)
        self._drafts = drafts
        costs = costs or Costs()
        self._made_ms = {Source.RESAMPLE: costs.resample_ms, Source.FRESH: costs.fresh_ms}
        self._step_ms: dict[Source, float] = {}
        self._verified_ms = 0.0
        self._full = Budget(nodes=verifying.largest - 1, depth=MAX_DEPTH, width=MAX_WIDTH)
        self._all = Experience(tokens=1.0, plain_steps=1.0)
        self._host_ms: dict[tuple[int, bool], float] = {}
        self._steps, self._probe_at, self._probe_patience = 0, _FIRST_PROBE, _FIRST_PROBE
        self._probed: dict[int, tuple[int, float]] = {}
        self._probes = 0
        self._sequences = 1
        self._gain: dict[tuple[Source, int], float] = {}
        self._records = {source: DepthCalibration() for source in (Source.RESAMPLE, Source.FRESH)}
        self._ranks: dict[tuple[Source, int], RankCalibration] = {}

    def begin(self, sequences: int) -> None:
        """See `Controller.begin`."""
        self._steps += 1
        table = self._verifying.table_ms(sequences)
        if table is not self._table:
            self._table = table
            probed = self._probed.pop(sequences, None)
            if probed is not None and not _near(table[probed[0]] / table[1], probed[1]):
                self._probe_patience = _FIRST_PROBE
                self._probe_at = self._steps
        self._sequences = sequences

    def budget(self, seq: Sequence) -> Budget:
        """See `Controller.budget`."""
        state = self._state_of(seq)
        state.plan, state.weighed, state.probed = Source.NONE, None, False
        if state.waiting == 0:
            return self._full
        state.waiting -= 1
        return NO_SPECULATION

    def plan(self, seq: Sequence, found: Tree, remaining: int) -> Source:
        """See `Controller.plan`."""
        state = self._state_of(seq)
        lately = state.experience
        rate = state.rate = max(lately.tokens / lately.plain_steps, 1.0) / self._table[1]
        state.shares = ranked_shares(found.log_probs) if len(found) > 1 else ()
        state.found = best_first(state.shares, rate, self._table)
        gains = state.gains = {Source.LOOKUP: state.found[1]}
        for source, wanted in ((Source.RESAMPLE, remaining > 0), (Source.FRESH, self._drafts)):
            if wanted:
                gain = state.gain.get((source, remaining if source is Source.RESAMPLE else 0))
                untried = max(gains.values()) + 1.0 if gain is None else gain
                gains[source] = untried - rate * self._made_ms[source]
        state.since_fresh += self._drafts
        state.tried = self._drafts and state.since_fresh > state.patience
        state.remaining, state.plan = remaining, Source.FRESH if state.tried else max(gains, key=gains.__getitem__)
        return state.plan

    def cut(
        self, batch: Several[Sequence], plans: Several[Source], found: Several[Tree],
        made: Several[Tree | None],
    ) -> list[Tree]:  # fmt: skip
        """See `Controller.cut`."""
        trees, shares = list(found), []
        states: list[ControllerState | None] = []
        rate = 0.0
        for slot, (seq, plan) in enumerate(zip(batch, plans, strict=True)):
            state = self._state_of(seq) if plan is not Source.NONE else None
            states.append(state)
            if state is not None:
                trees[slot] = self._weigh(state, plan, found[slot], made[slot])
                shares.append(state.shares)
                rate += state.rate
            else:
                rate += 1 / self._table[1]
        alone = len(batch) == 1
        each = shares[0] if alone else [sum(ranked) for ranked in zip_longest(*shares, fillvalue=0.0)]
        looked_up = alone and plans[0] is Source.LOOKUP
        paying, gain = states[0].found if looked_up and states[0] else best_first(each, rate, self._table)
        nodes, probed = paying, self._steps >= self._probe_at and len(each) > paying
        if probed:
            wider = self._probe(min(len(each) + 1, len(self._table) - 1))
            probed, nodes = wider > paying, max(paying, wider)
        for slot, state in enumerate(states):
            if state is not None:
                state.probed, state.together = probed, None if alone else (rate, each)
                if made[slot] is not None:
                    own = gain if alone else self._own_gain(state, paying)
                    self._learn_gain(state, plans[slot], own)
                trees[slot] = prune(trees[slot], nodes)
        return trees

    def _own_gain(self, state: ControllerState, nodes: int) -> float:
        """What a sequence of a batch gains if the trees of all have so many nodes, at least nothing."""
        promised = sum(state.shares[:nodes]) - state.rate * (self._table[nodes + 1] - self._table[1])
        return max(promised, 0.0)

    def _weigh(self, state: ControllerState, plan: Source, found: Tree, made: Tree | None) -> Tree:
        """All that could be verified of a sequence's trees. Sets how often each node is expected to be kept."""
        state.tried |= plan is not state.plan
        state.plan, tree = plan, found
        if made is not None and made.on_device:
            return self._weigh_on_device(state, plan, found, made)
        if made is not None and len(made) > 1:
            state.offered = (plan, made)
            tree = merge(found, self._records[plan].calibrated(made))
            state.shares = ranked_shares(tree.log_probs)
        state.weighed = found, tree, None
        return tree

    def _probe(self, largest: int) -> int:
        """How many nodes to verify although they do not seem to pay: sizes take turns, up to `largest` with the root.

        Sizes that are never verified are never timed, so a curve that says too much of them would stay. The next probe
        comes after twice as many steps, unless this one finds the curve wrong.
        """
        size = min(_PROBED[self._probes % len(_PROBED)], largest)
        self._probes += 1
        self._probe_patience = min(2 * self._probe_patience, _LONGEST_PROBE)
        self._probe_at = self._steps + self._probe_patience
        self._probed[self._sequences] = size, self._table[size] / self._table[1]
        return size - 1

    def _weigh_on_device(self, state: ControllerState, plan: Source, found: Tree, made: Tree) -> Tree:
        """The same of two trees that cannot be merged without a copy from the device: the one that gains more."""
        shares = self._ranks_of(state, plan).shares(len(made) - 1)
        _, gain = best_first(shares, state.rate, self._table)
        tree = made if gain >= state.found[1] else found
        if tree is made:
            state.shares = shares
        state.weighed = found, tree, shares if tree is made else None
        state.offered = (plan, made) if tree is made else None
        return tree

    def _ranks_of(self, state: ControllerState, plan: Source) -> RankCalibration:
        key = (plan, state.remaining if plan is Source.RESAMPLE else 0)
        found = self._ranks.get(key)
        if found is None:
            found = self._ranks[key] = RankCalibration()
        return found

    def explain(self, seq: Sequence) -> Choice | None:
        """See `Controller.explain`."""
        state = self._state_of(seq)
        if state.weighed is None:
            return None
        return Choice(state.rate, state.gains, state.tried, *state.weighed, self._table, state.probed, state.together)

    def timed(self, ms: Mapping[Source, float], nodes: int) -> None:
        """See `Controller.timed`."""
        self._step_ms = {}
        self._verified_ms = self._table[nodes]
        for source, taken_ms in ms.items():
            known_ms = self._made_ms.setdefault(source, taken_ms)
            # One that was interrupted says nothing of its cost, and, mistaken for dear, would not be tried again soon.
            counted_ms = self._step_ms[source] = min(taken_ms, _OUTLIER * max(known_ms, _LEAST_MS))
            self._made_ms[source] = known_ms + FAST * (counted_ms - known_ms)

    def observe(self, seq: Sequence, tree: Tree, outcome: Outcome) -> None:
        """See `Controller.observe`."""
        state: ControllerState = seq.control
        if state.plan is Source.NONE:
            return
        if state.offered is not None:
            source, made = state.offered
            if made.on_device:
                self._ranks_of(state, source).observe(len(tree), outcome.path)
            else:
                self._records[source].observe(made, outcome.tokens)
            state.offered = None
        lately = state.experience
        ms = self._verified_ms + self._extra_ms()
        if state.plan is not Source.LOOKUP:
            ms += self._step_ms.get(state.plan, 0.0)
        steps = ms / self._table[1]
        if not state.probed:
            lately.update(len(outcome.path) + 1, steps, FAST)
            self._all.update(len(outcome.path) + 1, steps, SLOW)
        if lately.tokens < _TOLERANCE * lately.plain_steps:
            state.pause = min(max(2 * state.pause, 1), LONGEST_PAUSE)
            state.waiting = state.pause
        else:
            state.pause = 0

    def ended(self, speculated: bool, host_ms: float) -> None:
        """See `Controller.ended`."""
        key = self._sequences, speculated
        known_ms = self._host_ms.setdefault(key, host_ms)
        self._host_ms[key] += FAST * (min(host_ms, _OUTLIER * max(known_ms, _LEAST_MS)) - known_ms)

    def _extra_ms(self) -> float:
        """What the host does for a step that speculates beyond what it does for a plain one, the lookup at least."""
        looked_up = self._step_ms.get(Source.LOOKUP, 0.0)
        plain, speculated = (self._host_ms.get((self._sequences, kind)) for kind in (False, True))
        return looked_up if plain is None or speculated is None else max(speculated - plain, looked_up)

    def _learn_gain(self, state: ControllerState, plan: Source, gain: float) -> None:
        """Note what a tree that was made was worth, and when a fresh draft that is not worth its cost is next tried."""
        key = (plan, state.remaining if plan is Source.RESAMPLE else 0)
        for known, weight in ((state.gain, _LEARN), (self._gain, FAST)):
            before = known.get(key, gain)
            known[key] = before + weight * (gain - before)
        if plan is Source.FRESH:
            pays = gain - state.rate * self._made_ms[Source.FRESH] > state.gains[Source.LOOKUP]
            state.since_fresh, state.patience = 0, 1 if pays else min(2 * state.patience, LONGEST_PAUSE)

    def _state_of(self, seq: Sequence) -> ControllerState:
        state: ControllerState | None = seq.control
        if state is None:
            state = seq.control = ControllerState(Experience(self._all.tokens, self._all.plain_steps), dict(self._gain))
        return state


def _near(ratio: float, other: float) -> bool:
    return abs(ratio / other - 1) < _NEAR


def ranked_shares(log_probs: FloatArray) -> list[float]:
    """Probabilities of the nodes after the root to be kept, likeliest first, from joint logarithms [n]."""
    return [exp(value) for value in sorted(log_probs[1:].tolist(), reverse=True)]


def best_first(shares: Several[float], rate: float, table_ms: Several[float]) -> tuple[int, float]:
    """The same of nodes that can only be verified in their order, with the probability of each to be kept."""
    best, nodes = 0.0, 0
    promised = rate * table_ms[1]  # of the root's own time nothing is asked
    for count, (share, ms) in enumerate(zip(shares, table_ms[2:], strict=False), 1):  # the shorter one ends it
        promised += share
        gain = promised - rate * ms
        if gain > best:
            best, nodes = gain, count
    return nodes, best
