"""Short runs that measure what `redraft.bench.advice` predicts from, and the check of a prediction."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import truediv
from statistics import fmean, median
from typing import Any

from redraft.bench.advice import AcceptanceCurve, Advice, StepMs, StepTimes, advise, best, draft_steps, step_times
from redraft.bench.compare import (
    PLAIN,
    Flips,
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
from redraft.bench.statistics import Speedup, Timing, speedup
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
DECODE_SECONDS, BATCH_SECONDS, CHOSEN_SECONDS = 20.0, 4.0, 30.0
"""Prompts, each batch, and each batch with chosen sizes alone are decoded for so long at least. A few rounds of a small
model give no sharp figure."""
CURVE_SECONDS = 1.0
"""Time to measure a curve of verifications."""
_UNTIMED_STEPS, _TIMED_STEPS, _STEPS_SECONDS = range(2, 10), range(4, 33), 0.15
"""Steps of a batch. In the first ones, drafters compute rows of prompts. How many are left out differs by turn, so that
turns time other parts of the texts. More than the least are timed if they fit."""

_TURNS = 24
"""Turns that even out a busy machine. A large batch has few in the time."""

Opened = Callable[[int], Runtime]
"""Opens the bundle for so many sequences at once. With one alone, a drafter computes the rows of a prompt before its
first step; without redraft's operators, that runtime has another graph too."""


def largest(limits: TreeLimits) -> Budget:
    """Return the largest trees that runs draft with a drafter of these limits."""
    return Budget(min(limits.nodes, MOST_NODES), limits.depth, limits.width)


def _sizes(most: int) -> list[int]:
    """Return the nodes of trees whose steps are timed."""
    return sorted({1, min(_MIDDLE_NODES, most), most})


@dataclass(frozen=True)
class _Work:
    """What is decoded, and how."""

    prompts: Sequence[BenchPrompt]
    settings: Settings
    progress: Progress

    def step_ms(
        self, runtime: Runtime, batch: int, how: Mapping[str, SpeculationParams], seconds: float
    ) -> dict[str, StepMs]:
        """Return the step of each way in a batch. One sequence decodes whole texts."""
        if batch > 1:
            some = [first_turn(runtime, one, self.settings) for one in _spread(self.prompts, batch)]
            return _batch_steps(runtime, some, self.settings.params, how, seconds, self.progress)
        runs = repeated(runtime, self.prompts, how, self.settings, ROUNDS, self.progress)
        return {way: _step_ms(totals_of(runs, way)) for way in how}


def acceptance(
    runtime: Runtime, prompts: Sequence[BenchPrompt], drafters: Mapping[str, TreeLimits], settings: Settings,
    progress: Progress,
) -> dict[str, AcceptanceCurve]:  # fmt: skip
    """Trace each drafter's largest trees on the prompts. Raises UsageError if no text is long enough for one."""
    ids = [run.token_ids for run in compare(runtime, prompts, (), settings, progress)]
    found = {}
    for drafter, limits in drafters.items():
        progress(f"tracing {drafter}")
        budget = largest(limits)
        how = SpeculationParams(drafter, budget=budget)
        lines = [trace(runtime, one, settings.params, how)[0] for one in ids]
        drafts = [*draft_steps(chain(*lines), settings.params.max_tokens, min(budget.depth, budget.nodes))]
        if not any(step.used == 0 and step.nodes for step in drafts):
            raise UsageError(
                f"no text is longer than the {budget.depth} levels of a tree of {drafter}",
                "raise --max-new-tokens, or give other prompts",
            )
        found[drafter] = AcceptanceCurve(drafts)
    return found


def measure(  # noqa: PLR0913 (how to decode, and what)
    opened: Opened, prompts: Sequence[BenchPrompt], drafters: Mapping[str, TreeLimits],
    accepted: Mapping[str, AcceptanceCurve], settings: Settings, batches: Collection[int], progress: Progress,
) -> dict[str, dict[int, Advice]]:  # fmt: skip
    """Decode the prompts plainly and by each drafter in batches, with a few sizes of trees. Return the best by batch.

    The steps of the size that seems best are timed again, longer: of many sizes with noisy times, the one that seems
    best is not so good.
    """
    trees = {drafter: largest(limits) for drafter, limits in drafters.items()}
    sizes = {drafter: _sizes(budget.nodes) for drafter, budget in trees.items()}
    how, most = _ways(trees, sizes), max(budget.nodes for budget in trees.values())
    work, found = _Work(prompts, settings, progress), {drafter: dict[int, Advice]() for drafter in trees}
    for batch in sorted({*batches}):
        with opened(batch) as runtime:
            steps = work.step_ms(runtime, batch, how, BATCH_SECONDS)
            progress(f"timing verifications of {batch} sequences")
            curve = _curve(runtime, batch, most)
            nodes = {
                drafter: best(each, _times(curve, steps, drafter, sizes[drafter]), batch, trees[drafter].nodes).nodes
                for drafter, each in accepted.items()
            }
            chosen = _ways(trees, {drafter: [size] for drafter, size in nodes.items()})
            again = work.step_ms(runtime, batch, chosen, CHOSEN_SECONDS)
        for drafter, size in nodes.items():
            found[drafter][batch] = advise(accepted[drafter], _times(curve, again, drafter, [size]), batch, size)
    return found


