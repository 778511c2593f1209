"""How much to speculate: tree sizes from the measured cost curve and from what has been accepted lately."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import Protocol

from redraft.runtime.cost import CostCurve
from redraft.runtime.metrics import Clock
from redraft.runtime.sequence import Sequence
from redraft.runtime.tree import prune
from redraft.types import NO_SPECULATION, Budget, DraftTree, Outcome

MAX_DEPTH = 16
MAX_WIDTH = 3
LONGEST_PAUSE = 32
"""Steps at most between two tries while speculation loses."""
_FAST, _SLOW = 1 / 32, 1 / 128
_TOLERANCE = 0.99


class Controller(Protocol):
    """Decides for each sequence and step what may be drafted, then what of it is verified."""

    def budget(self, seq: Sequence) -> Budget:
        """What may be drafted now; nodes = 0 means: do not speculate."""

    def choose(self, seq: Sequence, tree: DraftTree) -> DraftTree:
        """The part of a drafted tree that is worth verifying, at least its root."""

    def observe(self, seq: Sequence, tree: DraftTree, outcome: Outcome) -> None:
        """`tree` was verified with this outcome. Called after plain steps too."""


class FixedBudget:
    """The same budget at every step; with NO_SPECULATION, plain decoding."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def budget(self, seq: Sequence) -> Budget:
        """See `Controller.budget`."""
        return self._budget

    def choose(self, seq: Sequence, tree: DraftTree) -> DraftTree:
        """See `Controller.choose`."""
        return prune(tree, self._budget.nodes)

    def observe(self, seq: Sequence, tree: DraftTree, outcome: Outcome) -> None:
        """See `Controller.observe`."""


@dataclass(slots=True)
class Experience:
    """Running means over the steps that drafted.

    tokens, ms:      committed by a step, and what it cost.
    promised, accepted: drafted tokens that the trees' own probabilities promised, and those kept.
    """

    tokens: float
    ms: float
    promised: float = 1.0
    accepted: float = 1.0

    def update(self, tokens: int, ms: float, weight: float) -> None:
        """Move the means by `weight` towards one step."""
        self.tokens += weight * (tokens - self.tokens)
        self.ms += weight * (ms - self.ms)

    def judge(self, promised: float, accepted: int, weight: float) -> None:
        """Move the means by `weight` towards one step that speculated."""
        self.promised += weight * (promised - self.promised)
        self.accepted += weight * (accepted - self.accepted)


@dataclass(slots=True)
class Pace:
    """What the controller keeps for one sequence.

    waiting: steps still to pause.   pause: length of the latest pause.
    drafted: this step drafts.   promised: accepted tokens that the probabilities of its tree add up to.
    """

    experience: Experience
    waiting: int = 0
    pause: int = 0
    drafted: bool = False
    promised: float = 0.0


class Adaptive:
    """Maximises tokens per millisecond.

    A tree of its n likeliest nodes yields 1 + (their joint probabilities, scaled by how such promises were kept
    lately) tokens in t(n + 1) ms. The best n has the largest yield less `rate` tokens for every millisecond, `rate`
    being what the sequence achieves at present and at least plain decoding's (Dinkelbach's method for a ratio of
    sums; choosing by the ratio of one step alone would cut the best trees short).

    When drafting steps yield less per millisecond than plain ones, drafting pauses, at first for a step and for twice
    as long each time, and then tries again. A new request starts with the experience of all requests before it.
    """

    def __init__(self, curve: CostCurve, clock: Clock) -> None:
        self._table = curve.table_ms
        self._clock = clock
        self._full = Budget(nodes=curve.largest - 1, depth=MAX_DEPTH, width=MAX_WIDTH)
        self._plain_rate = 1 / self._table[1]
        self._all = Experience(tokens=1.0, ms=self._table[1])

    def budget(self, seq: Sequence) -> Budget:
        """See `Controller.budget`."""
        pace = self._pace(seq)
        pace.drafted = pace.waiting == 0
        if pace.drafted:
            return self._full
        pace.waiting -= 1
        return NO_SPECULATION

    def choose(self, seq: Sequence, tree: DraftTree) -> DraftTree:
        """See `Controller.choose`."""
        pace = self._pace(seq)
        pace.promised = 0.0
        if len(tree) == 1:
            return tree
        lately = pace.experience
        trust = lately.accepted / lately.promised
        rate = max(lately.tokens / lately.ms, self._plain_rate)
        best, nodes, promised = -rate * self._table[1], 0, 0.0
        for count, log_prob in enumerate(sorted(tree.log_probs.tolist()[1:], reverse=True), 1):
            promised += exp(log_prob)
            gain = trust * promised - rate * self._table[count + 1]
            if gain > best:
                best, nodes, pace.promised = gain, count, promised
        return prune(tree, nodes)

    def observe(self, seq: Sequence, tree: DraftTree, outcome: Outcome) -> None:
        """See `Controller.observe`."""
        pace: Pace = seq.control
        if not pace.drafted:
            return
        lately = pace.experience
        nodes = len(tree.tokens)
        accepted = len(outcome.path)
        ms = self._table[nodes] + self._clock.proposal * 1e3
        lately.update(accepted + 1, ms, _FAST)
        self._all.update(accepted + 1, ms, _SLOW)
        if nodes > 1:
            lately.judge(pace.promised, accepted, _FAST)
            self._all.judge(pace.promised, accepted, _SLOW)
        if lately.tokens < _TOLERANCE * self._plain_rate * lately.ms:
            pace.pause = min(max(2 * pace.pause, 1), LONGEST_PAUSE)
            pace.waiting = pace.pause
        else:
            pace.pause = 0

    def _pace(self, seq: Sequence) -> Pace:
        pace: Pace | None = seq.control
        if pace is None:
            known = self._all
            pace = seq.control = Pace(Experience(known.tokens, known.ms, known.promised, known.accepted))
        return pace
