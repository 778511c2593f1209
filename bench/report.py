"""Figures of a report: methods that draft, on one verifier, as the papers of drafters compare them.

Speeds and τ by method and kind are those of GRIFFIN's table 1, those over a baseline SD²'s tables 1 and 3. Intervals
are percentile bootstraps over prompts. `report_traces` has the figures of traces, `report_costs` costs and sizes, and
`report_inputs` what other commands measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from redraft.bench.compare import PLAIN, STAGES, Progress, Run, Settings, Totals, compare
from redraft.bench.prompts import ALL, BenchPrompt
from redraft.bench.report_costs import costs, drafter_sizes
from redraft.bench.report_traces import by_position, depths, estimates, traced
from redraft.bench.statistics import Speedup, bootstrap, speedup
from redraft.bench.summary import margin_finder, summarise
from redraft.engines import Bundle
from redraft.errors import UsageError
from redraft.runtime import Runtime

TEMPERATURES = (0.0, 1.0)
Sums = NDArray[np.float64]


def check_report() -> None:
    """Raise UsageError if the libraries of a report are missing."""
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
        import scipy  # noqa: F401
    except ImportError as error:
        raise UsageError(f"a report needs {error.name}", "install redraft[bench]") from None


@dataclass(frozen=True)
class Study:
    """Everything that a report measures.

    settings: its temperature is replaced by each of TEMPERATURES.
    methods:  all but plain decoding.
    chains:   engines of the same model whose drafters draft chains, for the figures by depth; None takes `runtime`.
    baseline: the drafter that others are compared with; None for no such table.
    """

    runtime: Runtime
    bundle: Bundle
    prompts: Sequence[BenchPrompt]
    methods: Sequence[str]
    settings: Settings
    chains: Runtime | None = None
    baseline: str | None = None

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Return the figures. Raises UsageError for a baseline that is not measured."""
        methods, baseline = list(self.methods), self.baseline
        if baseline is not None and baseline not in methods:
            raise UsageError(f"--baseline {baseline!r} is not among the methods", f"one of {', '.join(methods)}")
        temperatures = {}
        for temperature in TEMPERATURES:
            now = replace(self.settings, params=replace(self.settings.params, temperature=temperature))
            runs = compare(
                self.runtime, self.prompts, methods, now, _prefixed(progress, f"temperature {temperature:g}")
            )
            temperatures[f"{temperature:g}"] = {
                "methods": summarise(runs, margin_finder(self.runtime, now.params)),
                **compared(runs, methods, baseline),
            }
            if not temperature:
                greedy = self._greedy(runs, now, progress)
        sizes = drafter_sizes(self.bundle, methods)
        return {"methods": methods, "temperatures": temperatures, "baseline": baseline, **greedy, "sizes": sizes}

    def _greedy(self, runs: Sequence[Run], settings: Settings, progress: Progress) -> dict[str, Any]:
        """Return the figures that need greedy runs."""
        drafting = self.chains or self.runtime
        alone = [name for name in self.methods if name in drafting.methods and "+" not in name]
        chains = depths(drafting, runs, alone, settings, progress)
        traces = traced(self.runtime, runs, self.methods, settings, progress)
        progress("costs")
        return {
            "depths": chains,
            "positions": {name: by_position(lines) for name, lines in traces.items()},
            "estimates": {name: estimates(lines) for name, lines in traces.items()},
            "costs": costs(self.runtime, runs, self.methods),
        }


def _prefixed(progress: Progress, prefix: str) -> Progress:
    return lambda line: progress(f"{prefix}: {line}")


def compared(runs: Sequence[Run], methods: Sequence[str], baseline: str | None) -> dict[str, Any]:
    """Return speed over plain decoding, τ, differences between methods, and the figures over a baseline, by kind."""
    over_plain = over(runs, methods, PLAIN)
    prompts = {kind: len(by_prompt(some, [PLAIN])[PLAIN]) for kind, some in by_kind(runs).items()}
    speeds = ("speed", "speed_interval")
    taus = ("tau", "interval")
    return {
        key: {
            name: {
                kind: {fields[0]: one[fields[0]], "interval": one[fields[1]], "prompts": prompts[kind]}
                for kind, one in kinds.items()
            }
            for name, kinds in over_plain.items()
        }
        for key, fields in (("speeds", speeds), ("tokens_a_step", taus))
    } | {
        "pairs": pairs(runs, methods),
        "against": over(runs, methods, baseline) if baseline else {},
        "stages": stages(runs, methods),
    }


