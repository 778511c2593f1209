"""Replicas and methods for a number of users, by a simulation of their queues: no model runs.

    python -m experiments.capacity replicas [--machine xeon]      fewest replicas for 10, 1,000 and 100,000 users
    python -m experiments.capacity load                           first token and gaps by the users of a replica
    python -m experiments.capacity methods                        gain of each method by batch size, low and high load
    python -m experiments.capacity routing                        prompt rows that prefixes save, by policy
    python -m experiments.capacity overload                       the router's bound
    python -m experiments.capacity check                          M/M/1, Little's law, a measured load

The command prints one JSON object, the same for the same options. `--plots DIR` draws pictures too.

Users are a closed loop: a user thinks (exponential), sends a prompt with all earlier turns of the conversation, and
reads the whole answer. A conversation has a fixed number of turns, then another begins.

A replica repeats the scheduler's step. It admits requests to its slots, and computes rows of prompts in the call that
verifies a row of each running request. The scheduler's own constants limit these rows. A step without prompt rows may
have drafts, with the sizes that bring most tokens a millisecond. The product's own `PrefixTable` routes, and its own
`Slots` keeps rows of conversations.

t(rows) is measured up to 16 rows (COSTS). More rows are extrapolated linearly, with the slope from 8 to 16.
"""
# pylint: disable=too-many-lines  # the model of a replica, and the questions asked of it

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

from redraft.bench.command import run
from redraft.bench.plots import COLOURS, GREY, Pictures, check_plots
from redraft.errors import UsageError
from redraft.runtime.loop.scheduler import (
    CHUNK_MULTIPLE,
    CHUNK_SHARE,
    LEAST_CHUNK,
    LONG_PROMPT,
    LONG_SHARE,
    MEASURED_EVERY,
)
from redraft.runtime.loop.slots import Slots
from redraft.runtime.replicas.routing import OVERLOAD, PrefixTable
from redraft.runtime.steps.verifier import PREFILL_CHUNK

ROWS = (1, 2, 4, 8, 16)
COSTS = {
    "xeon": {
        "smollm2": (6.4, 6.6, 7.1, 8.4, 12.4),
        "qwen0.5b": (19.2, 19.9, 21.5, 24.7, 32.3),
        "qwen1.5b": (55.0, 56.3, 61.2, 68.4, 91.8),
    },
    "avx2": {
        "smollm2": (7.9, 8.2, 8.5, 15.0, 27.7),
        "qwen0.5b": (22.2, 22.8, 23.1, 40.3, 77.5),
        "qwen1.5b": (61.5, 59.9, 64.6, 121.4, 233.8),
    },
}
"""Milliseconds of a verification of ROWS rows, int8, two threads. xeon: docs/log.md, "Products that overlap memory with
computing". avx2: two cores of an EPYC (Zen 3), means of two runs' medians."""
MOST_ROWS = 2048
"""Rows of a call, at most."""
LOOKUP_MS = 0.1
"""Lookups of one request in a step: docs/log.md, "The decode loop", 0.08 to 0.11 s in 200 steps of eight."""
HOST_MS = 0.25
"""The host's time in a step for each running request: docs/log.md, "Calls of new sizes, gates, and keys and values in
fp16", about 6 % of the time of eight requests, whose steps take 30 ms."""
LAYER_SHARE = {("xeon", "smollm2"): 0.29, ("avx2", "smollm2"): 0.62}
"""A draft of Lyanna over t(4 rows of each request): docs/log.md, "SmolLM2 with its drafter" (2.07 ms) and "The decode
loop" (5.4 to 32.3 ms for 1 to 8 slots)."""
ASSUMED_LAYER_SHARE = 0.1
"""The same where nothing was measured."""
LEAST_GAIN = 1.01
"""A speculative step has to gain a hundredth: docs/controllers.md."""
_LEARN = 0.25


class Costs:
    """Milliseconds of a call by its rows."""

    def __init__(self, measured: Sequence[float]) -> None:
        """measured: of ROWS."""
        slope = (measured[-1] - measured[-2]) / (ROWS[-1] - ROWS[-2])
        places, last_ms = (*ROWS, MOST_ROWS + 1), measured[-1] + slope * (MOST_ROWS + 1 - ROWS[-1])
        values = list(itertools.accumulate((*measured, last_ms), max))  # a row more is never faster, but for noise
        self._table = [values[0]] * 2
        for (low, first), (high, last) in itertools.pairwise(zip(places, values, strict=True)):
            self._table += [first + (last - first) * (row - low) / (high - low) for row in range(low + 1, high + 1)]

    def ms(self, rows: float) -> float:
        """Return the milliseconds of so many rows, which may be a mean."""
        whole = int(rows)
        low = self._table[whole]
        return low if whole == rows else low + (rows - whole) * (self._table[whole + 1] - low)


