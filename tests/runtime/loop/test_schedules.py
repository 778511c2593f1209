"""Random schedules against an oracle that decodes each request alone and plainly.

Requests join, leave and are aborted at any step, with any method, priority and neighbours, over few slots. Drafters,
samplers and the engine fail at any time. Every text and every log probability must be the oracle's, whatever happens to
the others, and at the end nothing is left.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from redraft.runtime import SamplingParams
from redraft.runtime.controllers.adaptive import Adaptive
from redraft.runtime.controllers.base import FixedBudget
from redraft.runtime.controllers.cost import VerifyCosts
from redraft.runtime.drafters.base import Pair, TreeMaker
from redraft.runtime.drafters.ngram import NgramDrafter
from redraft.runtime.drafters.none import NoDrafter
from redraft.runtime.loop.decode_loop import MOST_FAILURES, DecodeLoop
from redraft.runtime.loop.scheduler import RequestOutput
from redraft.runtime.requests.request import Request
from redraft.runtime.sampling import make_sampler
from redraft.runtime.sampling.noise import draft_noise
from redraft.runtime.steps.verifier import Verifier
from redraft.runtime.trees.offers import Speculation
from redraft.types import NO_SPECULATION, Budget, DraftTree, Tree
from tests.runtime.fakes import CURVE, EOS, FakeEngine, fake_verifier, mixing_rule

CONTEXT, BUDGET = 96, Budget(nodes=7, depth=4, width=3)
LETTERS = list(range(97, 102))


class UnreliableEngine(FakeEngine):
    """A fake whose next calls fail, after they have written some rows."""

    failing = 0

    def fail(self) -> None:
        if self.failing:
            self.failing -= 1
            raise RuntimeError("the engine failed")


class Guesses(TreeMaker):
    """Random trees that often contain the next tokens, or garbage, or an exception. Often two trees may be joined."""

    def __init__(self, verifier: Verifier, name: str, faults: bool) -> None:
        super().__init__(verifier)
        self.name = name
        self._faults = faults
        self.rng = random.Random(0)

    def draft(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Tree]:
        if self._faults and self.rng.random() < 0.2:
            raise RuntimeError("the drafter failed")
        return [self._tree(request, budget) for request, budget in zip(batch, budgets, strict=True)]

    def remaining(self, seq: Request) -> int:
        return self.rng.randrange(3)

    def joins(self, seq: Request) -> bool:
        return self.rng.random() < 0.7

    def accept(self, seq: Request, tree: Tree, outcome: object) -> None:
        if self._faults and self.rng.random() < 0.1:
            raise RuntimeError("the drafter failed after a step")

    def _tree(self, request: Request, budget: Budget) -> Tree:
        nodes = min(self.rng.randrange(6), budget.nodes)
        parents = [-1, *[self.rng.randrange(node) for node in range(1, nodes + 1)]]
        tokens = [request.tokens[-1], *[self.rng.choice(LETTERS) for _ in range(nodes)]]
        if self._faults and nodes and self.rng.random() < 0.2:
            self.rng.choice([lambda: tokens.__setitem__(0, 5), lambda: tokens.__setitem__(-1, 10**6),
                             lambda: parents.__setitem__(-1, nodes), lambda: parents.__setitem__(0, 0)])()  # fmt: skip
        return DraftTree(np.array(tokens), np.array(parents), -np.arange(nodes + 1, dtype=np.float32))


@dataclass(eq=False)
class Submitted:
    """A request, its parameters, and the tokens of its outputs."""

    request: Request
    prompt: list[int]
    params: SamplingParams
    tokens: list[int]
    aborted: bool = False
    fails_at: int | None = None


class FailingSampler:
    """Raises instead of choosing the token of a position."""

    def __init__(self, sampler: object, position: int) -> None:
        self._sampler, self._position = sampler, position

    def __getattr__(self, name: str) -> object:
        return getattr(self._sampler, name)

    def verify(self, logits: np.ndarray, tree: Tree, tokens: Sequence[int]) -> object:
        if len(tokens) >= self._position:
            raise RuntimeError("the processor failed")
        return self._sampler.verify(logits, tree, tokens)


def request_of(prompt: list[int], params: SamplingParams) -> Request:
    limit = min(len(prompt) + params.max_tokens, CONTEXT)
    sampler, noise = make_sampler(params, frozenset([EOS])), draft_noise(params)
    return Request(list(prompt), len(prompt), limit, frozenset([EOS]), sampler, noise=noise)


def plainly(verifier: Verifier) -> Speculation:
    return Speculation(NoDrafter(verifier), FixedBudget(NO_SPECULATION))


def alone(prompt: list[int], params: SamplingParams) -> Request:
    """Return the request after decoding it alone and plainly."""
    verifier = fake_verifier(FakeEngine(mixing_rule, single=True), CONTEXT)
    request = request_of(prompt, params)
    DecodeLoop(verifier, plainly(verifier)).run([request])
    return request


class Schedules(RuleBasedStateMachine):
    """Drives a decode loop over a fake verifier."""

    @initialize(
        most=st.integers(1, 4), spare=st.integers(0, 3), limit=st.one_of(st.none(), st.integers(CONTEXT, 300)),
        sparse=st.booleans(),
    )  # fmt: skip
    def begin(self, most: int, spare: int, limit: int | None, sparse: bool) -> None:
        self.engine = UnreliableEngine(mixing_rule, single=most == 1 and not sparse, sparse=sparse)
        self.verifier = fake_verifier(self.engine, CONTEXT, most, slots=most + spare)
        self.loop = DecodeLoop(self.verifier, plainly(self.verifier), max_total_tokens=limit)
        self.limit = limit
        lookup = NgramDrafter(self.verifier)
        adaptive = Adaptive(VerifyCosts({1: CURVE}))
        drafters = [lookup, Guesses(self.verifier, "guesses", False), Guesses(self.verifier, "faults", True)]
        drafters.append(Pair(lookup, drafters[1]))
        self.ways = [
            self.loop.plain,
            *[Speculation(one, how, one.name) for one in drafters for how in (FixedBudget(BUDGET), adaptive)],
        ]
        self.submitted: list[Submitted] = []
        self.broken = 0

    @rule(
        prompt=st.lists(st.sampled_from(LETTERS), min_size=1, max_size=70), repeats=st.integers(0, 3),
        tokens=st.integers(1, 20), way=st.integers(0, 8), priority=st.integers(0, 2), seed=st.integers(0, 3),
        warm=st.booleans(), fails=st.one_of(st.none(), st.none(), st.integers(0, 10)), salt=st.sampled_from(["", "x"]),
    )  # fmt: skip
    def add(
        self, prompt: list[int], repeats: int, tokens: int, way: int, priority: int, seed: int, warm: bool,
        fails: int | None, salt: str,
    ) -> None:  # fmt: skip
        """Add a request, which often begins as an earlier one does."""
        if repeats and self.submitted:
            earlier = self.submitted[-1 - (repeats - 1) % len(self.submitted)].request.tokens
            prompt = (earlier[: 20 * repeats] + prompt)[: CONTEXT - 2]
        params = SamplingParams(max_tokens=tokens, temperature=0.7 if warm else 0.0, seed=seed, logprobs=1)
        request = request_of(prompt, params)
        request.speculation, request.priority, request.salt = self.ways[way], priority, salt
        one = Submitted(request, prompt, params, [])
        if fails is not None:
            one.fails_at = len(prompt) + fails
            request.sampler = FailingSampler(request.sampler, one.fails_at)
        request.deliver = None
        self.submitted.append(one)
        self.loop.add(request)

    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        if self.submitted:
            one = self.submitted[which % len(self.submitted)]
            one.aborted = True
            self.loop.scheduler.abort(one.request)

    @rule(calls=st.integers(1, 2))
    def break_engine(self, calls: int) -> None:
        self.engine.failing = calls
        self.broken += calls

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.take(self.loop.step())

    def take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            one = next(each for each in self.submitted if each.request is output.request)
            one.tokens += output.token_ids

    @invariant()
    def no_more_requests_than_slots(self) -> None:
        if hasattr(self, "loop"):
            slots = self.loop.scheduler.slots
            assert [one.slot for one in slots.running] == list(range(len(slots.running)))
            owned = [one.slot for one in (*slots.running, *slots.filling, *slots._prefixes.values())]
            assert len(owned) == len(set(owned)) <= self.verifier.slots
            assert len(slots.running) + len(slots.filling) <= self.verifier.max_num_seqs
            assert self.limit is None or slots.rows <= self.limit

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        self.engine.failing = 0
        for _ in range(3000):
            if not self.loop.busy:
                break
            self.take(self.loop.step())
        assert len(self.loop.scheduler) == 0
        for one in self.submitted:
            self.check(one)
        slots = self.loop.scheduler.slots
        slots.clear()
        assert (slots.used, slots.prefixes, slots._tokens) == (False, 0, {})
        assert self.loop.health.requests == self.loop.health.waiting == 0

    def check(self, one: Submitted) -> None:
        """Compare a request that has ended with the oracle's."""
        request, expected = one.request, alone(one.prompt, one.params)
        tokens = request.tokens[len(one.prompt) :]
        assert one.tokens == tokens, "outputs are not the request's tokens"
        assert tokens == expected.new_tokens[: len(tokens)]
        assert request.sampler.logprobs[: len(tokens)] == expected.sampler.logprobs[: len(tokens)]
        reason = request.finish_reason
        if reason == "abort":
            assert one.aborted
        elif reason == "error" and one.fails_at is not None and "the processor failed" in str(request.error):
            assert len(request.tokens) >= one.fails_at
        elif reason == "error":
            assert self.broken >= MOST_FAILURES
            assert "the engine failed" in str(request.error)
        else:
            assert (reason, tokens) == (expected.finish_reason, expected.new_tokens)


Schedules.TestCase.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSchedules = pytest.mark.faulty_drafts(Schedules.TestCase)
