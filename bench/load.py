"""Load: rates and latencies of methods while several requests run at once.

Every batch size has runtimes of its own, opened with this `max_num_seqs`, as a server would open them: kernels, buffers
and measured costs depend on it. Methods decode blocks of requests, in one process. Block k has the same prompts for
every method, and ratios come from pairs of blocks.

Closed loop: B clients, each of which submits its next prompt when its last one has ended. They submit in the loop's
thread, so B requests run at every step until the block has no more prompts. On the host, every method has a runtime,
and all methods decode a block at the same time, stepping in turn (`side_by_side`). Times are those of their own turns.
Otherwise they decode the block one after the other, in rotating order.

Open loop: requests arrive at random times, at most B run, and the others wait in the runtime's queue.

Prompts have from half to all of the new tokens allowed. With equal lengths, plain requests that begin together would
end together for ever, and their prompts would be computed while nobody decodes; a method that accepts drafts would not
have that advantage.

Every request has a `cache_salt` of its own. Otherwise the second method that decodes a prompt, and every later round,
would find the prompt's rows in the slots, and compute less than the first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np

from redraft.bench.compare import PLAIN, Progress, Settings, Totals, checked, speculation
from redraft.bench.side_by_side import Turns
from redraft.bench.statistics import (
    FEWEST_VALUES,
    Timing,
    interval_text,
    loops,
    median_and_p99,
    rate_text,
    ratio_text,
    speedup,
)
from redraft.runtime import Generation, RequestError, Runtime
from redraft.runtime.loop.scheduler import RequestOutput
from redraft.runtime.observe.metrics import Clock
from redraft.runtime.submission import Submission

BLOCKS = FEWEST_VALUES
"""Blocks of every method and batch size: enough for an interval."""
TURNS = 3
"""Requests of a block over its batch size, at least. A block of fewer would hardly ever be full."""
HEADER = ("batch", "method", "tokens/s", "speed", "95 % interval", "first token, ms", "between outputs, ms", "τ",
          "overhead", "same as plain")  # fmt: skip
QUEUE = "queue, ms"
_GOLDEN = (5**0.5 - 1) / 2
T = TypeVar("T")


@dataclass(eq=False)
class Served:
    """One request.

    prompt:    index of its prompt.
    submitted: seconds of the block's clock when it was submitted. In an open loop, when it should have been.
    outputs:   seconds of each output with tokens.   ended: seconds of its end.
    """

    prompt: int
    submitted: float
    outputs: list[float] = field(default_factory=list)
    ended: float = 0.0
    generation: Generation | None = None

    @property
    def answer(self) -> tuple[int, ...]:
        """The new tokens of a request that has ended."""
        assert self.generation is not None
        return self.generation.token_ids


@dataclass(frozen=True)
class Block:
    """One block of requests by one method, in order of submission. clock: the loop's seconds by stage."""

    served: Sequence[Served]
    clock: Clock

    @property
    def timing(self) -> Timing:
        """All tokens, and the time from the first submission to the last end."""
        tokens = sum(len(one.answer) for one in self.served)
        return Timing(tokens, max(one.ended for one in self.served) - self.served[0].submitted)


