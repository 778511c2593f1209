"""Times four ways to use resampled trees in batches (Lyanna, §6.2 and Figure 12).

    python -m experiments.verification_fusion --engines DIR --prompts FILES [--chat] [--limit N] [--batch 2]

    none      fresh drafts alone
    separate  resampled trees have verifications of their own, before the next fresh draft; other requests wait
    exchange  each request of a verification has a resampled tree or a fresh draft
    union     each request of a verification has a fresh draft, merged with its resampled tree if it has one

The ways take turns in blocks of requests, as in `redraft.bench.load`. Speeds include prompts. A step is a part that a
request has in a verification, and rows are the nodes of verified trees, roots included.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from uuid import uuid4

from redraft.bench.command import budget, bundle_parser, markdown_table, one_line_errors
from redraft.bench.compare import Settings, first_turn
from redraft.bench.load import in_blocks
from redraft.bench.prompts import load_prompts
from redraft.bench.statistics import Timing, interval_text, rate_text, ratio_text, speedup
from redraft.methods.lyanna import UNION
from redraft.runtime import Runtime, SamplingParams, SpeculationParams
from redraft.runtime.drafters.lyanna import LyannaDrafter
from redraft.runtime.loop.decode_loop import DecodeLoop
from redraft.runtime.loop.scheduler import RequestOutput
from redraft.runtime.observe.profiling import STEP
from redraft.runtime.requests.batch import Batch, Chunk, RequestStep
from redraft.runtime.requests.request import Request
from redraft.runtime.sampling.sampler import Greedy

HEADER = ("way", "tokens/s", "over none", "95 % interval", "tokens a step", "verifications", "rows", "same as plain")


class CountingLoop(DecodeLoop):
    """A decode loop that counts its verifications and their rows."""

    calls = rows = 0

    def verify(self, batch: Batch, chunks: Sequence[Chunk] = ()) -> None:
        super().verify(batch, chunks)
        self.calls += 1
        self.rows += sum(len(step.tree) for step in batch.steps)


class SeparateCalls(CountingLoop):
    """Verifies resampled trees in calls of their own, until no request has steps left to resample.

    Other requests wait. One whose slot is before a request of such a call takes part with a row whose outcome is
    dropped, since a call has the first slots.
    """

    def step(self) -> list[RequestOutput]:
        outputs = super().step()
        while resampling := [one for one in self.scheduler.slots.running if _resamples(one)]:
            last = max(one.slot for one in resampling)
            whole = self.scheduler.schedule()
            steps = [
                step if step.request in resampling else RequestStep.of(self._waiting(step.request))
                for step in whole.steps[: last + 1]
            ]
            batch = Batch(steps, whole.limits)
            with self._ranges.stage(STEP):
                self.draft(batch)
                self.verify(batch)
                for step in steps:
                    step.outcome = step.outcome if step.request in resampling else None
                self.commit(batch)
            outputs += self.scheduler.update(batch)
        return outputs

    def _waiting(self, request: Request) -> Request:
        """Return a request in the same slot, whose tokens nobody takes. The drafter's state is the request's own."""
        return replace(request, sampler=Greedy(), speculation=self.plain)


def _resamples(request: Request) -> bool:
    """True if a request's next tree would be a resampled one."""
    drafter = request.speculation.drafter
    return isinstance(drafter, LyannaDrafter) and request.remaining > 1 and drafter.remaining(request) > 0


WAYS: dict[str, tuple[bool | str, type[CountingLoop]]] = {
    "none": (False, CountingLoop), "separate": (True, SeparateCalls), "exchange": (True, CountingLoop),
    "union": (UNION, CountingLoop),
}  # fmt: skip
"""The drafter's option `resample`, and the loop, of each way."""


@dataclass
class Totals:
    """The blocks of one way. steps: of requests.   texts: of requests, with their prompts' indices."""

    timings: list[Timing] = field(default_factory=list)
    steps: int = 0
    calls: int = 0
    rows: int = 0
    texts: list[tuple[int, list[int]]] = field(default_factory=list)


