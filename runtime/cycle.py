"""The cycle: draft, verify, commit. Which method drafts, and which engine runs, is not known here."""

from __future__ import annotations

from collections.abc import Sequence as Several

from redraft.runtime.controller import Controller
from redraft.runtime.cost import VerifyCosts
from redraft.runtime.drafters.base import Drafter
from redraft.runtime.ranges import STEP
from redraft.runtime.sequence import Sequence
from redraft.runtime.trace import Recorder, no_record
from redraft.runtime.tree import exact_part, prune, root_only
from redraft.runtime.verifier import Verifier
from redraft.types import NO_SPECULATION, Budget, Outcome, Source, Tree

_STAGES = {Source.LOOKUP: "lookup", Source.RESAMPLE: "resample", Source.FRESH: "draft"}
_MAKING = (Source.RESAMPLE, Source.FRESH)
"""Sources whose trees the drafter makes."""


class Cycle:
    """Moves a batch of sequences on. Sequence i of a batch sits in the verifier's slot i.

    `lookup` drafts without an engine, beside or in place of `drafter`. `costs` learn from every verification. With
    `chains` no tree branches.
    """

    def __init__(
        self, verifier: Verifier, drafter: Drafter, controller: Controller, lookup: Drafter | None = None,
        costs: VerifyCosts | None = None, chains: bool = False,
    ) -> None:  # fmt: skip
        self.verifier = verifier
        self.drafter = drafter
        self.controller = controller
        self.lookup = lookup
        self.costs = costs
        self._branches = verifier.branches and not chains
        self._past_end = drafter.has_engines and verifier.device.step_graphs
        self.clock = verifier.clock
        self.ranges = verifier.ranges
        self.record: Recorder = no_record
        self._methods = [method for method in (drafter, lookup) if method is not None]

    def begin(self, seq: Sequence, slot: int) -> None:
        """Compute the prompt of `seq` in a slot behind the batch's and commit its first token."""
        for method in self._methods:
            method.begin(seq)
        for start, tokens in self.verifier.prefill(seq, slot):
            for method in self._methods:
                method.prefilled(seq, slot, start, tokens)
        seq.begin(self.verifier.first_outcome(seq, slot), self.clock)

    def step(self, batch: Several[Sequence]) -> None:
        """One verification for all: every sequence brings a tree and gains at least one token."""
        with self.ranges.stage(STEP):
            plans, trees = self.propose(batch)
            outcomes = self.verifier.verify(batch, trees)
            self.controller.timed(self._spent(plans), max(map(len, trees)))
            with self.ranges.stage("commit"):
                self.commit(batch, plans, trees, outcomes)
        self._learn(len(batch), plans, trees)
        self.ranges.count(trees, outcomes)

    def _learn(self, sequences: int, plans: list[Source], trees: list[Tree]) -> None:
        """Tell what the step took: the verifier's call, and the host's work around calls."""
        stage = self.ranges.stage
        verified = stage("verify").latest
        if self.costs is not None:
            self.costs.observe(sequences, max(map(len, trees)), verified * 1e3)
        made = sum([stage(_STAGES[source]).latest for source in _MAKING if source in plans])
        speculated = any(plan is not Source.NONE for plan in plans)
        self.controller.ended(speculated, (stage(STEP).latest - verified - made) * 1e3)

    def commit(self, batch: Several[Sequence], plans: list[Source], trees: list[Tree], outcomes: list[Outcome]) -> None:
        """Give every sequence its tokens, and tell drafter, lookup and controller what came of the trees."""
        for slot, (seq, tree, outcome) in enumerate(zip(batch, trees, outcomes, strict=True)):
            self.record(seq, plans[slot], tree, outcome)
            seq.commit(tree, outcome)
            for method in self._methods:
                method.accept(seq, tree, outcome)
            self.controller.observe(seq, tree, outcome)

    def propose(self, batch: Several[Sequence]) -> tuple[list[Source], list[Tree]]:
        """Where each sequence's tree comes from, and the part of it that is worth verifying, at least its root."""
        stage = self.ranges.stage
        self.controller.begin(len(batch))
        room = min(self.verifier.max_model_len - max([seq.cache_len for seq in batch]), self.verifier.largest_tree)
        budgets = [fit(self.controller.budget(seq), seq, room, self._branches, self._past_end) for seq in batch]
        if not any([budget.nodes for budget in budgets]):
            return [Source.NONE] * len(batch), [root_only(seq.tokens[-1]) for seq in batch]
        with stage("lookup"):
            found = self.lookup.draft(batch, budgets) if self.lookup else [root_only(seq.tokens[-1]) for seq in batch]
            plans = [
                self.controller.plan(seq, tree, self.drafter.remaining(seq)) if budget.nodes else Source.NONE
                for seq, tree, budget in zip(batch, found, budgets, strict=True)
            ]
        made = {source: self._made(source, batch, plans, budgets) for source in _MAKING if source in plans}
        with stage("choose"):
            drafted: list[Tree | None] = [None] * len(batch)
            if made:
                drafted = [made[plan][slot] if plan in made else None for slot, plan in enumerate(plans)]
            trees = self.controller.cut(batch, plans, found, drafted)
            for slot, (seq, plan) in enumerate(zip(batch, plans, strict=True)):
                if plan is not Source.NONE:
                    tree = prune(trees[slot], budgets[slot].nodes)  # of two sources: each fits the rows left, not both
                    trees[slot] = exact_part(tree, seq.cache_len, self._branches, self.verifier.block_rows)
        return plans, trees

    def _spent(self, plans: list[Source]) -> dict[Source, float]:
        """Milliseconds by source of this step, the device's that the verifier waited for included."""
        sources = {*plans}
        sources.discard(Source.NONE)
        if sources:
            sources.add(Source.LOOKUP)
        return {source: self.ranges.stage(_STAGES[source]).latest * 1e3 for source in sources}

    def _made(self, source: Source, batch: Several[Sequence], plans: list[Source], budgets: list[Budget]) -> list[Tree]:
        """The drafter's trees by slot, the root alone where the plan is not `source`: one call."""
        wanted = [budget if plan is source else NO_SPECULATION for plan, budget in zip(plans, budgets, strict=True)]
        make = self.drafter.resample if source is Source.RESAMPLE else self.drafter.draft
        with self.ranges.stage(_STAGES[source]):
            return make(batch, wanted)

    def move(self, seq: Sequence, source: int, target: int) -> None:
        """Give `seq` the slot `target`."""
        self.verifier.move(source, target, seq.cache_len)
        for method in self._methods:
            method.move(seq, source, target)


def fit(budget: Budget, seq: Sequence, room: int, branches: bool = True, past_end: bool = False) -> Budget:
    """`budget` cut to the tokens that `seq` may still commit, to the rows that its slot still has, and to a chain if
    trees must not branch.

    past_end: trees may be deeper, and tokens past the last are dropped: a tree on a device is not cut for their sake.
    """
    depth, nodes, width = seq.remaining - 1, room - 1, budget.width if branches else 1
    if past_end and depth > 0:
        depth = budget.depth
    if depth >= budget.depth and nodes >= budget.nodes and width == budget.width:
        return budget
    if depth < 1 or nodes < 1:
        return NO_SPECULATION
    return Budget(min(nodes, budget.nodes), min(depth, budget.depth), min(width, budget.width))
