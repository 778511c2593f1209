"""Short runs that measure what `redraft.bench.advice` predicts from, and the check of a prediction."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
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
DECODE_SECONDS, BATCH_SECONDS, CHOSEN_SECONDS = 20.0, 4.0, 10.0
"""Prompts, each batch, and each batch with chosen sizes alone are decoded for so long at least. A few rounds of a small
model give no sharp figure."""
CURVE_SECONDS = 1.0
"""Time to measure a curve of verifications."""
_UNTIMED_STEPS, _TIMED_STEPS, _STEPS_SECONDS = range(2, 10), range(4, 33), 0.15
"""Steps of a batch. In the first ones, drafters compute rows of prompts. How many are left out differs by turn, so that
turns time other parts of the texts. More than the least are timed if they fit."""


@dataclass(frozen=True)
class Measured:
    """Acceptance of a method, and the prediction for its best trees by batch."""

    curve: AcceptanceCurve
    best: Mapping[int, Advice]


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

    The steps of the size that seems best are timed again, longer: of many sizes with noisy times, the one that seems
    best is not so good. Raises UsageError if no text is long enough for a whole tree.
    """
    trees = {drafter: largest(limits) for drafter, limits in drafters.items()}
    sizes = {drafter: _sizes(budget.nodes) for drafter, budget in trees.items()}
    how = _ways(trees, sizes)
    runs = repeated(runtime, prompts, how, settings, ROUNDS, progress)
    ids = [run.token_ids for run in runs[: len(prompts)]]

    def timed(batch: int, how: Mapping[str, SpeculationParams], seconds: float) -> dict[str, StepMs]:
        return _batch_steps(runtime, _spread(ids, batch), settings.params, how, seconds, progress)

    alone = {way: _step_ms(totals_of(runs, way)) for way in how}
    steps = {batch: alone if batch == 1 else timed(batch, how, BATCH_SECONDS) for batch in sorted({*batches})}
    curves = _curves(runtime, steps, progress)
    accepted = {}
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
        accepted[drafter] = AcceptanceCurve(drafts)
    found: dict[str, dict[int, Advice]] = {drafter: {} for drafter in trees}
    for batch in steps:
        nodes = {
            drafter: best(curve, _times(curves, steps, drafter, sizes[drafter]), batch, trees[drafter].nodes).nodes
            for drafter, curve in accepted.items()
        }
        chosen = _ways(trees, {drafter: [most] for drafter, most in nodes.items()})
        if batch == 1:
            runs = repeated(runtime, prompts, chosen, settings, ROUNDS, progress)
            again = {way: _step_ms(totals_of(runs, way)) for way in chosen}
        else:
            again = timed(batch, chosen, CHOSEN_SECONDS)
        for drafter, most in nodes.items():
            times = _times(curves, {batch: again}, drafter, [most])
            found[drafter][batch] = advise(accepted[drafter], times, batch, most)
    return {drafter: Measured(curve, found[drafter]) for drafter, curve in accepted.items()}


def _times(
    curves: Mapping[int, CostCurve], steps: Mapping[int, Mapping[str, StepMs]], drafter: str, sizes: Sequence[int]
) -> StepTimes:
    """Return the times of a drafter's steps with trees of these sizes, and of plain ones."""
    return step_times(
        curves,
        {
            batch: {0: each[PLAIN], **{nodes: each[_way(drafter, nodes)] for nodes in sizes}}
            for batch, each in steps.items()
        },
    )


def _ways(trees: Mapping[str, Budget], sizes: Mapping[str, Collection[int]]) -> dict[str, SpeculationParams]:
    """Return plain decoding, and each drafter with trees of its sizes."""
    return {PLAIN: SpeculationParams(PLAIN)} | {
        _way(drafter, nodes): SpeculationParams(drafter, budget=replace(budget, nodes=nodes))
        for drafter, budget in trees.items()
        for nodes in sizes[drafter]
    }


