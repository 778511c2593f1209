"""Short runs that measure what `redraft.bench.advice` predicts from, and the check of a prediction."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, cycle, islice
from statistics import fmean, median
from typing import Any, NamedTuple

from redraft.bench.advice import AcceptanceCurve, Advice, StepMs, StepTimes, best, draft_steps, step_times
from redraft.bench.compare import (
    PLAIN,
    Progress,
    Run,
    Settings,
    Totals,
    compare,
    first_turn,
    times_as_fast,
    totals_of,
    trace,
)
from redraft.bench.prompts import BenchPrompt
from redraft.bench.statistics import FEWEST_VALUES, Speedup, Timing, speedup
from redraft.errors import UsageError
from redraft.methods.base import TreeLimits
from redraft.runtime import Budget, Runtime, SamplingParams, SpeculationParams
from redraft.runtime.controllers.cost import CostCurve
from redraft.runtime.loop.decode_loop import DecodeLoop
from redraft.runtime.steps.measurements import SIZES, measure_curve

MOST_NODES = 16
"""Nodes of the largest trees that runs draft."""
_MIDDLE_NODES = 4
ROUNDS, CHECK_ROUNDS = 2, 3
"""Times that each prompt is decoded at least, to predict and to check a prediction."""
DECODE_SECONDS, BATCH_SECONDS = 20.0, 4.0
"""Prompts, and each batch, are decoded for so long at least. A few rounds of a small model give no sharp figure."""
CURVE_SECONDS = 1.0
"""Time to measure a curve of verifications."""
_UNTIMED_STEPS, _TIMED_STEPS, _STEPS_SECONDS = 2, range(4, 33), 0.4
"""Steps of a batch. In the first ones, drafters compute rows of prompts. More than the least are timed if they fit."""


@dataclass(frozen=True)
class Measured:
    """Acceptance of a method, and the times of its steps.   most: nodes of its trees."""

    curve: AcceptanceCurve
    times: StepTimes
    most: int

    def best(self, batch: int) -> Advice:
        """Return the prediction of the best size for a batch."""
        return best(self.curve, self.times, batch, self.most)


def largest(limits: TreeLimits) -> Budget:
    """Return the largest trees that runs draft with a drafter of these limits."""
    return Budget(min(limits.nodes, MOST_NODES), limits.depth, limits.width)


def _sizes(most: int) -> list[int]:
    """Return the nodes of trees whose steps are timed."""
    return sorted({1, min(_MIDDLE_NODES, most), most})


def measure(
    runtime: Runtime, prompts: Sequence[BenchPrompt], drafters: Mapping[str, TreeLimits], settings: Settings,
    batches: Collection[int], progress: Progress,
) -> dict[str, Measured]:  # fmt: skip
    """Decode the prompts plainly and by each drafter, alone and in batches, with a few sizes of trees.

    Raises UsageError if no text is long enough for a whole tree.
    """
    trees = {drafter: largest(limits) for drafter, limits in drafters.items()}
    how = {PLAIN: SpeculationParams(PLAIN)} | {
        _way(drafter, nodes): SpeculationParams(drafter, budget=replace(budget, nodes=nodes))
        for drafter, budget in trees.items()
        for nodes in _sizes(budget.nodes)
    }
    runs = _repeated(runtime, prompts, how, settings, progress)
    steps = {1: {way: _step_ms(totals_of(runs, way)) for way in how}}
    ids = [run.token_ids for run in runs[: len(prompts)]]
    for batch in sorted({*batches} - {1}):
        steps[batch] = _batch_steps(runtime, list(islice(cycle(ids), batch)), settings.params, how, progress)
    curves = _curves(runtime, steps, progress)
    found = {}
    for drafter, budget in trees.items():
        progress(f"tracing {drafter}")
        whole_trees = how[_way(drafter, budget.nodes)]
        lines = [trace(runtime, one, settings.params, whole_trees)[0] for one in ids]
        drafts = [*draft_steps(chain(*lines), settings.params.max_tokens, min(budget.depth, budget.nodes))]
        if not any(step.used == 0 and step.nodes for step in drafts):
            raise UsageError(
                f"no text is longer than the {budget.depth} levels of a tree of {drafter}",
                "raise --max-new-tokens, or give other prompts",
            )
        times = {
            batch: {0: each[PLAIN], **{nodes: each[_way(drafter, nodes)] for nodes in _sizes(budget.nodes)}}
            for batch, each in steps.items()
        }
        found[drafter] = Measured(AcceptanceCurve(drafts), step_times(curves, times), budget.nodes)
    return found


def _way(drafter: str, nodes: int) -> str:
    return f"{drafter}, {nodes} nodes"


def _step_ms(totals: Totals) -> StepMs:
    verify_ms, steps = totals.stage_ms["verify"], max(totals.steps, 1)
    return StepMs(verify_ms / steps, (sum(totals.stage_ms.values()) - verify_ms) / steps, totals.drafted / steps)


def _repeated(
    runtime: Runtime, prompts: Sequence[BenchPrompt], how: Mapping[str, SpeculationParams], settings: Settings,
    progress: Progress, rounds: int = 0,
) -> list[Run]:  # fmt: skip
    """Decode the prompts plainly and in each way, at least ROUNDS or so many times and for DECODE_SECONDS."""
    runs: list[Run] = []
    again = [*prompts] * (rounds or ROUNDS)
    began = time.perf_counter()
    while not runs or time.perf_counter() - began < DECODE_SECONDS:
        runs += compare(runtime, again, list(how), replace(settings, ways=how), progress)
    return runs


class _Step(NamedTuple):
    """A step of a batch.   nodes: drafted ones a sequence.   tokens: committed ones, of all sequences."""

    verify_ms: float
    aside_ms: float
    nodes: float
    tokens: int


def _batch_steps(
    runtime: Runtime, prompts: Sequence[Sequence[int]], params: SamplingParams, how: Mapping[str, SpeculationParams],
    progress: Progress,
) -> dict[str, StepMs]:  # fmt: skip
    """Return the step of each way over one batch of all prompts. The ways take turns.

    The time of its verification is the median, since other programs interrupt some calls. The rest is a mean: steps
    with resampled trees take less. Raises UsageError if a prompt leaves no space for the steps.
    """
    unending = replace(params, max_tokens=runtime.max_model_len, ignore_eos=True)
    rounds: dict[str, list[_Step]] = {way: [] for way in how}
    for way, each in _in_rounds(how, len(prompts), ROUNDS, progress):
        found, ms = [], 0.0
        for step in _steps(runtime, prompts, unending, each):
            found.append(step)
            ms += (step.verify_ms + step.aside_ms) if len(found) > _UNTIMED_STEPS else 0.0
            timed = len(found) - _UNTIMED_STEPS
            if timed >= _TIMED_STEPS[-1] or (timed >= _TIMED_STEPS[0] and ms > 1e3 * _STEPS_SECONDS):
                break
        if len(found) <= _UNTIMED_STEPS:
            raise UsageError("the prompts leave no space in the context for a batch's steps", "give shorter prompts")
        rounds[way] += found[_UNTIMED_STEPS:]
    columns = {way: [*zip(*steps, strict=True)] for way, steps in rounds.items()}
    return {way: StepMs(median(ms), fmean(rest), fmean(drafted)) for way, (ms, rest, drafted, _) in columns.items()}


def _in_rounds(
    how: Mapping[str, SpeculationParams], batch: int, rounds: int, progress: Progress
) -> Iterator[tuple[str, SpeculationParams]]:
    """Yield the ways in turn, so many times at least and for BATCH_SECONDS."""
    began, number = time.perf_counter(), 0
    while number < rounds or time.perf_counter() - began < BATCH_SECONDS:
        number += 1
        progress(f"timing steps of {batch} sequences, round {number}")
        yield from how.items()


def _steps(
    runtime: Runtime, prompts: Sequence[Sequence[int]], params: SamplingParams, how: SpeculationParams
) -> Iterator[_Step]:
    """Yield the steps in which all prompts are continued, until one ends."""
    runtime.forget_prefixes()
    plain = runtime.requests(prompts[:1], [(params, SpeculationParams(PLAIN))])[0].speculation
    requests = runtime.requests(prompts, [(params, how)] * len(prompts))
    loop, clock = DecodeLoop(runtime.verifier, plain), runtime.verifier.clock
    for request in requests:
        loop.add(request)
    while not all(one.new_tokens or one.finish_reason for one in requests):
        loop.step()
    while not any(one.finish_reason for one in requests):
        before, drafted = clock.copy(), sum(one.counters.drafted for one in requests)
        written = sum(len(one.new_tokens) for one in requests)
        loop.step()
        verify_ms, all_ms = (clock.verify - before.verify) * 1e3, (clock.total - before.total) * 1e3
        nodes = (sum(one.counters.drafted for one in requests) - drafted) / len(requests)
        tokens = sum(len(one.new_tokens) for one in requests) - written
        yield _Step(verify_ms, all_ms - verify_ms, nodes, tokens)
    for request in requests:
        if request.error is not None:
            raise request.error


def _curves(runtime: Runtime, batches: Collection[int], progress: Progress) -> dict[int, CostCurve]:
    """Measure t for each batch. Rows of earlier requests are lost."""
    sizes = tuple(size for size in SIZES if size <= 1 + MOST_NODES)
    runtime.forget_prefixes()
    found = {}
    for batch in batches:
        progress(f"timing verifications of {batch} sequences")
        found[batch] = measure_curve(runtime.verifier, sizes, CURVE_SECONDS, batch)
    return found


def check(
    runtime: Runtime, prompts: Sequence[BenchPrompt], drafters: Mapping[str, TreeLimits],
    predicted: Mapping[str, Mapping[int, Advice]], settings: Settings, progress: Progress,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Decode the prompts plainly and with trees of the predicted sizes, in turn. Return both gains by drafter, batch.

    predicted: by drafter and batch.   Raises UsageError if every output is too short to time.
    """
    batches = next(iter(predicted.values()))
    found: dict[str, dict[str, Any]] = {drafter: {} for drafter in predicted}
    for batch in batches:
        ways = {
            drafter: SpeculationParams(drafter, budget=replace(largest(drafters[drafter]), nodes=by_batch[batch].nodes))
            for drafter, by_batch in predicted.items()
        }
        gains = _gains if batch == 1 else partial(_batch_gains, batch=batch)
        for drafter, (speed, tokens) in gains(runtime, prompts, ways, settings, progress).items():
            advice = predicted[drafter][batch]
            found[drafter][str(batch)] = {
                "nodes": advice.nodes,
                "predicted": advice.gain,
                "measured": speed.ratio,
                "measured_interval": speed.interval,
                "difference": advice.gain / speed.ratio - 1,
                "tokens_predicted": advice.tokens,
                "tokens_measured": tokens,
            }
    return found