class Traffic:
    """Submits the requests of one block, and waits for their ends. Use it once."""

    def __init__(
        self, runtime: Runtime, prompts: Sequence[Sequence[int]], method: str, settings: Settings,
        limits: Sequence[int] | None = None, clock: Callable[[], float] | None = None,
    ) -> None:  # fmt: skip
        """Nothing is submitted yet.

        prompts: token ids.   method: warm, since nothing can be opened or measured in the loop's thread.
        limits:  most new tokens of each prompt; None for those of the settings.
        clock:   returns the seconds of a closed loop; None is `time.perf_counter`.
        """
        self._runtime, self._prompts, self._now = runtime, prompts, clock or time.perf_counter
        limit = settings.params.max_tokens
        limits = [limit] * len(prompts) if limits is None else limits
        self._params = [replace(settings.params, max_tokens=limit) for limit in limits]
        self._how = speculation(method, settings)
        self._lock, self._done = threading.Lock(), threading.Event()
        self._pending: list[int] = []
        self._current: list[int] = []
        self._closed = True
        self._error: BaseException | None = None
        self._all: list[tuple[Served, Submission]] = []

    def run(self, requests: Sequence[int], clients: int, arrivals: Sequence[float] | None = None) -> Block:
        """Decode prompts, given by index.

        clients:  of a closed loop.   arrivals: seconds from now of an open loop, one for each request.
        Raises RequestError if requests failed.
        """
        try:
            self.begin(requests, clients, arrivals)
            return self.finish()
        except BaseException as error:
            self.stop(error)
            raise

    def begin(self, requests: Sequence[int], clients: int, arrivals: Sequence[float] | None = None) -> None:
        """Submit the first requests, those of an open loop all. Arguments are those of `run`."""
        self._pending, self._closed = list(requests), arrivals is None
        self._before = self._runtime.verifier.clock.copy()
        if arrivals is not None:
            self._arrive(arrivals)
        else:
            for _ in range(min(clients, len(requests))):
                self._submit(self._now())

    def finish(self) -> Block:
        """Wait for the end of the block. Raises RequestError if requests failed, and errors of `stop` and `checked`."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        generations = [submission.generation for _, submission in self._all]
        if any(one.error for one in generations):
            raise RequestError(generations)
        for (served, _), generation in zip(self._all, generations, strict=True):
            served.generation = checked(generation)
        in_order = sorted((served for served, _ in self._all), key=lambda one: one.submitted)
        return Block(in_order, _spent(self._before, self._runtime.verifier.clock))

    def stop(self, error: BaseException) -> None:
        """Submit nothing more, abort all requests, and let `finish` raise this error."""
        with self._lock:
            self._pending.clear()
        self._error = self._error or error
        self._done.set()
        for _, submission in self._all:
            submission.abort()

    def _arrive(self, arrivals: Sequence[float]) -> None:
        begun = time.perf_counter()
        for after in arrivals:
            time.sleep(max(begun + after - time.perf_counter(), 0.0))
            self._submit(begun + after)

    def _submit(self, now: float) -> None:
        """Submit the next prompt, if there is one."""
        with self._lock:
            if not self._pending:
                return
            # A prompt that runs already waits, unless all others do too.
            prompt = next((one for one in self._pending if one not in self._current), self._pending[0])
            self._pending.remove(prompt)
            self._current.append(prompt)
        served = Served(prompt, now)
        submission = self._runtime.submit(
            self._prompts[prompt], self._params[prompt], self._how, cache_salt=uuid4().hex,
            on_output=lambda output: self._heard(served, output),
        )  # fmt: skip
        self._all.append((served, submission))

    def _heard(self, served: Served, output: RequestOutput) -> None:
        """Note an output, in the loop's thread. The end of a closed loop's request submits the next one."""
        now = self._now()
        if output.token_ids:
            served.outputs.append(now)
        if output.finish_reason is None:
            return
        served.ended = now
        try:
            with self._lock:
                self._current.remove(served.prompt)
            if self._closed and output.finish_reason != "abort":
                self._submit(self._now())
        except Exception as error:  # noqa: BLE001 - `run` raises it; the loop would only log it
            self.stop(error)
        with self._lock:
            if not self._pending and not self._current:
                self._done.set()


def measure(
    runtimes: Mapping[str, Runtime], prompts: Sequence[Sequence[int]], settings: Settings,
    rate: float | None = None, progress: Progress = lambda line: None,
) -> dict[str, list[Block]]:  # fmt: skip
    """Return the blocks of every method, after a warm-up that is not counted.

    runtimes: by method, PLAIN included, of one `max_num_seqs`, which is the batch size. If each is another one, methods
              decode a block side by side.
    prompts:  token ids, at least one for each request that runs.
    rate:     arrivals a second of an open loop; None for a closed one. Raises UsageError and RequestError.
    """
    batch = runtimes[PLAIN].verifier.max_num_seqs
    for method, runtime in runtimes.items():
        progress(f"batch {batch}: warming up {method}")
        runtime.generate(prompts[:batch], settings.params, speculation(method, settings))
    limits = spread(settings.params.max_tokens, len(prompts))
    if len(set(runtimes.values())) == len(runtimes) and rate is None:
        return _side_by_side(runtimes, prompts, settings, limits, progress)
    blocks: dict[str, list[Block]] = {method: [] for method in runtimes}
    for number, method, requests in in_blocks([*runtimes], len(prompts), batch):
        gaps = np.random.default_rng(number).exponential(1 / rate, len(requests)) if rate else None
        progress(f"batch {batch}: block {number + 1} of {BLOCKS}, {method}")
        traffic = Traffic(runtimes[method], prompts, method, settings, limits)
        blocks[method].append(traffic.run(requests, batch, None if gaps is None else gaps.cumsum().tolist()))
    return blocks


def _side_by_side(
    runtimes: Mapping[str, Runtime], prompts: Sequence[Sequence[int]], settings: Settings, limits: Sequence[int],
    progress: Progress,
) -> dict[str, list[Block]]:  # fmt: skip
    """Return the blocks of runtimes that step in turn. No clock runs before all have their first requests."""
    batch, blocks, turns = (
        runtimes[PLAIN].verifier.max_num_seqs,
        {method: list[Block]() for method in runtimes},
        Turns(),
    )
    clocks = {method: turns.of(runtime).seconds for method, runtime in runtimes.items()}
    try:
        for number, requests in enumerate(requests_of_blocks(len(prompts), batch)):
            progress(f"batch {batch}: block {number + 1} of {BLOCKS}")
            traffics = {
                method: Traffic(runtime, prompts, method, settings, limits, clocks[method])
                for method, runtime in runtimes.items()
            }
            first = number % len(traffics)
            try:
                with turns.held():
                    for method in [*runtimes][first:] + [*runtimes][:first]:
                        traffics[method].begin(requests, batch)
                for method, block in _finished(traffics).items():
                    blocks[method].append(block)
            except BaseException as error:
                for traffic in traffics.values():
                    traffic.stop(error)
                raise
    finally:
        turns.end()
    return blocks


def _finished(traffics: Mapping[str, Traffic]) -> dict[str, Block]:
    """Wait for the ends of blocks. Raises the first error, and leaves the others stopped."""
    with ThreadPoolExecutor(len(traffics)) as pool:
        ends = {method: pool.submit(traffic.finish) for method, traffic in traffics.items()}
        try:
            for end in wait(ends.values(), return_when=FIRST_EXCEPTION).done:
                end.result()
        except BaseException as error:
            for traffic in traffics.values():
                traffic.stop(error)
            raise
        return {method: end.result() for method, end in ends.items()}


def spread(most: int, count: int) -> list[int]:
    """Return so many lengths, from half of `most` to `most`, evenly spread wherever one begins to count."""
    return [ceil(most * (0.5 + 0.5 * (number * _GOLDEN % 1))) for number in range(count)]


def in_blocks(ways: Sequence[T], prompts: int, batch: int) -> Iterator[tuple[int, T, list[int]]]:
    """Yield each block's number, way and prompts, by index. The order of the ways rotates from block to block."""
    for number, requests in enumerate(requests_of_blocks(prompts, batch)):
        first = number % len(ways)
        for way in [*ways[first:], *ways[:first]]:
            yield number, way, requests


