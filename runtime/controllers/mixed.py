"""Requests of several controllers in one batch. Each controller plans and cuts for its own requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from redraft.runtime.controllers.base import Call, Controller
from redraft.runtime.trees.offers import Offer, Plan, StepLimits
from redraft.types import Budget, Choice, Outcome, Tree

if TYPE_CHECKING:
    from redraft.runtime.requests.request import Request


class Controllers(Controller):
    """The controllers of a batch as one, for one step."""

    weighs = True

    def __init__(self, batch: Sequence[Request]) -> None:
        self._slots: dict[Controller, list[int]] = {}
        for slot, seq in enumerate(batch):
            self._slots.setdefault(seq.speculation.controller, []).append(slot)

    def begin(self, sequences: int, methods: str) -> None:
        for controller in self._slots:
            controller.begin(sequences, methods)

    def budget(self, seq: Request) -> Budget:
        return seq.speculation.controller.budget(seq)

    def plan(
        self, batch: Sequence[Request], offers: Sequence[Sequence[Offer]], limits: Sequence[StepLimits]
    ) -> list[Plan]:
        plans: dict[int, Plan] = {}
        for controller, slots in self._slots.items():
            own = controller.plan(*[[values[slot] for slot in slots] for values in (batch, offers, limits)])  # type: ignore[arg-type]
            plans.update(zip(slots, own, strict=True))
        return [plans[slot] for slot in range(len(batch))]

    def cut(
        self, batch: Sequence[Request], plans: Sequence[Plan], made: Sequence[Tree | None], widest: int = 1
    ) -> list[Tree]:
        """Cut with each controller. Those that compare costs come last, since they need the other trees' sizes."""
        trees: dict[int, Tree] = {}
        for controller, slots in sorted(self._slots.items(), key=lambda item: item[0].weighs):
            own_batch, own_plans, own_made = ([values[slot] for slot in slots] for values in (batch, plans, made))
            own = controller.cut(own_batch, own_plans, own_made, widest)  # type: ignore[arg-type]
            widest = max(widest, *map(len, own))
            trees.update(zip(slots, own, strict=True))
        return [trees[slot] for slot in range(len(batch))]

    def explain(self, seq: Request) -> Choice | None:
        return seq.speculation.controller.explain(seq)

    def timed(self, offers_ms: float, made_ms: Mapping[Call, float], nodes: int) -> None:
        for controller in self._slots:
            controller.timed(offers_ms, made_ms, nodes)

    def observe(self, seq: Request, plan: Plan, tree: Tree, outcome: Outcome) -> None:
        seq.speculation.controller.observe(seq, plan, tree, outcome)

    def ended(self, speculated: bool, host_ms: float) -> None:
        for controller in self._slots:
            controller.ended(speculated, host_ms)
