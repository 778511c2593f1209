"""The cycle: draft, verify, commit. Which method drafts, and which engine runs, is not known here."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several

from redraft.runtime.controller import Controller
from redraft.runtime.drafters.base import Drafter
from redraft.runtime.ranges import STEP
from redraft.runtime.sequence import Sequence
from redraft.runtime.trace import Recorder, no_record
from redraft.runtime.tree import prune, root_only
from redraft.runtime.verifier import Verifier
from redraft.types import NO_SPECULATION, Budget, DraftTree, Outcome, Source

_STAGES = {Source.LOOKUP: "lookup", Source.RESAMPLE: "resample", Source.FRESH: "draft"}
Make = Callable[[Several[Sequence], Several[Budget]], list[DraftTree]]


class Cycle:
    """Moves a batch of sequences on. Sequence i of a batch sits in the verifier's slot i.

    `lookup` drafts without an engine, beside or in place of `drafter`.
    """

    def __init__(
        self, verifier: Verifier, drafter: Drafter, controller: Controller, lookup: Drafter | None = None
    ) -> None:
        self.verifier = verifier
        self.drafter = drafter
        self.controller = controller
        self.lookup = lookup
        self.clock = verifier.clock
        self.ranges = verifier.ranges
        self.record: Recorder = no_record
        self._methods = [method for method in (drafter, lookup) if method is not None]

    def begin(self, seq: Sequence) -> None:
        """Compute the prompt of `seq` in slot 0 and commit its first token."""
        for method in self._methods:
            method.begin(seq)
        for start, features in self.verifier.prefill(seq):
            for method in self._methods:
                method.prefilled(seq, start, features)
        seq.begin(self.verifier.first_outcome(seq), self.clock)

    def step(self, batch: Several[Sequence]) -> None:
        """One verification for all: every sequence brings a tree and gains at least one token."""
        with self.ranges.stage(STEP):
            plans, trees = self.propose(batch)
            outcomes = self.verifier.verify(batch, trees)
            self.controller.timed(self._spent(plans))
            with self.ranges.stage("commit"):
                self.commit(batch, plans, trees, outcomes)
        self.ranges.count(trees, outcomes)

    def commit(
        self, batch: Several[Sequence], plans: list[Source], trees: list[DraftTree], outcomes: list[Outcome]
    ) -> None:
        """Give every sequence its tokens, and tell drafter, lookup and controller what came of the trees."""
        for slot, (seq, tree, outcome) in enumerate(zip(batch, trees, outcomes, strict=True)):
            self.record(seq, plans[slot], tree, outcome)
            seq.commit(tree, outcome)
            features = self.verifier.features(slot, len(tree))
            for method in self._methods:
                method.accept(seq, tree, outcome, features)
            self.controller.observe(seq, tree, outcome)

    def propose(self, batch: Several[Sequence]) -> tuple[list[Source], list[DraftTree]]:
        """Where each sequence's tree comes from, and the part of it that is worth verifying, at least its root."""
        stage = self.ranges.stage
        room = min(self.verifier.capacity - max([seq.past_len for seq in batch]), self.verifier.largest_tree)
        budgets = [fit(self.controller.budget(seq), seq, room) for seq in batch]
        if not any([budget.nodes for budget in budgets]):
            return [Source.NONE] * len(batch), [root_only(seq.tokens[-1]) for seq in batch]
        with stage("lookup"):
            found = self.lookup.draft(batch, budgets) if self.lookup else [root_only(seq.tokens[-1]) for seq in batch]
            plans = [
                self.controller.plan(seq, tree, self.drafter.remaining(seq)) if budget.nodes else Source.NONE
                for seq, tree, budget in zip(batch, found, budgets, strict=True)
            ]
        if self.drafter.for_all and Source.FRESH in plans:
            plans = [Source.FRESH if plan is Source.RESAMPLE else plan for plan in plans]
        with stage("resample"):
            resampled = self._made(self.drafter.resample, Source.RESAMPLE, batch, plans, budgets)
        with stage("draft"):
            drafted = self._made(self.drafter.draft, Source.FRESH, batch, plans, budgets)
        with stage("choose"):
            trees = list(found)
            for slot, seq in enumerate(batch):
                if plans[slot] is Source.NONE:
                    continue
                made = (resampled if plans[slot] is Source.RESAMPLE else drafted).get(slot)
                tree = self.controller.choose(seq, plans[slot], found[slot], made)
                trees[slot] = prune(tree, budgets[slot].nodes)  # of two sources: each fits the rows left, not both
        return plans, trees

    def _spent(self, plans: list[Source]) -> dict[Source, float]:
        """Milliseconds by source of this step, the device's that the verifier waited for included."""
        if not any(plan is not Source.NONE for plan in plans):
            return {}
        return {source: self.ranges.stage(name).latest * 1e3 for source, name in _STAGES.items()
                if source is Source.LOOKUP or source in plans}  # fmt: skip

    def _made(
        self, make: Make, source: Source, batch: Several[Sequence], plans: list[Source], budgets: list[Budget]
    ) -> dict[int, DraftTree]:
        """Trees by slot of the sequences whose plan is `source`: one call, or none."""
        if source not in plans:
            return {}
        wanted = [budget if plan is source else NO_SPECULATION for plan, budget in zip(plans, budgets, strict=True)]
        trees = make(batch, wanted)
        return {slot: trees[slot] for slot, plan in enumerate(plans) if plan is source}

    def move(self, seq: Sequence, source: int, target: int) -> None:
        """Give `seq` the slot `target`."""
        self.verifier.move(source, target, seq.past_len)
        for method in self._methods:
            method.move(seq, source, target)


def fit(budget: Budget, seq: Sequence, room: int) -> Budget:
    """`budget` cut to the tokens that `seq` may still commit and to the rows that its slot still has."""
    depth, nodes = seq.remaining - 1, room - 1
    if depth >= budget.depth and nodes >= budget.nodes:
        return budget
    if depth < 1 or nodes < 1:
        return NO_SPECULATION
    return Budget(min(nodes, budget.nodes), min(depth, budget.depth), budget.width)
