"""The batch of one step: each request with its plan, its tree and its outcome, and the prompt rows to compute."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from redraft.runtime.requests.request import Request, drafting
from redraft.runtime.trees.offers import NO_TREE, Offer, Plan, StepLimits
from redraft.runtime.trees.tree import root_only
from redraft.types import NO_SPECULATION, Budget, OfferKind, Outcome, Tree

Call = tuple[str, OfferKind]
"""A kind of drafter call: the drafter's id, and the kind of tree that it makes."""


class Chunk(NamedTuple):
    """Tokens of a request whose rows a step computes, from position `start` on. Nobody reads their logits."""

    request: Request
    start: int
    tokens: int


MOST_CATCH_UP = 256
"""Rows that drafters may catch up in one step, or those of one request."""


@dataclass(slots=True)
class StepTimes:
    """Milliseconds of a step's parts, for the whole batch. Work on a device counts if the verifier waited for it.

    made_ms: of each kind of drafter call.   catch_up_ms: of rows that drafters had put off, most of them of prompts.
    host_ms: time outside the calls of verifier and drafters.   chunks_ms: of chunks in the verifier's call, estimated.
    """

    offers_ms: float = 0.0
    made_ms: Mapping[Call, float] = field(default_factory=dict)
    verified_ms: float = 0.0
    host_ms: float = 0.0
    catch_up_ms: float = 0.0
    chunks_ms: float = 0.0


class CallLimits(NamedTuple):
    """Limits of the trees of one verification.

    rows:      most nodes of a tree, root included: the room of the fullest slot, and the largest call.
    branches:  False if the verifier takes chains only.   block_rows: as in `StepLimits`.
    vocabulary: number of token ids.
    past_end:  trees of drafters with engines may reach past a request's last token, since cutting them on a device
               costs more than dropping tokens.
    """

    rows: int
    branches: bool = True
    block_rows: int | None = None
    past_end: bool = False
    vocabulary: int = sys.maxsize


@dataclass(slots=True, eq=False)
class RequestStep:
    """A request's part of a step.

    plan:    the offers to use; the root alone until a controller plans.
    made:    the trees that drafters made for it in this step, with their offers.
    tree:    the tree to verify.   outcome: of its verification; None before it, and if the call failed.
    tokens:  the committed tokens.
    """

    request: Request
    plan: Plan
    made: list[tuple[Offer, Tree]] = field(default_factory=list)
    tree: Tree = field(init=False)
    outcome: Outcome | None = None
    tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.tree = self.plan.found

    @classmethod
    def of(cls, request: Request) -> RequestStep:
        """Return the plain step of a request."""
        return cls(request, Plan(NO_TREE, root_only(request.tokens[-1])))

    def use(self, plan: Plan) -> None:
        """Set the plan, and its ready tree as the tree to verify."""
        self.plan, self.tree = plan, plan.found


