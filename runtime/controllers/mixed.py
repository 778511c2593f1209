"""Requests of several controllers in one batch. Each controller plans and cuts for its own requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from redraft.runtime.controllers.base import Controller
from redraft.types import Choice

if TYPE_CHECKING:
    from redraft.runtime.requests.batch import Batch, RequestStep
    from redraft.runtime.requests.request import Request


class Controllers(Controller):
    """The controllers of a batch as one."""

    weighs = True

    def plan(self, batch: Batch) -> None:
        for controller, steps in _by_controller(batch):
            controller.plan(batch.part(steps))

    def cut(self, batch: Batch) -> None:
        """Cut with each controller. Those that compare costs come last, since they need the other trees' sizes."""
        rows, widest, uncut = batch.rows, batch.widest, len(batch.steps)
        for controller, steps in sorted(_by_controller(batch), key=lambda item: item[0].weighs):
            uncut -= len(steps)
            part = batch.part(steps)
            part.rows, part.widest = rows + uncut, widest
            controller.cut(part)
            sizes = [len(step.tree) for step in steps]
            rows, widest = rows + sum(sizes), max(widest, *sizes)

    def observe(self, batch: Batch) -> None:
        for controller, steps in _by_controller(batch):
            controller.observe(batch.part(steps))

    def explain(self, request: Request) -> Choice | None:
        return request.speculation.controller.explain(request)


_MIXED = Controllers()


def controller_of(batch: Batch) -> Controller:
    """Return the controller of all requests, or one that asks each request's own."""
    first = batch.steps[0].request.speculation.controller
    if len(batch.steps) == 1 or all([step.request.speculation.controller is first for step in batch.steps]):
        return first
    return _MIXED


def _by_controller(batch: Batch) -> list[tuple[Controller, list[RequestStep]]]:
    found: dict[Controller, list[RequestStep]] = {}
    for step in batch.steps:
        found.setdefault(step.request.speculation.controller, []).append(step)
    return list(found.items())
