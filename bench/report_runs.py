"""Statistics of the runs of a report: speed and tokens a step by kind, with intervals, and methods against each other.

Speeds and τ by method and kind are those of GRIFFIN's table 1. Intervals are SciPy's percentile bootstrap over prompts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from redraft.bench.compare import PLAIN, Run, timing
from redraft.bench.prompts import ALL, Prompt
from redraft.bench.statistics import CONFIDENCE, FEWEST_VALUES, RESAMPLES, Speedup, Timing, speedup
from redraft.bench.summary import FEWEST_TOKENS

STAGES = ("draft", "resample", "verify", "host")
"""Stages of a step in `Metrics.stage_ms`; `host` is the rest."""
Interval = tuple[float, float] | None


def interval(statistic: Callable[..., Any], *columns: ArrayLike) -> Interval:
    """Return the 95 % percentile bootstrap interval of a statistic of paired columns; None for under 6 values.

    statistic: takes the columns and an axis.
    """
    from scipy import stats

    values = [np.asarray(column, float) for column in columns]
    if len(values[0]) < FEWEST_VALUES:
        return None
    found = stats.bootstrap(
        values, statistic, paired=True, vectorized=True,
        n_resamples=RESAMPLES, confidence_level=CONFIDENCE, method="percentile", rng=np.random.default_rng(0),
    )  # fmt: skip
    low, high = map(float, found.confidence_interval)
    return low, high


@dataclass(frozen=True)
class _Sums:
    """Of one prompt and method: steps, accepted drafted tokens, and the timed tokens with their seconds."""

    steps: int
    accepted: int
    timing: Timing


def _sums(runs: Sequence[Run], methods: Sequence[str]) -> dict[str, list[_Sums]]:
    """Return the sums of every prompt whose outputs do not loop and are long enough to time, by method.

    Turns of a conversation depend on each other, so they make one value.
    """
    by_prompt: dict[Prompt, list[Run]] = defaultdict(list)
    for run in runs:
        if not run.loops and min(len(g.token_ids) for g in run.generations.values()) >= FEWEST_TOKENS:
            by_prompt[run.prompt].append(run)
    found: dict[str, list[_Sums]] = {}
    for name in methods:
        found[name] = []
        for turns in by_prompt.values():
            metrics = [run.generations[name].metrics for run in turns]
            timings = [timing(run.generations[name]) for run in turns]
            whole = Timing(sum(one.tokens for one in timings), sum(one.seconds for one in timings))
            steps, accepted = sum(m.num_steps for m in metrics), sum(m.num_accepted_draft_tokens for m in metrics)
            found[name].append(_Sums(steps, accepted, whole))
    return found


def by_kind(runs: Sequence[Run]) -> dict[str, Sequence[Run]]:
    """Return all runs, and those of each kind of prompt."""
    kinds = sorted({run.prompt.kind for run in runs})
    return {ALL: runs, **{kind: [run for run in runs if run.prompt.kind == kind] for kind in kinds}}


def speeds(runs: Sequence[Run], method: str) -> dict[str, Any]:
    """Return speed over plain decoding (`speedup`) with its interval over prompts, by kind and over all."""
    found = {}
    for kind, some in by_kind(runs).items():
        sums = _sums(some, [PLAIN, method])
        if sums[PLAIN]:
            ratio = _ratio(sums[PLAIN], sums[method])
            found[kind] = {"speed": ratio.ratio, "interval": ratio.interval, "prompts": ratio.count}
    return found


def _ratio(base: Sequence[_Sums], other: Sequence[_Sums]) -> Speedup:
    return speedup([one.timing for one in base], [one.timing for one in other])


def _tau(accepted: Any, steps: Any, axis: int = -1) -> Any:
    return 1 + accepted.sum(axis) / steps.sum(axis)


def _columns(sums: Sequence[_Sums]) -> tuple[list[float], list[float]]:
    return [float(one.accepted) for one in sums], [float(one.steps) for one in sums]


def tokens_a_step(runs: Sequence[Run], method: str) -> dict[str, Any]:
    """Return τ with its interval, by kind and over all: the tokens of a step, the verifier's own included."""
    found = {}
    for kind, some in by_kind(runs).items():
        accepted, steps = _columns(_sums(some, [method])[method])
        if accepted:
            tau = float(_tau(np.array(accepted), np.array(steps)))
            found[kind] = {"tau": tau, "interval": interval(_tau, accepted, steps), "prompts": len(accepted)}
    return found


def pairs(runs: Sequence[Run], methods: Sequence[str]) -> list[dict[str, Any]]:
    """Return, for every two methods, the difference of τ and the ratio of speeds, with intervals over prompts.

    `separate` is True if the interval of the difference of τ does not hold 0.
    """
    sums, found = _sums(runs, methods), []

    def difference(*sums: Any, axis: int = -1) -> Any:
        accepted, steps, of_accepted, of_steps = sums
        return _tau(accepted, steps, axis) - _tau(of_accepted, of_steps, axis)

    for first, second in combinations(methods, 2):
        columns = [np.array(column) for name in (second, first) for column in _columns(sums[name])]
        if not columns[0].size:
            continue
        ratio, tau = _ratio(sums[first], sums[second]), interval(difference, *columns)
        found.append({
            "method": second, "than": first, "tau": float(difference(*columns)), "tau_interval": tau,
            "speed": ratio.ratio, "speed_interval": ratio.interval,
            "separate": tau is not None and not tau[0] <= 0 <= tau[1],
        })  # fmt: skip
    return found


def against(runs: Sequence[Run], methods: Sequence[str], baseline: str) -> dict[str, Any]:
    """Return τ of every method, and its speed over the baseline's, by method and kind (SD², tables 1 and 3).

    baseline: the method that the others are compared with; its own speed is 1.
    `tau` is the mean number of tokens a step over all prompts. `speed` is the tables' α, a
    `speedup`. Both have their intervals over prompts.
    """
    found: dict[str, Any] = {name: {} for name in methods}
    for kind, some in by_kind(runs).items():
        sums = _sums(some, list(dict.fromkeys((*methods, baseline))))
        for name in methods if sums[baseline] else ():
            ratio = _ratio(sums[baseline], sums[name])
            accepted, steps = _columns(sums[name])
            found[name][kind] = {
                "tau": float(_tau(np.array(accepted), np.array(steps))), "interval": interval(_tau, accepted, steps),
                "speed": ratio.ratio, "speed_interval": ratio.interval,
            }  # fmt: skip
    return found


def stages(runs: Sequence[Run], methods: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the mean milliseconds of a verification step by method and stage: draft, resample, verify, and the rest.

    Plain decoding is among the methods. It is how Lyanna's Figure 13b splits a draft's time, for whole steps.
    """
    found = {}
    for name in (PLAIN, *methods):
        metrics = [run.generations[name].metrics for run in runs]
        steps = max(sum(one.num_steps for one in metrics), 1)
        found[name] = {stage: sum(one.stage_ms[stage] for one in metrics) / steps for stage in STAGES}
    return found