class RandomCosts(Costs):
    """Exponential service times with a mean of 1 ms, for the comparison with M/M/1."""

    def __init__(self, seed: int) -> None:
        super().__init__([1.0] * len(ROWS))
        self._random = random.Random(seed)

    def ms(self, rows: float) -> float:
        return self._random.expovariate(1.0)


@dataclass(frozen=True)
class Source:
    """Where a step's draft of a request comes from.

    kind:     lookup, layer (a trained layer such as Lyanna), or model (a draft model, a call a token).
    share:    of the steps of a request that have such a draft.
    accepted: share of drafted tokens accepted at each depth, after accepted ones.   deepest: drafted tokens at most.
    """

    kind: str
    share: float
    accepted: float
    deepest: int

    def tokens(self, depth: int) -> float:
        """Return the mean number of accepted tokens of a draft of so many tokens."""
        return sum(self.accepted**each for each in range(1, depth + 1))


@dataclass(frozen=True)
class Method:
    """A method: its sources, and its time for prompt rows as a share of the verifier's."""

    sources: tuple[Source, ...] = ()
    prompt_share: float = 0.0


METHODS = {
    "qwen1.5b": {
        "none": Method(),
        # docs/models.md, Speculation: tokens a step 1.26, as with three drafted tokens here; with seven 1.36
        "ngram": Method((Source("lookup", 0.17, 0.7, 7),)),
        # the same table: tokens a step 1.90, 86 % of drafted tokens accepted
        "draft": Method((Source("model", 0.35, 0.925, 3),), 0.33),
        # no such drafter exists: acceptance is that of SmolLM2's, below
        "ngram+lyanna": Method((Source("lookup", 0.17, 0.7, 7), Source("layer", 0.83, 0.55, 3)), 0.036),
    },
    "smollm2": {
        "none": Method(),
        # docs/log.md, "SmolLM2 with its drafter": tokens a step 1.67 and 2.02 in fp32, where rows are cheap; both 2.41
        "ngram": Method((Source("lookup", 0.26, 0.75, 7),)),
        "lyanna": Method((Source("layer", 1.0, 0.55, 3),), 0.033),
        "ngram+lyanna": Method((Source("lookup", 0.26, 0.75, 7), Source("layer", 0.74, 0.55, 3)), 0.033),
    },
    "qwen0.5b": {"none": Method(), "ngram": Method((Source("lookup", 0.17, 0.7, 7),))},
}


@dataclass(frozen=True)
class Plan:
    """Drafted tokens by source for a batch size.   gain: tokens a millisecond over plain decoding.

    rows, tokens: of one request in a step, means.
    """

    depths: tuple[int, ...]
    gain: float = 1.0
    rows: float = 1.0
    tokens: float = 1.0


class Drafting:
    """A method on a machine."""

    def __init__(self, machine: str, model: str, method: str, costs: Costs | None = None) -> None:
        """costs: in place of the machine's."""
        self.method = METHODS[model][method]
        self.costs = costs or Costs(COSTS[machine][model])
        self._model_costs = Costs(COSTS[machine]["qwen0.5b"])
        self._layer_share = LAYER_SHARE.get((machine, model), ASSUMED_LAYER_SHARE)
        self._plans: dict[int, Plan] = {}

    def draft_ms(self, source: Source, batch: int, count: float, depth: int) -> float:
        """Return the milliseconds of drafts of `depth` tokens for `count` requests of a batch."""
        if source.kind == "lookup":
            return LOOKUP_MS * batch
        if source.kind == "layer":
            return self._layer_share * self.costs.ms(4 * count)
        return depth * self._model_costs.ms(max(count, 1))

    def plan(self, batch: int) -> Plan:
        """Return the drafts of most tokens a millisecond, or none if they gain less than LEAST_GAIN."""
        known = self._plans.get(batch)
        if known is None:
            sources = self.method.sources
            choices = itertools.product(*[range(source.deepest + 1) for source in sources])
            best = max([self._weighed(batch, depths) for depths in choices], key=lambda plan: plan.gain)
            known = self._plans[batch] = best if best.gain >= LEAST_GAIN else Plan((0,) * len(sources))
        return known

    def _weighed(self, batch: int, depths: tuple[int, ...]) -> Plan:
        rows = tokens = 1.0
        draft_ms = 0.0
        for source, depth in zip(self.method.sources, depths, strict=True):
            rows += source.share * depth
            tokens += source.share * source.tokens(depth)
            if depth:
                any_drafts = 1 - (1 - source.share) ** batch if source.kind == "model" else 1.0
                draft_ms += any_drafts * self.draft_ms(source, batch, source.share * batch, depth)
        plain_ms = self.costs.ms(batch)
        return Plan(depths, tokens * plain_ms / (self.costs.ms(batch * rows) + draft_ms), rows, tokens)