@dataclass(slots=True, eq=False)
class Batch:
    """One step of several requests. Request i has slot i of the verifier.

    steps:     of the requests that this batch's reader serves.
    chunks:    rows of prompts to compute with the verification or after it.
    verified_chunks: those that the verification has computed.
    sequences: requests in the verifier's call. A controller's part of a batch has fewer steps.
    methods:   names of all their methods.
    rows:      rows of the call that other controllers' trees take, roots included.
    widest:    nodes of their largest tree.
    everyone:  steps of all requests in the call, those of other controllers included.
    waiting:   rows that drafters may still catch up in this step.
    """

    steps: list[RequestStep]
    limits: CallLimits
    chunks: Sequence[Chunk] = ()
    verified_chunks: Sequence[Chunk] = ()
    sequences: int = 0
    methods: str = ""
    rows: int = 0
    widest: int = 1
    times: StepTimes = field(default_factory=StepTimes)
    everyone: list[RequestStep] = field(default_factory=list)
    waiting: int = MOST_CATCH_UP

    def __post_init__(self) -> None:
        self.everyone = self.everyone or self.steps
        self.sequences = self.sequences or len(self.steps)
        self.methods = self.methods or methods_of(self.requests)

    @property
    def requests(self) -> list[Request]:
        """The requests, by slot."""
        return [step.request for step in self.steps]

    @property
    def speculates(self) -> bool:
        """True if any request asked for offers."""
        return any([step.plan.speculates for step in self.steps])

    @property
    def nodes(self) -> int:
        """Nodes of the largest tree to verify, its root included."""
        return max([len(step.tree) for step in self.steps])

    def part(self, steps: list[RequestStep]) -> Batch:
        """Return the batch of some of the steps, for the controller that serves them."""
        return replace(self, steps=steps, chunks=())

    def ask(self, step: RequestStep, budget: Budget) -> tuple[StepLimits, Sequence[Offer]]:
        """Return the limits of a request's tree within `budget`, and what its drafter offers within them.

        The limits are NO_TREE, without offers, if no node fits or the drafter fails.
        """
        request, limits = step.request, self.limits
        speculation = request.speculation
        past_end = limits.past_end and speculation.drafter.has_engines
        most = speculation.most
        fitting = fit(budget, request, limits.rows, most, past_end)
        if not fitting.nodes:
            return NO_TREE, ()
        branches = limits.branches and (most is None or most.width > 1)
        found = StepLimits(fitting, request.num_computed_tokens, branches, limits.block_rows)
        with drafting(request):
            offers = self._checked(request, speculation.drafter.offers(request, fitting))
            return found, [offer for offer in offers if self._may_wait(offer)]
        return NO_TREE, ()

    def _may_wait(self, offer: Offer) -> bool:
        """True unless an offer has more waiting rows than this step may still compute, and others have some too.

        All requests wait for these rows. Those that are left out have their turn in a later step.
        """
        if 0 < offer.waiting > self.waiting < MOST_CATCH_UP:
            return False
        self.waiting -= offer.waiting
        return True

    def _checked(self, request: Request, offers: Sequence[Offer]) -> Sequence[Offer]:
        for offer in offers:
            if offer.tree is not None:
                self.check(request, offer.tree)
        return offers

    def check(self, request: Request, tree: Tree) -> None:
        """Raise ValueError for a tree on the host that is no tree, or not one that continues the request.

        Trees on a device are not read.
        """
        if tree.on_device:
            return
        tokens, parents = tree.tokens, tree.parents
        if not 0 < len(tokens) == len(parents) == len(tree.log_probs):
            raise ValueError(f"a tree has {len(tokens)} tokens and {len(parents)} parents")
        if tokens[0] != request.tokens[-1] or parents[0] != -1:
            raise ValueError("a tree does not begin with the last token")
        if (parents[1:] < 0).any() or (parents[1:] > np.arange(len(parents) - 1)).any():
            raise ValueError("a tree has a node before its parent")
        if tokens.min() < 0 or tokens.max() >= self.limits.vocabulary:
            raise ValueError("a tree has a token that the model does not know")


def methods_of(requests: Sequence[Request]) -> str:
    """Return the names of the requests' methods."""
    if not requests:
        return ""
    first = requests[0].speculation.method
    if len(requests) == 1 or all([request.speculation.method == first for request in requests]):
        return first
    return " ".join(sorted({request.speculation.method for request in requests}))


def fit(budget: Budget, request: Request, rows: int, most: Budget | None = None, past_end: bool = False) -> Budget:
    """Cut `budget` to `most`, to the tokens that `request` may still commit, and to the rows that its slot still has.

    past_end: trees may reach past the last token (`CallLimits`).
    """
    depth, nodes, width = request.remaining - 1, rows - 1, budget.width
    if past_end and depth > 0:
        depth = budget.depth
    if most is not None:
        depth, nodes, width = min(depth, most.depth), min(nodes, most.nodes), min(width, most.width)
    if depth < 1 or nodes < 1 or width < 1 or budget.depth < 1:
        return NO_SPECULATION
    if depth >= budget.depth and nodes >= budget.nodes and width == budget.width:
        return budget
    return replace(budget, nodes=min(nodes, budget.nodes), depth=min(depth, budget.depth), width=width)
