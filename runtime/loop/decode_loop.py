"""The decoding cycle: offer, plan, draft, cut, verify, commit. It depends on no method and no engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from redraft.runtime.controllers.base import Call, Controller
from redraft.runtime.controllers.cost import VerifyCosts
from redraft.runtime.controllers.mixed import Controllers
from redraft.runtime.drafters.base import TreeMaker
from redraft.runtime.observe.profiling import STEP
from redraft.runtime.observe.trace import Recorder, no_record
from redraft.runtime.requests.request import Request
from redraft.runtime.steps.verifier import Verifier
from redraft.runtime.trees.offers import NO_TREE, Offer, Plan, Speculation, StepLimits
from redraft.runtime.trees.tree import root_only
from redraft.types import NO_SPECULATION, Budget, OfferKind, Outcome, Tree

STAGES = {OfferKind.RESAMPLE: "resample", OfferKind.FRESH: "draft"}
"""Names of the parts of a step in which drafters make trees."""


MakerCall = tuple[TreeMaker, OfferKind]
"""A drafter, and the kind of trees that one call of it makes."""


class StepTimes(NamedTuple):
    """Milliseconds of a step's parts. Work on a device counts if the verifier waited for it.

    speculated: True if any sequence did.   nodes: of the largest verified tree, its root included.
    """

    speculated: bool
    nodes: int
    offers_ms: float
    made_ms: Mapping[Call, float]
    verified_ms: float


class Cycle:
    """Decodes a batch of sequences step by step. Request i of a batch has slot i of the verifier.

    default: for sequences without a speculation of their own.   costs: learns from every verification.
    """

    def __init__(
        self, verifier: Verifier, default: Speculation | None = None, costs: VerifyCosts | None = None
    ) -> None:
        self.verifier = verifier
        self.costs = costs
        self.clock = verifier.clock
        self.ranges = verifier.ranges
        self.record: Recorder = no_record
        self._default = default

    def begin(self, seq: Request, slot: int) -> None:
        """Compute the prompt of `seq` in the slot after the batch's, and commit its first token."""
        if seq.speculation is None:
            assert self._default is not None, "neither the sequence nor the cycle has a speculation"
            seq.speculation = self._default
        drafter = seq.speculation.drafter
        drafter.begin(seq)
        for start, tokens in self.verifier.prefill(seq, slot):
            drafter.prefilled(seq, slot, start, tokens)
        seq.begin(self.verifier.first_outcome(seq, slot), self.clock)

    def step(self, batch: Sequence[Request]) -> None:
        """Verify one tree of every sequence in one call. Each sequence gains at least one token."""
        stage, controller = self.ranges.stage, controller_of(batch)
        with stage(STEP):
            with stage("offers"):
                plans = self.plan(controller, batch)
            trees, made, calls = self.draft(controller, batch, plans)
            outcomes = self.verifier.verify(batch, trees, made)
            with stage("commit"):
                times = self._times(plans, trees, calls)
                self.commit(controller, batch, plans, trees, outcomes, times)
        self.learn(controller, len(batch), times)
        self.ranges.count(trees, outcomes)

    def plan(self, controller: Controller, batch: Sequence[Request]) -> list[Plan]:
        """Return the offers to use, for each sequence."""
        controller.begin(len(batch), methods_of(batch))
        limits = self._limits(controller, batch)
        if all([limit is NO_TREE for limit in limits]):
            return [Plan(NO_TREE, root_only(seq.tokens[-1])) for seq in batch]
        offers: list[Sequence[Offer]] = [
            () if limit is NO_TREE else seq.speculation.drafter.offers(seq, limit.budget)
            for seq, limit in zip(batch, limits, strict=True)
        ]
        return controller.plan(batch, offers, limits)

    def _limits(self, controller: Controller, batch: Sequence[Request]) -> list[StepLimits]:
        verifier = self.verifier
        rows = min(verifier.max_model_len - max([seq.cache_len for seq in batch]), verifier.largest_tree)
        block_rows = verifier.block_rows
        on_device = verifier.device.step_graphs
        found = []
        for seq in batch:
            past_end = on_device and seq.speculation.drafter.has_engines
            most = seq.speculation.most
            budget = fit(controller.budget(seq), seq, rows, most, past_end)
            branches = verifier.branches and (most is None or most.width > 1)
            found.append(StepLimits(budget, seq.cache_len, branches, block_rows) if budget.nodes else NO_TREE)
        return found

    def draft(
        self, controller: Controller, batch: Sequence[Request], plans: Sequence[Plan]
    ) -> tuple[list[Tree], list[Tree | None], list[MakerCall]]:
        """Return the trees to verify, the new trees by slot, and the drafter calls that made them."""
        if not any([plan.speculates for plan in plans]):
            return [plan.found for plan in plans], [], []
        calls = calls_of(plans)
        made = self._made(batch, plans, calls)
        with self.ranges.stage("choose"):
            return controller.cut(batch, plans, made), made, calls

    def _made(self, batch: Sequence[Request], plans: Sequence[Plan], calls: Sequence[MakerCall]) -> list[Tree | None]:
        """Make the planned trees, by slot."""
        made: list[Tree | None] = [None] * len(batch)
        for maker, kind in calls:
            budgets = [
                plan.limits.budget if plan.kind is kind and plan.make and plan.make.maker is maker else NO_SPECULATION
                for plan in plans
            ]
            with self.ranges.stage(f"{STAGES[kind]} {maker.name}"):
                trees = (maker.resample if kind is OfferKind.RESAMPLE else maker.draft)(batch, budgets)
            for slot, budget in enumerate(budgets):
                if budget.nodes:
                    made[slot] = trees[slot]
        return made

    def commit(
        self, controller: Controller, batch: Sequence[Request], plans: Sequence[Plan], trees: Sequence[Tree],
        outcomes: Sequence[Outcome], times: StepTimes,
    ) -> None:  # fmt: skip
        """Give every sequence its tokens, and report each tree's outcome to its drafter and its controller."""
        if times.speculated:
            controller.timed(times.offers_ms, times.made_ms, times.nodes)
        for seq, plan, tree, outcome in zip(batch, plans, trees, outcomes, strict=True):
            if outcome.error is not None:  # the request ends, and has no whole step to learn from
                seq.commit(tree, outcome)
                continue
            self.record(seq, plan, tree, outcome)
            seq.commit(tree, outcome)
            seq.speculation.drafter.accept(seq, tree, outcome)
            controller.observe(seq, plan, tree, outcome)

    def _times(self, plans: Sequence[Plan], trees: Sequence[Tree], calls: Sequence[MakerCall]) -> StepTimes:
        stage = self.ranges.stage
        made_ms = {(m.name, kind): stage(f"{STAGES[kind]} {m.name}").latest * 1e3 for m, kind in calls}
        return StepTimes(
            any([plan.speculates for plan in plans]), max(map(len, trees)), stage("offers").latest * 1e3, made_ms,
            stage("verify").latest * 1e3,
        )  # fmt: skip

    def learn(self, controller: Controller, sequences: int, times: StepTimes) -> None:
        """Update costs from the verifier's call, and the controller from the host's own time."""
        if self.costs is not None:
            self.costs.observe(sequences, times.nodes, times.verified_ms)
        host_ms = self.ranges.stage(STEP).latest * 1e3 - times.verified_ms - sum(times.made_ms.values())
        controller.ended(times.speculated, host_ms)

    def move(self, seq: Request, source: int, target: int) -> None:
        """Move `seq` from slot `source` to slot `target`."""
        self.verifier.move(source, target, seq.cache_len)
        seq.speculation.drafter.move(seq, source, target)