@dataclass(slots=True, eq=False)
class Request:
    """A request. Times are seconds, lengths tokens.

    missing: prompt rows that are not computed.   left: tokens that it will still write.
    """

    user: int
    conversation: int
    prompt: int
    left: int
    arrived: float
    answer: int = 0
    cached: int = 0
    missing: int = 0
    admitted: float = -1.0
    first: float = -1.0


@dataclass(frozen=True)
class Setup:
    """A run. Lengths are in tokens, times in seconds.

    machine, model: of COSTS.   users: of all replicas.   slots: of a replica, for running requests.
    prefixes: slots of a replica for parked prefixes alone; these may lie in free slots of requests too.
    policy: prefix, idlest or random.   think: mean.   message, answer: medians of lognormal lengths with `spread`.
    system: tokens that all conversations begin with.   warm: time before figures are taken, for `seconds`.
    """

    machine: str = "xeon"
    model: str = "qwen1.5b"
    method: str = "ngram"
    replicas: int = 1
    users: int = 10
    slots: int = 8
    prefixes: int = 8
    policy: str = "prefix"
    overload: int = OVERLOAD
    think: float = 30.0
    turns: int = 5
    message: int = 60
    answer: int = 150
    spread: float = 0.5
    system: int = 0
    warm: float = 150.0
    seconds: float = 300.0
    seed: int = 1
    host_ms: float = HOST_MS


_NO_DRAFTER: Any = SimpleNamespace(begin=lambda *_: None, resume=lambda *given: given[-1], move=lambda *_: None)


@dataclass(eq=False)
class _Held:
    """The fields of a product's request that `Slots` reads and writes. It has no drafter's state."""

    tokens: list[int]
    prompt_length: int
    num_computed_tokens: int = 0
    cached_tokens: int = 0
    slot: int = -1
    admitted: float = 0.0
    salt: str | None = None
    text: None = None
    record: None = None
    deliver: None = None
    drafting: dict[str, Any] = field(default_factory=dict)
    speculation: Any = field(default_factory=lambda: SimpleNamespace(drafter=_NO_DRAFTER))
    counters: Any = field(default_factory=lambda: SimpleNamespace(steps=1))


class ProductSlots:
    """The product's `Slots`, over a verifier without rows."""

    def __init__(self, setup: Setup) -> None:
        verifier: Any = SimpleNamespace(
            max_num_seqs=setup.slots, slots=setup.slots + setup.prefixes, release=lambda *_: None,
            move=lambda *_: None,
        )  # fmt: skip
        self._system = setup.system
        self._slots: Any = Slots(verifier)
        self._held: dict[Request, _Held] = {}

    def admit(self, request: Request) -> int:
        held = _Held(tokens_of(request.conversation, request.prompt, self._system), request.prompt)
        self._held[request] = held
        self._slots.admit(held)
        cached = held.num_computed_tokens
        held.num_computed_tokens = request.prompt - 1
        return cached

    def join(self, request: Request) -> bool:
        return bool(self._slots.join(self._held[request]))

    def leave(self, request: Request) -> None:
        held = self._held.pop(request)
        held.tokens = tokens_of(request.conversation, request.prompt + request.answer, self._system)
        held.num_computed_tokens = len(held.tokens) - 1
        self._slots.leave(held)


def tokens_of(conversation: int, count: int, system: int) -> list[int]:
    """Return the first tokens of a conversation, of which all conversations share `system`."""
    own = conversation << 20
    return [*range(min(system, count)), *range(own, own + count - system)]


