"""Statistics of the runs of a report: speed and tokens a step by kind, with intervals, and methods against each other.

Speeds and τ by method and kind are those of GRIFFIN's table 1. Intervals are SciPy's percentile bootstrap over prompts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from redraft.bench.compare import PLAIN, Run
from redraft.bench.prompts import ALL, Prompt
from redraft.bench.statistics import CONFIDENCE, FEWEST_VALUES, RESAMPLES
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
    """Of one prompt and method: steps, accepted drafted tokens, timed tokens, and seconds of decoding them."""

    steps: int
    accepted: int
    tokens: int
    seconds: float

    @property
    def token_seconds(self) -> float:
        """Seconds a token."""
        return self.seconds / self.tokens


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
            tokens = [len(run.generations[name].token_ids) - 1 for run in turns]
            seconds = sum(n / m.decode_tokens_per_second for n, m in zip(tokens, metrics, strict=True))
            steps, accepted = sum(m.num_steps for m in metrics), sum(m.num_accepted_draft_tokens for m in metrics)
            found[name].append(_Sums(steps, accepted, sum(tokens), seconds))
    return found


def by_kind(runs: Sequence[Run]) -> dict[str, Sequence[Run]]:
    """Return all runs, and those of each kind of prompt."""
    kinds = sorted({run.prompt.kind for run in runs})
    return {ALL: runs, **{kind: [run for run in runs if run.prompt.kind == kind] for kind in kinds}}


def speeds(runs: Sequence[Run], method: str) -> dict[str, Any]:
    """Return the median over prompts of speed over plain decoding, with its interval, by kind and over all."""
    found = {}
    for kind, some in by_kind(runs).items():
        sums = _sums(some, [PLAIN, method])
        ratios = [a.token_seconds / b.token_seconds for a, b in zip(sums[PLAIN], sums[method], strict=True)]
        if ratios:
            found[kind] = {"speed": median(ratios), "interval": interval(np.median, ratios), "prompts": len(ratios)}
    return found


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
    """Return, for every two methods, the difference of τ and the median ratio of speeds over prompts, with intervals.

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
        ratios = [a.token_seconds / b.token_seconds for a, b in zip(sums[first], sums[second], strict=True)]
        tau = interval(difference, *columns)
        found.append({
            "method": second, "than": first, "tau": float(difference(*columns)), "tau_interval": tau,
            "speed": median(ratios), "speed_interval": interval(np.median, ratios),
            "separate": tau is not None and not tau[0] <= 0 <= tau[1],
        })  # fmt: skip
    return found


def against(runs: Sequence[Run], methods: Sequence[str], baseline: str) -> dict[str, Any]:
    """Return τ of every method, and its speed over the baseline's, by method and kind (SD², tables 1 and 3).

    baseline: the method that the others are compared with; its own speed is 1.
    `tau` is the mean number of tokens a step over all prompts. `speed` is the median over prompts of the ratio of the
    time a token, without a unit, the tables' α. Both have their intervals over prompts.
    """
    found: dict[str, Any] = {name: {} for name in methods}
    for kind, some in by_kind(runs).items():
        sums = _sums(some, list(dict.fromkeys((*methods, baseline))))
        for name in methods if sums[baseline] else ():
            pair = zip(sums[baseline], sums[name], strict=True)
            ratios = [base.token_seconds / own.token_seconds for base, own in pair]
            accepted, steps = _columns(sums[name])
            found[name][kind] = {
                "tau": float(_tau(np.array(accepted), np.array(steps))), "interval": interval(_tau, accepted, steps),
                "speed": median(ratios), "speed_interval": interval(np.median, ratios),
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