def calls_of(plans: Iterable[Plan]) -> list[MakerCall]:
    """Return the drafter calls that plans need, one a drafter and kind.

    Resampling comes first: a fresh draft may overwrite its inputs.
    """
    calls = {(plan.make.maker, plan.kind): None for plan in plans if plan.make is not None and plan.make.maker}
    return sorted(calls, key=lambda call: call[1] is OfferKind.FRESH) if len(calls) > 1 else list(calls)


def controller_of(batch: Sequence[Request]) -> Controller:
    """Return the controller of all sequences, or one that asks each sequence's own."""
    first = batch[0].speculation.controller
    if len(batch) == 1 or all([seq.speculation.controller is first for seq in batch]):
        return first
    return Controllers(batch)


def methods_of(batch: Sequence[Request]) -> str:
    """Return the names of a batch's methods."""
    first = batch[0].speculation.method
    if len(batch) == 1 or all([seq.speculation.method == first for seq in batch]):
        return first
    return " ".join(sorted({seq.speculation.method for seq in batch}))


def fit(budget: Budget, seq: Request, rows: int, most: Budget | None = None, past_end: bool = False) -> Budget:
    """Cut `budget` to `most`, to the tokens that `seq` may still commit, and to the rows that its slot still has.

    past_end: trees may reach past the last token, since cutting them on a device costs more than dropping tokens.
    """
    depth, nodes, width = seq.remaining - 1, rows - 1, budget.width
    if past_end and depth > 0:
        depth = budget.depth
    if most is not None:
        depth, nodes, width = min(depth, most.depth), min(nodes, most.nodes), min(width, most.width)
    if depth < 1 or nodes < 1 or width < 1 or budget.depth < 1:
        return NO_SPECULATION
    if depth >= budget.depth and nodes >= budget.nodes and width == budget.width:
        return budget
    return replace(budget, nodes=min(nodes, budget.nodes), depth=min(depth, budget.depth), width=width)