class Replica:
    """One replica: the steps of a scheduler with `slots` slots."""

    def __init__(self, setup: Setup, drafting: Drafting, seed: int) -> None:
        self._slots = setup.slots
        self._parking = ProductSlots(setup)
        self._host_ms = setup.host_ms
        self._drafting = drafting
        self._random = random.Random(seed)
        self._row_ms = self._verified_ms = 0.0
        self._steps_with_chunks = 0
        self._emitted: list[int] | None = None
        self.waiting: deque[Request] = deque()
        self.filling: list[Request] = []
        self.running: list[Request] = []
        self.busy = False

    def begin(self, now: float) -> float:
        """Begin a step, and return its milliseconds; 0 if there is nothing to do."""
        while self.waiting and len(self.filling) + len(self.running) < self._slots:
            self._admit(self.waiting.popleft(), now)
        ready = [request for request in self.filling if request.missing == 0 and self._parking.join(request)]
        if ready:
            self.running += ready
            self.filling = [request for request in self.filling if request not in ready]
        if not self.running and not self.filling:
            return 0.0
        rows = self._chunks() if self.filling else 0
        return self._step_ms(rows) + self._host_ms * len(self.running)

    def end(self, now: float) -> list[Request]:
        """End the step. Returns the requests that ended, whose rows are parked."""
        ended = []
        for place, request in enumerate(self.running):
            request.left -= 1 if self._emitted is None else self._emitted[place]
            if request.first < 0:
                request.first = now
            if request.left <= 0:
                ended.append(request)
        if ended:
            self.running = [request for request in self.running if request.left > 0]
            for request in ended:
                self._parking.leave(request)
        return ended

    def _admit(self, request: Request, now: float) -> None:
        """Give a request a slot, and the rows of the longest parked prefix."""
        request.admitted = now
        request.cached = self._parking.admit(request)
        request.missing = request.prompt - 1 - request.cached
        self.filling.append(request)

    def _chunks(self) -> int:
        """Take the step's rows of prompts, the first request's first, as `Scheduler._chunks`. Returns their number."""
        running = len(self.running)
        budget = PREFILL_CHUNK if not running else LEAST_CHUNK
        if running and self._row_ms and self._verified_ms:
            is_long = any(request.prompt - request.cached >= LONG_PROMPT for request in self.filling)
            share = LONG_SHARE if is_long else CHUNK_SHARE
            rows = int(share * self._verified_ms / self._row_ms) // CHUNK_MULTIPLE * CHUNK_MULTIPLE
            budget = min(max(rows, LEAST_CHUNK), PREFILL_CHUNK)
        if running:
            self._steps_with_chunks = (self._steps_with_chunks + 1) % MEASURED_EVERY
            if not self._steps_with_chunks:
                return 0
        taken = 0
        for request in self.filling:
            rows = min(request.missing, budget - taken)
            request.missing -= rows
            taken += rows
        return taken

    def _step_ms(self, rows: int) -> float:
        """Return the step's time, and decide its tokens."""
        running, costs = len(self.running), self._drafting.costs
        if not rows:
            ms = self._drafted_ms()
            self._verified_ms += _LEARN * (ms - self._verified_ms) if self._verified_ms else ms
            return ms
        self._emitted = None
        ms = costs.ms(running + rows)
        alone_ms = costs.ms(running) if running else 0.0
        row_ms = min((ms - alone_ms) / rows, ms / (running + rows))
        self._row_ms += _LEARN * (row_ms - self._row_ms) if self._row_ms else row_ms
        return ms + self._drafting.method.prompt_share * (ms - alone_ms)

    def _drafted_ms(self) -> float:
        """Return the time of a step without prompt rows, and draw its tokens."""
        drafting, batch = self._drafting, len(self.running)
        plan = drafting.plan(batch)
        if not any(plan.depths):
            self._emitted = None
            return drafting.costs.ms(batch)
        sources, counts, emitted, rows = drafting.method.sources, [0] * len(plan.depths), list[int](), batch
        for _ in self.running:
            drawn, tokens = self._random.random(), 1
            for place, source in enumerate(sources):
                drawn -= source.share
                if drawn < 0:
                    if depth := plan.depths[place]:
                        counts[place] += 1
                        rows += depth
                        lucky = math.log(1 - self._random.random()) / math.log(source.accepted)
                        tokens += min(depth, int(lucky))
                    break
            emitted.append(tokens)
        self._emitted = emitted
        draft_ms = 0.0
        for source, count, depth in zip(sources, counts, plan.depths, strict=True):
            if depth and (count or source.kind == "lookup"):
                draft_ms += drafting.draft_ms(source, batch, count, depth)
        return drafting.costs.ms(rows) + draft_ms


class Workload(Protocol):
    """Who sends requests."""

    def start(self) -> Iterator[tuple[float, int]]:
        """Yield the first arrivals: second and user."""

    def arrive(self, user: int, now: float) -> tuple[Request, float | None]:
        """Return the request of a user, and the second of an arrival that does not wait for its end."""

    def ended(self, request: Request, now: float) -> float | None:
        """Return the second of the user's next arrival."""


