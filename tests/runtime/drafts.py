"""Trees for tests of controllers, their outcomes, sequences, and steps by a script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from redraft.runtime.controllers.base import Controller, FixedBudget
from redraft.runtime.controllers.cost import CostCurve
from redraft.runtime.drafters.none import NoDrafter
from redraft.runtime.requests.batch import Batch, CallLimits, RequestStep, StepTimes
from redraft.runtime.requests.request import Request
from redraft.runtime.sampling.sampler import Greedy
from redraft.runtime.trees.offers import NO_TREE, Offer, OfferKey, Plan, Speculation, StepLimits
from redraft.runtime.trees.tree import make_tree, root_only
from redraft.types import NO_SPECULATION, Budget, DraftTree, OfferKind, Outcome, Tree

FREE = CostCurve.from_points({1: 1.0, 32: 1.0})
LIMITS = StepLimits(Budget(nodes=1000, depth=1000, width=1000))
DRAFTER = "drafter"
MAKER = object()
"""Represents a drafter that makes trees; no test calls it."""
OTHER = 999
"""A token that is in no tree."""


def sequence(limit: int = 1000) -> Request:
    how = Speculation(NoDrafter(None), FixedBudget(NO_SPECULATION))
    return Request([1], 1, limit, frozenset(), Greedy(), speculation=how)


def chain(*shares: float) -> DraftTree:
    probs = [1.0]
    for share in shares:
        probs.append(probs[-1] * share)
    return make_tree(list(range(len(probs))), list(range(-1, len(probs) - 1)), probs)


def outcome(tree: DraftTree, accepted: int) -> Outcome:
    """Return an outcome that accepts the first `accepted` tokens of a chain, and then a token that it lacks."""
    path = tuple(range(1, accepted + 1))
    return Outcome(tree.tokens, path, OTHER, (*path, OTHER))


def offers(found: DraftTree | None = None, steps: int = 0, fresh: bool = True) -> list[Offer]:
    """Return the offers of a lookup and a drafter: the ready tree, resampling if steps remain, and a fresh draft."""
    kinds = [(OfferKind.RESAMPLE, steps)] * (steps > 0) + [(OfferKind.FRESH, 0)] * fresh
    ready = [Offer(OfferKey("lookup", OfferKind.LOOKUP), found)] if found is not None else []
    return [*ready, *[Offer(OfferKey(DRAFTER, kind, left), maker=MAKER) for kind, left in kinds]]


@dataclass(slots=True, eq=False)
class Offered(Batch):
    """A batch whose offers a test gives. offered: by the request's id; None if the request has no room left."""

    offered: Mapping[int, Sequence[Offer] | None] = field(default_factory=dict)

    @classmethod
    def of(cls, requests: Sequence[Request], offered: Sequence[Sequence[Offer] | None]) -> Offered:
        """Return the plain step of requests with these offers."""
        given = {id(request): each for request, each in zip(requests, offered, strict=True)}
        return cls([RequestStep.of(request) for request in requests], CallLimits(1000), offered=given)

    def ask(self, step: RequestStep, budget: Budget) -> tuple[StepLimits, Sequence[Offer]]:
        given = self.offered[id(step.request)]
        return (NO_TREE, ()) if given is None or not budget.nodes else (StepLimits(budget), given)


def planned(
    controller: Controller, seq: Request, found: DraftTree | None = None, steps: int = 0, fresh: bool = True
) -> Plan:
    """Return the controller's plan for such offers."""
    return planned_batch(controller, [seq], [offers(found, steps, fresh)]).steps[0].plan


def planned_batch(controller: Controller, requests: Sequence[Request], offered: Sequence[Any]) -> Batch:
    """Return a batch that the controller has planned with these offers."""
    batch = Offered.of(requests, offered)
    controller.plan(batch)
    return batch


def plan(kind: OfferKind, found: DraftTree | None = None, steps: int = 0) -> Plan:
    """Return a plan that uses an offer of this kind."""
    made = kind in (OfferKind.RESAMPLE, OfferKind.FRESH)
    make = (Offer(OfferKey(DRAFTER, kind, steps), maker=MAKER),) if made else ()
    return Plan(NO_TREE if kind is OfferKind.NONE else LIMITS, found or root_only(0), make)


def cut(controller: Controller, seq: Request, taken: Plan, made: Tree | None = None) -> Any:
    """Return the part that a controller verifies of a plan's trees."""
    step = RequestStep(seq, taken, [] if made is None else [(taken.make[0], made)])
    controller.cut(Batch([step], CallLimits(1000)))
    return step.tree


def drafted(controller: Controller, seq: Request, tree: DraftTree) -> tuple[Plan, DraftTree]:
    """Return the plan and the verified tree of a drafter that always makes `tree`, without a lookup's tree."""
    taken = planned(controller, seq)
    return taken, cut(controller, seq, taken, tree if taken.kind is OfferKind.FRESH else None)


def observe(
    controller: Controller, seq: Request, taken: Plan, tree: Tree, result: Outcome, times: StepTimes | None = None
) -> None:
    """Let the controller learn from a step of one request."""
    step = RequestStep(seq, taken)
    step.tree, step.outcome = tree, result
    controller.observe(Batch([step], CallLimits(1000), times=times or StepTimes()))


class Scripted(FixedBudget):
    """Drafts in each step as in its sequence's script, and nothing after its end. If it cannot resample, it drafts."""

    def __init__(self, budget: Budget, scripts: Mapping[int, Sequence[OfferKind]]) -> None:
        super().__init__(budget)
        self._scripts = scripts

    def _wanted(self, seq: Request) -> OfferKind:
        script, steps = self._scripts[id(seq)], seq.counters.steps
        return script[steps] if steps < len(script) else OfferKind.NONE

    def budget(self, request: Request) -> Budget:
        return NO_SPECULATION if self._wanted(request) is OfferKind.NONE else super().budget(request)

    def _plan(self, request: Request, offers: Sequence[Offer], limits: StepLimits) -> Plan:
        wanted = self._wanted(request)
        kinds = [OfferKind.RESAMPLE, OfferKind.FRESH] if wanted is OfferKind.RESAMPLE else [wanted]
        chosen = next(([offer] for kind in kinds for offer in offers if offer.key.kind is kind), [])
        return super()._plan(request, chosen, limits)