def requests_of_blocks(prompts: int, batch: int) -> list[list[int]]:
    """Return which of so many prompts each block has: all of them in turn, and in rounds if the blocks have more."""
    size = max(TURNS * batch, -(-prompts // BLOCKS))
    return [[(number * size + place) % prompts for place in range(size)] for number in range(BLOCKS)]


def summarise(blocks: Mapping[str, Sequence[Block]], batch: int, queued: bool = False) -> dict[str, Any]:
    """Return figures by method. queued: True for an open loop, to include the time in the queue."""
    plain = [one for block in blocks[PLAIN] for one in block.served]
    answers = {one.prompt: one.answer for one in reversed(plain)}  # the first of each prompt
    found = {method: _figures(own, blocks[PLAIN], answers) for method, own in blocks.items()}
    if queued:
        for method, own in blocks.items():
            found[method]["queue_ms"] = times_ms([wait for block in own for wait in waits(block.served, batch)])
    return found


def waits(served: Sequence[Served], batch: int) -> list[float]:
    """Return the seconds that each request waited for one of `batch` slots, first come first served.

    Request i gets the slot that is free after i - batch + 1 ends.
    """
    ends = sorted(one.ended for one in served)
    free = [*[0.0] * batch, *ends]
    return [max(at - one.submitted, 0.0) for one, at in zip(served, free, strict=False)]


def _figures(blocks: Sequence[Block], plain: Sequence[Block], answers: Mapping[int, tuple[int, ...]]) -> dict[str, Any]:
    served = [one for block in blocks for one in block.served]
    ratio = speedup([block.timing for block in plain], [block.timing for block in blocks])
    totals = Totals.of(one.generation for one in served if one.generation is not None)
    seconds = sum(block.timing.seconds for block in blocks)
    differing = sum(one.answer != answers[one.prompt] for one in served)
    return {
        "tokens_per_second": ratio.rate,
        "plain_tokens_per_second": ratio.base_rate,
        "speedup": ratio.ratio,
        "speedup_interval": ratio.interval,
        "time_to_first_token_ms": times_ms([one.outputs[0] - one.submitted for one in served]),
        "time_between_outputs_ms": times_ms([gap for one in served for gap in np.diff(one.outputs)]),
        "mean_acceptance_length": totals.tau,
        "draft_acceptance_rate": totals.acceptance,
        "num_steps": totals.steps,
        "num_draft_tokens": totals.drafted,
        "num_accepted_draft_tokens": totals.accepted,
        "overhead_fraction": 1 - sum(block.clock.engine for block in blocks) / seconds,
        "stage_ms": _stages(blocks),
        "identical_to_plain": not differing,
        "differing_outputs": differing,
        "looping_outputs": sum(loops(one.answer) for one in served),
        "outputs": len(served),
        "tokens": sum(block.timing.tokens for block in blocks),
        "seconds": seconds,
    }


def times_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    """Return the median and the 99th percentile in milliseconds; None without values."""
    if not seconds:
        return None
    p50, p99 = median_and_p99(seconds)
    return {"p50": p50 * 1e3, "p99": p99 * 1e3}


def _stages(blocks: Sequence[Block]) -> dict[str, float]:
    """Return milliseconds of all steps by stage. `host` is the rest of the steps, `between` all other wall time."""
    clocks = [vars(block.clock) for block in blocks]
    spent = {stage: sum(clock[stage] for clock in clocks) * 1e3 for stage in ("draft", "resample", "verify", "total")}
    total, wall = spent.pop("total"), sum(block.timing.seconds for block in blocks) * 1e3
    return {**spent, "host": total - sum(spent.values()), "between": wall - total}


def _spent(before: Clock, after: Clock) -> Clock:
    return Clock(**{stage: seconds - vars(before)[stage] for stage, seconds in vars(after).items()})


def table(batches: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[list[str]]:
    """Return a table of the figures by batch size and method, the header first. Latencies are medians / p99."""
    queued = any("queue_ms" in each for methods in batches.values() for each in methods.values())
    rows = [[*HEADER, QUEUE] if queued else [*HEADER]]
    for batch, methods in batches.items():
        rows += [[batch, method, *_cells(each)] for method, each in methods.items()]
    return rows


def _cells(figures: Mapping[str, Any]) -> list[str]:
    differing = figures["differing_outputs"]
    return [
        rate_text(figures["tokens_per_second"]),
        ratio_text(figures["tokens_per_second"], figures["plain_tokens_per_second"]),
        interval_text(figures["speedup_interval"]),
        latency_text(figures["time_to_first_token_ms"]),
        latency_text(figures["time_between_outputs_ms"]),
        f"{figures['mean_acceptance_length']:.2f}",
        f"{100 * figures['overhead_fraction']:.1f} %",
        f"NO, {differing} differ" if differing else "yes",
        *([latency_text(figures["queue_ms"])] if "queue_ms" in figures else []),
    ]


def latency_text(ms: Mapping[str, float] | None) -> str:
    """Return a median and a 99th percentile as a cell of a table, `-` for none."""
    return "-" if ms is None else f"{ms['p50']:.0f} / {ms['p99']:.0f}"