class Chats:
    """Users in conversations, a closed loop. Each has a random generator of its own, so policies meet equal users."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._users = [random.Random(setup.seed * 1_000_003 + user) for user in range(setup.users)]
        self._numbers = itertools.count(1)
        self._conversations = [(0, 0, 0)] * setup.users  # number, turns before, tokens of these

    def start(self) -> Iterator[tuple[float, int]]:
        for user, own in enumerate(self._users):
            turns = own.randrange(self._setup.turns)
            earlier = sum([self._length(own, self._setup.message) + self._length(own) for _ in range(turns)])
            self._conversations[user] = next(self._numbers), turns, self._setup.system + earlier
            yield own.expovariate(1.0) * self._setup.think, user

    def arrive(self, user: int, now: float) -> tuple[Request, float | None]:
        own, (number, _, earlier) = self._users[user], self._conversations[user]
        prompt, answer = earlier + self._length(own, self._setup.message), self._length(own)
        return Request(user, number, prompt, answer, now, answer), None

    def ended(self, request: Request, now: float) -> float | None:
        own, (number, turns, _) = self._users[request.user], self._conversations[request.user]
        following = number, turns + 1, request.prompt + request.answer
        if turns + 1 >= self._setup.turns:
            following = next(self._numbers), 0, self._setup.system
        self._conversations[request.user] = following
        return now + own.expovariate(1.0) * self._setup.think

    def _length(self, own: random.Random, median: int = 0) -> int:
        return max(1, round(own.lognormvariate(math.log(median or self._setup.answer), self._setup.spread)))


class Poisson:
    """Requests of one step at random times, `rate` a second."""

    def __init__(self, rate: float, seed: int) -> None:
        self._rate = rate
        self._random = random.Random(seed)

    def start(self) -> Iterator[tuple[float, int]]:
        yield 0.0, 0

    def arrive(self, user: int, now: float) -> tuple[Request, float | None]:
        return Request(user, user, 1, 1, now, 1), now + self._random.expovariate(self._rate)

    def ended(self, request: Request, now: float) -> float | None:
        return None


@dataclass
class Record:
    """Figures of requests that ended, and of steps, after the warm-up. Times in seconds; gaps in milliseconds."""

    first_tokens: list[float] = field(default_factory=list)
    stays: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    gaps: Counter[float] = field(default_factory=Counter)
    tokens: int = 0
    prompt_rows: int = 0
    cached_rows: int = 0
    area: float = 0.0
    overlap: float = 0.0

    def ended(self, request: Request, now: float) -> None:
        """Count a request that ended."""
        self.first_tokens.append(request.first - request.arrived)
        self.stays.append(now - request.arrived)
        self.waits.append(request.admitted - request.arrived)
        self.tokens += request.answer
        self.prompt_rows += request.prompt
        self.cached_rows += request.cached

    def gap_ms(self, share: float) -> float:
        """Return the percentile `share` of the gaps between outputs; 0 without any."""
        least = share * sum(self.gaps.values())
        for gap in sorted(self.gaps):
            least -= self.gaps[gap]
            if least <= 0:
                return gap
        return 0.0


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that this share of the values does not exceed; 0 without any."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)] if values else 0.0


class Simulation:
    """Replicas, the router and users, by events."""

    def __init__(self, setup: Setup, workload: Workload | None = None, costs: Costs | None = None) -> None:
        drafting = Drafting(setup.machine, setup.model, setup.method, costs)
        self._setup = setup
        self._workload = workload or Chats(setup)
        names = [str(place) for place in range(setup.replicas)]
        self._replicas = {name: Replica(setup, drafting, setup.seed + place) for place, name in enumerate(names)}
        self._loads = dict.fromkeys(names, 0)
        self._table = PrefixTable(setup.overload)
        self._random = random.Random(setup.seed)
        self._events: list[tuple[float, int, int | str]] = []
        self._numbers = itertools.count()
        self._present: set[Request] = set()
        self.record = Record()

    def run(self) -> Record:
        """Run until the end. Raises ArithmeticError if the books do not agree."""
        setup, record = self._setup, self.record
        end, before = setup.warm + setup.seconds, setup.warm
        for at, user in self._workload.start():
            self._push(at, user)
        while self._events and self._events[0][0] <= end:
            now, _, who = heapq.heappop(self._events)
            if now > setup.warm:
                record.area += len(self._present) * (now - before)
                before = now
            if isinstance(who, int):
                self._arrive(who, now)
            else:
                self._step(who, now)
        record.area += len(self._present) * (end - before)
        for request in self._present:
            record.overlap += end - max(request.arrived, setup.warm)
        if not math.isclose(record.area, record.overlap, rel_tol=1e-6, abs_tol=1e-6):
            raise ArithmeticError(f"requests in time {record.area}, time of requests {record.overlap}")
        return record

    def _push(self, at: float, who: int | str) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), who))

    def _arrive(self, user: int, now: float) -> None:
        request, following = self._workload.arrive(user, now)
        if following is not None:
            self._push(following, user + 1)
        name = self._choose(request)
        replica = self._replicas[name]
        self._loads[name] += 1
        self._present.add(request)
        replica.waiting.append(request)
        if not replica.busy:
            self._begin(name, now)

    def _choose(self, request: Request) -> str:
        if self._setup.policy == "random":
            return self._random.choice(list(self._loads))
        if self._setup.policy == "idlest":
            return self._table.order((), self._loads)[0]
        tokens = tokens_of(request.conversation, request.prompt, self._setup.system)
        name = self._table.order(tokens, self._loads)[0]
        self._table.note(tokens, name)
        return name

    def _begin(self, name: str, now: float) -> None:
        replica = self._replicas[name]
        ms = replica.begin(now)
        replica.busy = ms > 0
        if ms > 0:
            if now > self._setup.warm:
                self.record.gaps[round(ms, 1)] += sum([request.first >= 0 for request in replica.running])
            self._push(now + ms / 1e3, name)

    def _step(self, name: str, now: float) -> None:
        for request in self._replicas[name].end(now):
            self._loads[name] -= 1
            self._present.remove(request)
            if now > self._setup.warm:
                self.record.ended(request, now)
                self.record.overlap += now - max(request.arrived, self._setup.warm)
            at = self._workload.ended(request, now)
            if at is not None:
                self._push(at, request.user)
        self._begin(name, now)


def figures(setup: Setup) -> dict[str, float]:
    """Return the figures of a run. Raises ArithmeticError if it breaks Little's law by more than chance allows.

    The law holds in a steady state, so it is checked if requests stay for less than a tenth of the time.
    """
    record = Simulation(setup).run()
    count, seconds = len(record.stays), setup.seconds
    present = record.area / seconds
    little = sum(record.stays) / seconds / present if present else 1.0
    steady = count > 0 and sum(record.stays) / count < seconds / 10
    if steady and abs(little - 1) > 0.1 + 3 / math.sqrt(count):
        raise ArithmeticError(f"Little's law: {little} of the requests in the system, of {count}")
    return {
        "requests": count,
        "tokens_per_second": round(record.tokens / seconds, 1),
        "first_token_p50_s": round(percentile(record.first_tokens, 0.5), 2),
        "first_token_p95_s": round(percentile(record.first_tokens, 0.95), 2),
        "gap_p50_ms": record.gap_ms(0.5),
        "gap_p95_ms": record.gap_ms(0.95),
        "answer_mean_s": round(sum(record.stays) / max(count, 1), 2),
        "saved_rows": round(record.cached_rows / max(record.prompt_rows, 1), 3),
        "present_each": round(present / setup.replicas, 2),
        "little": round(little, 3),
    }


PRECISION = 0.05
"""Share of replicas, or users, by which a size may be too large."""
CELL = 64
"""Replicas that are simulated for 100,000 users."""


@dataclass(frozen=True)
class Goals:
    """Limits of the 95th percentiles."""

    first_token_s: float = 2.0
    gap_ms: float = 150.0

    def met(self, found: Mapping[str, float]) -> bool:
        """True if a run's figures are within both."""
        return found["first_token_p95_s"] <= self.first_token_s and found["gap_p95_ms"] <= self.gap_ms