_TOO_SHORT = UsageError("every output is too short to time", "raise --max-new-tokens, or give other prompts")
Gains = dict[str, tuple[Speedup, float]]
"""Speed over plain decoding, and tokens of a sequence in a step, by way."""


def _gains(
    runtime: Runtime, prompts: Sequence[BenchPrompt], ways: Mapping[str, SpeculationParams], settings: Settings,
    progress: Progress,
) -> Gains:  # fmt: skip
    """Return the gains of one sequence, over whole answers."""
    runs = [run for run in _repeated(runtime, prompts, ways, settings, progress, CHECK_ROUNDS) if run.timed]
    if not runs:
        raise _TOO_SHORT
    return {way: (times_as_fast(runs, [way]), totals_of(runs, way).tau) for way in ways}


def _batch_gains(
    runtime: Runtime, prompts: Sequence[BenchPrompt], ways: Mapping[str, SpeculationParams], settings: Settings,
    progress: Progress, batch: int,
) -> Gains:  # fmt: skip
    """Return the gains of a batch of all prompts, over the steps before one of its answers ends."""
    ids = list(islice(cycle(first_turn(runtime, prompt, settings) for prompt in prompts), batch))
    how = {PLAIN: SpeculationParams(PLAIN), **ways}
    timings: dict[str, list[Timing]] = {way: [] for way in how}
    tokens: dict[str, list[int]] = {way: [] for way in how}
    for way, each in _in_rounds(how, batch, FEWEST_VALUES, progress):
        steps = [*_steps(runtime, ids, settings.params, each)][_UNTIMED_STEPS:]
        if not steps:
            raise _TOO_SHORT
        tokens[way] += [step.tokens for step in steps]
        seconds = sum(step.verify_ms + step.aside_ms for step in steps) / 1e3
        timings[way].append(Timing(sum(step.tokens for step in steps), seconds))
    return {way: (speedup(timings[PLAIN], timings[way]), fmean(tokens[way]) / batch) for way in ways}