def by_kind(runs: Sequence[Run]) -> dict[str, Sequence[Run]]:
    """Return all runs, and those of each kind of prompt."""
    kinds = sorted({run.prompt.kind for run in runs})
    return {ALL: runs, **{kind: [run for run in runs if run.prompt.kind == kind] for kind in kinds}}


def by_prompt(runs: Sequence[Run], methods: Sequence[str]) -> dict[str, list[Totals]]:
    """Return the sums of every prompt whose outputs do not loop and are long enough to time, by method.

    Turns of a conversation depend on each other, so they make one value.
    """
    turns: dict[BenchPrompt, list[Run]] = defaultdict(list)
    for run in runs:
        if run.timed and not run.loops:
            turns[run.prompt].append(run)
    return {name: [Totals.of(run.generations[name] for run in each) for each in turns.values()] for name in methods}


def over(runs: Sequence[Run], methods: Sequence[str], baseline: str) -> dict[str, Any]:
    """Return τ of every method and its speed over the baseline's, with intervals over prompts, by method and kind.

    `speed` is a `speedup`. A kind without a prompt to time is left out.
    """
    figures: dict[str, Any] = {name: {} for name in methods}
    for kind, some in by_kind(runs).items():
        totals = by_prompt(some, (*methods, baseline))
        for name in methods if totals[baseline] else ():
            ratio, rows = _ratio(totals[baseline], totals[name]), _rows(totals[name])
            figures[name][kind] = {
                "tau": float(_tau(rows.sum(0))), "interval": bootstrap(rows, _tau),
                "speed": ratio.ratio, "speed_interval": ratio.interval,
            }  # fmt: skip
    return figures


def pairs(runs: Sequence[Run], methods: Sequence[str]) -> list[dict[str, Any]]:
    """Return, for every two methods, the difference of τ and the ratio of speeds, with intervals over prompts.

    `separate` is True if the interval of the difference of τ does not hold 0.
    """
    totals, differences = by_prompt(runs, methods), []
    for first, second in combinations(methods, 2):
        if not totals[first]:
            continue
        ratio, rows = _ratio(totals[first], totals[second]), np.hstack([_rows(totals[second]), _rows(totals[first])])
        tau = bootstrap(rows, _tau_difference)
        differences.append({
            "method": second, "than": first, "tau": float(_tau_difference(rows.sum(0))), "tau_interval": tau,
            "speed": ratio.ratio, "speed_interval": ratio.interval,
            "separate": tau is not None and not tau[0] <= 0 <= tau[1],
        })  # fmt: skip
    return differences


def stages(runs: Sequence[Run], methods: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the mean milliseconds of a verification step by method and stage: draft, resample, verify, and the rest.

    Plain decoding is among the methods. It is how Lyanna's Figure 13b splits a draft's time, for whole steps.
    """
    totals = {name: Totals.of(run.generations[name] for run in runs) for name in (PLAIN, *methods)}
    return {name: {stage: one.stage_ms[stage] / max(one.steps, 1) for stage in STAGES} for name, one in totals.items()}


def _ratio(base: Sequence[Totals], other: Sequence[Totals]) -> Speedup:
    return speedup([one.timing for one in base], [one.timing for one in other])


def _rows(totals: Sequence[Totals]) -> Sums:
    return np.array([(one.accepted, one.steps) for one in totals], float)


def _tau(sums: Sums) -> Sums:
    tau: Sums = 1 + sums[..., 0] / sums[..., 1]
    return tau


def _tau_difference(sums: Sums) -> Sums:
    return _tau(sums[..., :2]) - _tau(sums[..., 2:])