def bisected(low: int, high: int, good: Callable[[int], bool], precision: float = 0.0) -> int:
    """Return the smallest number above `low` up to `high` that is good, if all above it are; `high` is taken as good.

    precision: share of the number by which the result may be too large.
    """
    while high - low > max(1, int(precision * high)):
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle, high)
    return high


def fewest_replicas(setup: Setup, goals: Goals) -> dict[str, Any]:
    """Return the fewest replicas that meet the goals with a setup's users, and their figures."""
    runs: dict[int, dict[str, float]] = {}

    def good(replicas: int) -> bool:
        runs[replicas] = runs.get(replicas) or figures(replace(setup, replicas=replicas))
        return goals.met(runs[replicas])

    low, high = 0, max(1, setup.users // 12)
    while not good(high):
        if high >= setup.users:
            return {"replicas": None, **runs[high]}
        low, high = high, min(2 * high, setup.users)
    found = bisected(low, high, good, PRECISION)
    return {"replicas": found, "users_each": round(setup.users / found, 1), **runs[found]}


def most_users(setup: Setup, goals: Goals, users: int) -> dict[str, Any]:
    """Return the replicas for `users`, by the most users that a cell of the setup's replicas takes."""
    runs: dict[int, dict[str, float]] = {}

    def bad(cell_users: int) -> bool:
        runs[cell_users] = figures(replace(setup, users=cell_users))
        return not goals.met(runs[cell_users])

    low, high = 0, 8 * setup.replicas
    while high < 64 * setup.replicas and not bad(high):
        low, high = high, 2 * high
    most = bisected(low, high, bad, PRECISION)
    while most > 0 and (most not in runs or not goals.met(runs[most])):  # the last one that was not bad
        most = max([each for each in runs if each < most], default=0)
    if most < setup.replicas:
        return {"replicas": None}
    return {"replicas": math.ceil(users * setup.replicas / most), "cell_users": most, **runs[most]}


def replicas(setup: Setup, goals: Goals) -> dict[str, Any]:
    """Return the fewest replicas that meet the goals, by the number of users."""
    short = replace(setup, seconds=setup.seconds / 5)
    return {
        "goals": asdict(goals),
        "10": fewest_replicas(replace(setup, users=10, seconds=10 * setup.seconds), goals),
        "1000": fewest_replicas(replace(short, users=1000), goals),
        "100000": most_users(replace(short, replicas=CELL), goals, 100_000),
    }


USERS = (1, 2, 4, 6, 8, 12, 16, 20, 24, 28)
"""Users of a replica."""
LOADS = {"xeon": (1, 8, 24), "avx2": (1, 4, 12)}
"""Users of a replica: low, middle and high load."""
COUNTS = (1, 2, 4, 16)
"""Replicas."""
BOUNDS = (0, 1, 2, 4, 8, 16, 10**6)
"""Of the router."""


def load(setup: Setup) -> dict[str, Any]:
    """Return what users see by the users of a replica, of eight."""
    return {
        machine: {users: figures(replace(setup, machine=machine, replicas=8, users=8 * users)) for users in USERS}
        for machine in COSTS
    }


def methods(setup: Setup) -> dict[str, Any]:
    """Return the gain of each method by batch size, and what a setup's users see at low and at high load."""
    gains: dict[str, Any] = {}
    for machine in COSTS:
        for model, named in METHODS.items():
            for method in named:
                drafting = Drafting(machine, model, method)
                plans = {batch: drafting.plan(batch) for batch in range(1, 33)}
                gains[f"{machine}, {model}, {method}"] = {
                    "gain": {batch: round(plans[batch].gain, 3) for batch in (1, 2, 3, 4, 6, 8, 12, 16, 32)},
                    "tokens_per_step": round(plans[1].tokens, 2),
                    "stops_at": next((batch for batch in plans if not any(plans[batch].depths)), None),
                }
    loads = {
        f"{machine}, {users} users each, {method}": figures(
            replace(setup, machine=machine, method=method, replicas=8, users=8 * users)
        )
        for machine in COSTS
        for users in LOADS[machine]
        for method in METHODS[setup.model]
    }
    return {"plans": gains, "loads": loads}


def routing(setup: Setup) -> dict[str, Any]:
    """Return what each policy saves and costs by replicas and users, by turns, and with a shared beginning."""

    def compared(own: Setup, policies: Sequence[str] = ("prefix", "idlest", "random")) -> dict[str, Any]:
        return {policy: figures(replace(own, policy=policy)) for policy in policies}

    pair = ("prefix", "idlest")
    eight = replace(setup, replicas=8, users=8 * 12)
    return {
        "replicas": {
            f"{count} replicas, {users} users each": compared(replace(setup, replicas=count, users=count * users))
            for users in (4, 12, 24)
            for count in COUNTS
        },
        "turns": {f"{turns} turns": compared(replace(eight, turns=turns), pair) for turns in (1, 2, 5, 10)},
        "think": {f"{think:.0f} s": compared(replace(eight, think=think), pair) for think in (10.0, 60.0, 120.0)},
        "system": {
            f"256 shared tokens, {users} users each": compared(replace(eight, users=8 * users, system=256), pair)
            for users in (4, 12)
        },
        "prefix slots": {
            f"{users} users each, {prefixes} prefix slots": figures(replace(eight, users=8 * users, prefixes=prefixes))
            for users in (4, 12, 24)
            for prefixes in (8, 24, 56)
        },
    }


def overload(setup: Setup) -> dict[str, Any]:
    """Return what each bound of the router saves and costs."""
    return {
        f"{users} users each, {shared} shared tokens": {
            str(bound): figures(replace(setup, replicas=8, users=8 * users, overload=bound, system=shared))
            for bound in BOUNDS
        }
        for users, shared in ((12, 0), (24, 0), (12, 256))
    }


def check(setup: Setup) -> dict[str, Any]:
    """Compare with M/M/1, and with a load that was measured. Raises ArithmeticError beyond 5 % of M/M/1's wait."""
    queues = {}
    for load in (0.5, 0.7):
        own = replace(setup, method="none", replicas=1, users=0, slots=1, warm=1.0, seconds=300.0, host_ms=0.0)
        rate = load * 1e3  # a second; services take a millisecond
        record = Simulation(own, Poisson(rate, own.seed), RandomCosts(own.seed + 1)).run()
        wait_ms, expected_ms = sum(record.waits) / len(record.waits) * 1e3, load / (1 - load)
        little = sum(record.stays) / record.area
        queues[str(load)] = {"wait_ms": round(wait_ms, 4), "expected_ms": expected_ms, "little": round(little, 4)}
        if abs(wait_ms / expected_ms - 1) > 0.05 or abs(little - 1) > 0.05:
            raise ArithmeticError(f"M/M/1 at a load of {load}: {queues[str(load)]}")
    measured = replace(setup, replicas=1, users=8, think=1e-3, turns=1, message=80, answer=36, spread=0.3, warm=20.0)
    return {
        "M/M/1": queues,
        "eight clients, no thinking": {
            f"{machine}, {model}, {method}": figures(replace(measured, machine=machine, model=model, method=method))
            for machine in COSTS
            for model, method in (("qwen0.5b", "none"), ("qwen0.5b", "ngram"), ("smollm2", "ngram+lyanna"))
        },
    }


def draw_methods(found: Mapping[str, Any], pictures: Pictures) -> None:
    """Draw the gain of each method of the 1.5B model by batch size, a row a machine."""
    with pictures.axes("capacity-methods", 7, 5, 2, title="Gain of speculation over plain decoding") as rows:
        for axes, machine in zip(rows, COSTS, strict=True):
            for method in METHODS["qwen1.5b"]:
                if method != "none":
                    gain = found["plans"][f"{machine}, qwen1.5b, {method}"]["gain"]
                    axes.plot(list(gain), list(gain.values()), label=method)
            axes.set(ylabel=f"{machine}: times plain", xlim=(0.5, 16.5), ylim=(0.95, None))
        rows[-1].set_xlabel("requests that run at once")


def draw_routing(found: Mapping[str, Any], pictures: Pictures) -> None:
    """Draw the share of prompt rows that each policy saves, by replicas and users."""
    settings: dict[str, Any] = {
        "title": "Prompt rows that parked prefixes save",
        "xlabel": "replicas",
        "ylabel": "share",
    }
    with pictures.axes("capacity-routing", ylim=(0, 1), **settings) as axes:
        for colour, policy in zip(COLOURS, ("prefix", "idlest", "random"), strict=False):
            for users, style in ((4, "-"), (24, "--")):
                shares = [
                    found["replicas"][f"{count} replicas, {users} users each"][policy]["saved_rows"] for count in COUNTS
                ]
                axes.plot(list(map(str, COUNTS)), shares, style, color=colour, label=f"{policy}, {users} users each")


def draw_load(found: Mapping[str, Any], pictures: Pictures) -> None:
    """Draw the 95th percentiles of both goals by the users of a replica."""
    goals = Goals()
    with pictures.axes("capacity-load", 7, 5, 2, title="95th percentiles by users of a replica") as rows:
        for axes, figure, limit in zip(
            rows, ("first_token_p95_s", "gap_p95_ms"), (goals.first_token_s, goals.gap_ms), strict=True
        ):
            for colour, machine in zip(COLOURS, COSTS, strict=False):
                values = [found[machine][users][figure] for users in USERS]
                axes.plot(USERS, values, color=colour, label=machine)
            axes.axhline(limit, color=GREY, linestyle="--", marker="", label="goal")
        rows[0].set(ylabel="first token, s", ylim=(0, 10))
        rows[1].set(ylabel="between outputs, ms", ylim=(0, 300), xlabel="users")


QUESTIONS: dict[str, Callable[[Setup], dict[str, Any]]] = {
    "load": load, "methods": methods, "routing": routing, "overload": overload, "check": check,
}  # fmt: skip
DRAWN: dict[str, Callable[[Mapping[str, Any], Pictures], None]] = {
    "load": draw_load, "methods": draw_methods, "routing": draw_routing,
}  # fmt: skip


def main() -> dict[str, Any]:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=["replicas", *QUESTIONS])
    defaults = Setup()
    parser.add_argument("--machine", choices=list(COSTS), default=defaults.machine)
    parser.add_argument("--model", choices=list(METHODS), default=defaults.model)
    parser.add_argument("--method", default=defaults.method, help="methods compares all of the model")
    for name in ("slots", "prefixes", "overload", "turns", "message", "answer", "system", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(defaults, name))
    for name in ("think", "seconds"):
        parser.add_argument(f"--{name}", type=float, default=getattr(defaults, name))
    parser.add_argument("--first-token-s", type=float, default=Goals.first_token_s)
    parser.add_argument("--gap-ms", type=float, default=Goals.gap_ms)
    parser.add_argument("--plots", type=Path, help="folder for pictures, of load, methods and routing")
    options = parser.parse_args()
    if options.method not in METHODS[options.model]:
        known = ", ".join(METHODS[options.model])
        raise UsageError(f"no acceptance of {options.method} is known for {options.model}", f"give one of {known}")
    if options.plots:
        check_plots()
    given = vars(options)
    setup = Setup(**{name: given[name] for name in asdict(defaults) if name in given})
    goals = Goals(options.first_token_s, options.gap_ms)
    question = options.question
    found = replicas(setup, goals) if question == "replicas" else QUESTIONS[question](setup)
    if options.plots and question in DRAWN:
        DRAWN[question](found, Pictures(options.plots, ""))
    return {"question": question, "setup": asdict(setup), **found}


if __name__ == "__main__":
    run(main)