class Comparison:
    """Decodes prompts by each way. clients: requests that run at once, for which the runtime has slots."""

    def __init__(
        self, runtime: Runtime, prompts: Sequence[Sequence[int]], params: SamplingParams, how: SpeculationParams,
        clients: int,
    ) -> None:  # fmt: skip
        """how: Lyanna with a fixed budget. Raises UsageError if the bundle has no such method."""
        self._runtime, self._prompts, self._params, self._clients = runtime, prompts, params, clients
        self._how = how
        self._plain = runtime.requests(prompts[:1], [(params, SpeculationParams("none"))])[0].speculation
        drafter = runtime.requests(prompts[:1], [(params, how)])[0].speculation.drafter
        assert isinstance(drafter, LyannaDrafter)
        self._drafter = drafter

    def measure(self) -> dict[str, Totals]:
        """Return the figures of every way. The first prompts warm it up, which is not counted."""
        for way in WAYS:
            self.decode(way, range(self._clients), Totals())
        found = {way: Totals() for way in WAYS}
        for _, way, requests in in_blocks([*WAYS], len(self._prompts), self._clients):
            self.decode(way, requests, found[way])
        return found

    def decode(self, way: str, places: Sequence[int], totals: Totals) -> None:
        """Decode these prompts in a closed loop, and add what they took. Raises the error of a request that failed."""
        resample, kind = WAYS[way]
        self._drafter.options = replace(self._drafter.options, resample=resample)
        loop, requests = kind(self._runtime.verifier, self._plain), self.requests(self._how, places)
        totals.timings.append(run(loop, requests, self._clients))
        totals.steps += sum(one.counters.steps for one in requests)
        totals.calls += loop.calls
        totals.rows += loop.rows
        totals.texts += [(place, one.new_tokens) for place, one in zip(places, requests, strict=True)]

    def plain_texts(self) -> list[list[int]]:
        """Return the new tokens of all prompts by plain decoding."""
        requests = self.requests(SpeculationParams("none"), range(len(self._prompts)))
        run(DecodeLoop(self._runtime.verifier, self._plain), requests, self._clients)
        return [one.new_tokens for one in requests]

    def requests(self, how: SpeculationParams, places: Sequence[int]) -> list[Request]:
        """Return requests that share no rows."""
        prompts = [self._prompts[place] for place in places]
        requests = self._runtime.requests(prompts, [(self._params, how)] * len(prompts))
        for request in requests:
            request.salt = uuid4().hex
        return requests


def run(loop: DecodeLoop, requests: Sequence[Request], clients: int) -> Timing:
    """Decode requests, of which `clients` run at once. Raises the error of one that failed."""
    waiting, started = list(requests), time.perf_counter()
    for _ in range(min(clients, len(waiting))):
        loop.add(waiting.pop(0))
    while loop.busy:
        for output in loop.step():
            if output.request.error is not None:
                raise output.request.error
            if output.finish_reason is not None and waiting:
                loop.add(waiting.pop(0))
    return Timing(sum(len(one.new_tokens) for one in requests), time.perf_counter() - started)


def table(found: dict[str, Totals], plain: Sequence[list[int]]) -> list[tuple[str, ...]]:
    """Return the figures as rows of a table, the header first."""
    rows = [HEADER]
    for way, totals in found.items():
        ratio = speedup(found["none"].timings, totals.timings)
        tokens = sum(len(text) for _, text in totals.texts)
        differing = sum(text != plain[place] for place, text in totals.texts)
        rows.append((
            way, rate_text(ratio.rate), ratio_text(ratio.rate, ratio.base_rate), interval_text(ratio.interval),
            f"{tokens / totals.steps:.3f}", f"{totals.calls}", f"{totals.rows}",
            f"NO, {differing} differ" if differing else "yes",
        ))  # fmt: skip
    return rows


def main() -> None:
    """Run the command."""
    parser = bundle_parser(__doc__, 64)
    parser.add_argument("--chat", action="store_true", help="wrap prompts in the bundle's chat template")
    parser.add_argument("--batch", type=int, default=2, help="requests that run at once")
    parser.add_argument("--budget", type=budget, default="nodes=12,depth=3,width=4")
    parser.add_argument("--method", default="lyanna", help="the drafter's id")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    with one_line_errors():
        loaded, params = load_prompts(options.prompts, options.limit), SamplingParams(max_tokens=options.max_new_tokens)
        with Runtime.open(options.engines, threads=options.threads, max_num_seqs=options.batch) as runtime:
            settings = Settings(params, chat=options.chat)
            prompts = [first_turn(runtime, prompt, settings) for prompt in loaded]
            how = SpeculationParams(options.method, budget=options.budget)
            compared = Comparison(runtime, prompts, params, how, options.batch)
            print(markdown_table(table(compared.measure(), compared.plain_texts())))


if __name__ == "__main__":
    main()