def _spread(prompts: Sequence[Sequence[int]], batch: int) -> list[Sequence[int]]:
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
    """Return the step of each way over one batch of all prompts. The ways take turns, for so many seconds at least.

    The time of its verification is the median, since other programs interrupt some calls. The rest is a mean: steps
    with resampled trees take less.
    """
    rounds: dict[str, list[StepMs]] = {way: [] for way in how}
    flips, began, number = Flips(), time.perf_counter(), 0
    while number < ROUNDS or time.perf_counter() - began < seconds:
        number += 1
        progress(f"timing steps of {len(prompts)} sequences, round {number}")
        for way in flips.order(None, [*how]):
            untimed = _UNTIMED_STEPS[3 * (number - 1) % len(_UNTIMED_STEPS)]
            rounds[way] += _steps(runtime, prompts, params, how[way], untimed)
    columns = {way: [*zip(*steps, strict=True)] for way, steps in rounds.items()}
    return {way: StepMs(median(ms), fmean(rest), fmean(drafted)) for way, (ms, rest, drafted) in columns.items()}


def _steps(
    runtime: Runtime, prompts: Sequence[Sequence[int]], params: SamplingParams, how: SpeculationParams, untimed: int
) -> list[StepMs]:
    """Return steps in which all prompts are continued, without the first `untimed` ones."""
    runtime.forget_prefixes()
    params = replace(params, max_tokens=runtime.max_model_len, ignore_eos=True)
    plain = runtime.requests(prompts[:1], [(params, SpeculationParams(PLAIN))])[0].speculation
    requests = runtime.requests(prompts, [(params, how)] * len(prompts))
    loop, clock = DecodeLoop(runtime.verifier, plain), runtime.verifier.clock
    for request in requests:
        loop.add(request)
    while not all(one.new_tokens or one.finish_reason for one in requests):
        loop.step()
    found: list[StepMs] = []
    began = clock.total
    while len(found) < untimed + _TIMED_STEPS[-1] and not any(one.finish_reason for one in requests):
        if len(found) >= untimed + _TIMED_STEPS[0] and clock.total - began > _STEPS_SECONDS:
            break
        before, drafted = clock.copy(), sum(one.counters.drafted for one in requests)
        loop.step()
        verify_ms, all_ms = (clock.verify - before.verify) * 1e3, (clock.total - before.total) * 1e3
        nodes = (sum(one.counters.drafted for one in requests) - drafted) / len(requests)
        found.append(StepMs(verify_ms, all_ms - verify_ms, nodes))
    for request in requests:
        if request.error is not None:
            raise request.error
    if len(found) <= untimed:
        raise UsageError("the prompts leave no space in the context for a batch's steps", "give shorter prompts")
    return found[untimed:]


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
    """Decode the prompts plainly and with trees of the predicted sizes. Return both gains by drafter and batch.

    One sequence is timed as a whole. Texts and trees are the same in a batch, so its tokens a step are those of one
    sequence; its steps are timed as for the prediction, without those that compute a drafter's rows of the prompts.
    predicted: by drafter and batch.   Raises UsageError if every output is too short to time.
    """

    trees = {drafter: largest(limits) for drafter, limits in drafters.items()}
    batches = next(iter(predicted.values()))

    def ways(batches: Collection[int]) -> dict[str, SpeculationParams]:
        return _ways(trees, {drafter: {by_batch[b].nodes for b in batches} for drafter, by_batch in predicted.items()})

    found: dict[str, dict[str, Any]] = {drafter: {} for drafter in predicted}
    together = [batch for batch in batches if batch > 1]
    how = ways(together)
    texts = compare(runtime, prompts, list(how), replace(settings, ways=how), progress) if together else []
    for batch in batches:
        how, steps = ways([batch]), dict[str, StepMs]()
        if batch == 1:
            runs = repeated(runtime, prompts, how, settings, CHECK_ROUNDS, progress)
        else:
            runs, ids = texts, _spread([run.token_ids for run in texts], batch)
            steps = _batch_steps(runtime, ids, settings.params, how, CHOSEN_SECONDS, progress)
        runs = [run for run in runs if run.timed]
        if not runs:
            raise UsageError("every output is too short to time", "raise --max-new-tokens, or give other prompts")
        for drafter, by_batch in predicted.items():
            advice = by_batch[batch]
            way = _way(drafter, advice.nodes)
            speed = in_batches(runs, way, steps) if steps else times_as_fast(runs, [way])
            found[drafter][str(batch)] = {
                "nodes": advice.nodes,
                "predicted": advice.gain,
                "measured": speed.ratio,
                "measured_interval": speed.interval,
                "difference": advice.gain / speed.ratio - 1,
                "tokens_predicted": advice.tokens,
                "tokens_measured": totals_of(runs, way).tau,
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