def _times(curve: CostCurve, steps: Mapping[str, StepMs], drafter: str, sizes: Sequence[int]) -> StepTimes:
    """Return the times of a drafter's steps with trees of these sizes, and of plain ones."""
    return step_times(curve, {0: steps[PLAIN], **{nodes: steps[_way(drafter, nodes)] for nodes in sizes}})


def _ways(trees: Mapping[str, Budget], sizes: Mapping[str, Collection[int]]) -> dict[str, SpeculationParams]:
    """Return plain decoding, and each drafter with trees of its sizes."""
    return {PLAIN: SpeculationParams(PLAIN)} | {
        _way(drafter, nodes): SpeculationParams(drafter, budget=replace(budget, nodes=nodes))
        for drafter, budget in trees.items()
        for nodes in sizes[drafter]
    }


def _spread(prompts: Sequence[BenchPrompt], batch: int) -> list[BenchPrompt]:
    """Return as many prompts as a batch has, evenly spread over all; some of them twice in a larger batch."""
    return [prompts[place * len(prompts) // batch] for place in range(batch)]


def _way(drafter: str, nodes: int) -> str:
    return f"{drafter}, {nodes} nodes"


def _step_ms(totals: Totals) -> StepMs:
    verify_ms, steps = totals.stage_ms["verify"], max(totals.steps, 1)
    return StepMs(verify_ms / steps, (sum(totals.stage_ms.values()) - verify_ms) / steps, totals.drafted / steps)


def repeated(
    runtime: Runtime, prompts: Sequence[BenchPrompt], how: Mapping[str, SpeculationParams], settings: Settings,
    rounds: int, progress: Progress,
) -> list[Run]:  # fmt: skip
    """Decode the prompts plainly and in each way, so many times and for DECODE_SECONDS at least."""
    runs: list[Run] = []
    began = time.perf_counter()
    while not runs or time.perf_counter() - began < DECODE_SECONDS:
        runs += compare(runtime, [*prompts] * rounds, list(how), replace(settings, ways=how), progress)
    return runs


def _batch_steps(
    runtime: Runtime, prompts: Sequence[Sequence[int]], params: SamplingParams, how: Mapping[str, SpeculationParams],
    seconds: float, progress: Progress,
) -> dict[str, StepMs]:  # fmt: skip
    """Return the step of each way over one batch of all prompts.

    The ways take turns, for so many seconds, and then until they had _TURNS, or for as long again.
    """
    turns: list[dict[str, StepMs]] = []
    flips, began = Flips(), time.perf_counter()
    while len(turns) < ROUNDS or time.perf_counter() - began < seconds * (1 if len(turns) >= _TURNS else 2):
        progress(f"timing steps of {len(prompts)} sequences, round {len(turns) + 1}")
        untimed = _UNTIMED_STEPS[3 * len(turns) % len(_UNTIMED_STEPS)]
        turns.append({way: _steps(runtime, prompts, params, how[way], untimed) for way in flips.order(None, [*how])})
    return typical(turns)


def typical(turns: Sequence[Mapping[str, StepMs]]) -> dict[str, StepMs]:
    """Return each way's step over all turns: the median of its ratios to the same turn's plain step, times the median
    of plain steps.

    A machine that other programs slow down for seconds slows all ways of a turn. On one such machine the ratio of two
    turns spread by 0.07, where each of them spread by 0.13.
    """
    plain = [turn[PLAIN].verify_ms + turn[PLAIN].aside_ms for turn in turns]

    def step(way: str) -> StepMs:
        steps = [turn[way] for turn in turns]
        parts = [each.verify_ms for each in steps], [each.aside_ms for each in steps]
        verify, aside = (median(plain) * median(map(truediv, part, plain)) for part in parts)
        return StepMs(verify, aside, fmean(each.drafted for each in steps))

    return {way: step(way) for way in turns[0]}


def _steps(
    runtime: Runtime, prompts: Sequence[Sequence[int]], params: SamplingParams, how: SpeculationParams, untimed: int
) -> StepMs:
    """Return the mean of steps in which all prompts are continued, without the first `untimed` ones.

    As many are timed, up to 32, as fit into _STEPS_SECONDS or into the time that the prompts took. A mean, since steps
    with resampled trees take less.
    """
    runtime.forget_prefixes()
    params = replace(params, max_tokens=runtime.max_model_len, ignore_eos=True)
    plain = runtime.requests(prompts[:1], [(params, SpeculationParams(PLAIN))])[0].speculation
    requests = runtime.requests(prompts, [(params, how)] * len(prompts))
    loop, clock = DecodeLoop(runtime.verifier, plain), runtime.verifier.clock
    began = time.perf_counter()
    for request in requests:
        loop.add(request)
    while not all(one.new_tokens or one.finish_reason for one in requests):
        loop.step()
    seconds = max(_STEPS_SECONDS, time.perf_counter() - began)
    found: list[StepMs] = []
    began = time.perf_counter()
    while len(found) < untimed + _TIMED_STEPS[-1] and not any(one.finish_reason for one in requests):
        if len(found) >= untimed + _TIMED_STEPS[0] and time.perf_counter() - began > seconds:
            break
        before, drafted = clock.copy(), sum(one.counters.drafted for one in requests)
        loop.step()
        verify_ms, all_ms = (clock.verify - before.verify) * 1e3, (clock.total - before.total) * 1e3
        nodes = (sum(one.counters.drafted for one in requests) - drafted) / len(requests)
        found.append(StepMs(verify_ms, all_ms - verify_ms, nodes))
    for request in requests:
        if error := request.error or request.drafting_error:
            raise error
    if len(found) <= untimed:
        raise UsageError("the prompts leave no space in the context for a batch's steps", "give shorter prompts")
    return StepMs(*map(fmean, zip(*found[untimed:], strict=True)))


def _curve(runtime: Runtime, batch: int, most: int) -> CostCurve:
    """Measure t of trees of up to `most` nodes. Rows of earlier requests are lost."""
    runtime.forget_prefixes()
    sizes = *(size for size in SIZES if size <= most), 1 + most
    return measure_curve(runtime.verifier, sizes, CURVE_SECONDS, batch)


def check(
    opened: Opened, prompts: Sequence[BenchPrompt], drafters: Mapping[str, TreeLimits],
    predicted: Mapping[str, Mapping[int, Advice]], settings: Settings, progress: Progress,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Decode the prompts plainly and with trees of the predicted sizes. Return both gains by drafter and batch.

    One sequence is timed as a whole. Texts and trees are the same in a batch, so its tokens a step are those of one
    sequence; its steps are timed as for the prediction, without those that compute a drafter's rows of the prompts.
    predicted: by drafter and batch.   Raises UsageError if every output is too short to time.
    """
    trees = {drafter: largest(limits) for drafter, limits in drafters.items()}
    batches = next(iter(predicted.values()))

    def ways(batches: Collection[int]) -> dict[str, SpeculationParams]:
        return _ways(trees, {drafter: {by_batch[b].nodes for b in batches} for drafter, by_batch in predicted.items()})

    texts: list[Run] = []
    if together := [batch for batch in batches if batch > 1]:
        with opened(1) as runtime:
            how = ways(together)
            texts = compare(runtime, prompts, list(how), replace(settings, ways=how), progress)
    work = _Work(prompts, settings, progress)
    found: dict[str, dict[str, Any]] = {drafter: {} for drafter in predicted}
    for batch in batches:
        how, runs, steps = ways([batch]), texts, dict[str, StepMs]()
        with opened(batch) as runtime:
            if batch == 1:
                runs = repeated(runtime, prompts, how, settings, CHECK_ROUNDS, progress)
            else:
                steps = work.step_ms(runtime, batch, how, CHOSEN_SECONDS)
        timed = [run for run in runs if run.timed]
        if not timed:
            raise UsageError("every output is too short to time", "raise --max-new-tokens, or give other prompts")
        for drafter, by_batch in predicted.items():
            advice = by_batch[batch]
            way = _way(drafter, advice.nodes)
            speed = in_batches(timed, way, steps) if steps else times_as_fast(timed, [way])
            found[drafter][str(batch)] = {
                "nodes": advice.nodes,
                "predicted": advice.gain,
                "measured": speed.ratio,
                "measured_interval": speed.interval,
                "difference": advice.gain / speed.ratio - 1,
                "tokens_predicted": advice.tokens,
                "tokens_measured": totals_of(timed, way).tau,
            }
    return found


def in_batches(runs: Sequence[Run], drafted: str, steps: Mapping[str, StepMs]) -> Speedup:
    """Return the speed over plain decoding that texts have if their steps take the times of a batch's.

    The interval is over prompts: it has no noise of the times.
    """

    def timings(way: str) -> list[Timing]:
        ms = steps[way].verify_ms + steps[way].aside_ms
        totals = [Totals.of([run.generations[way]]) for run in runs]
        return [Timing(one.tokens, one.steps * ms / 1e3) for one in totals]

    return speedup(timings(PLAIN), timings(drafted), [run.prompt for run in runs])
