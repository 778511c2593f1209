"""Figures of a report: methods that draft, on one verifier, as the papers of drafters compare them.

Speeds and τ by method and kind are those of GRIFFIN's table 1, those over a baseline SD²'s tables 1 and 3. Intervals
are percentile bootstraps over prompts. Acceptance and misaligned tokens by depth are those of GRIFFIN's Figure 1c;
acceptance by depth is also Lyanna's table 1. Accepted tokens by position in the output are SD²'s Figure 5.
`report_costs` has costs and sizes, and `report_inputs` what other commands measured.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

import numpy as np

from redraft.bench.compare import (
    PLAIN,
    STAGES,
    Progress,
    Run,
    Settings,
    Trace,
    by_kind,
    compare,
    speculation,
    times_as_fast,
    totals_of,
    trace,
)
from redraft.bench.prompts import ALL, BenchPrompt
from redraft.bench.report_costs import costs, drafter_sizes
from redraft.bench.statistics import FloatArray, Interval, bootstrap
from redraft.bench.summary import margin_finder, summarise
from redraft.engines import Bundle
from redraft.errors import UsageError
from redraft.runtime import Budget, Runtime, SpeculationParams
from redraft.runtime.observe.trace import replay

TEMPERATURES = (0.0, 1.0)
CHAIN = 5
"""Depth of the drafts whose acceptance is measured by depth, as in GRIFFIN's Figure 1c."""
BIN = 16
"""Positions of the output that make one point of SD²'s Figure 5."""


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
            name = f"{temperature:g}"

            def report(line: str, name: str = name) -> None:
                progress(f"temperature {name}: {line}")

            runs = compare(self.runtime, self.prompts, methods, now, report)
            temperatures[name] = {
                "methods": summarise(runs, margin_finder(self.runtime, now.params)),
                **compared(runs, methods, baseline),
            }
            if not temperature:
                greedy = self._greedy(runs, now, progress)
        sizes = drafter_sizes(self.bundle, methods)
        return {"methods": methods, "temperatures": temperatures, "baseline": baseline, **greedy, "sizes": sizes}

    def _greedy(self, runs: Sequence[Run], settings: Settings, progress: Progress) -> dict[str, Any]:
        """Return the figures that need greedy runs: those of traces, over texts that do not loop, and costs."""
        drafting, steady = self.chains or self.runtime, [run for run in runs if not run.loops]

        def traces(runtime: Runtime, how: SpeculationParams) -> list[Trace]:
            return [trace(runtime, run.token_ids, settings.params, how) for run in steady]

        chains, lines = {}, {}
        for name in self.methods:
            if name in drafting.methods and "+" not in name:
                progress(f"chains of {name}")
                chains[name] = by_depth(traces(drafting, SpeculationParams(name, budget=Budget(CHAIN, CHAIN, 1))))
        for name in self.methods:
            progress(f"traces of {name}")
            lines[name] = [each for each, _ in traces(self.runtime, speculation(name, settings))]
        progress("costs")
        return {
            "depths": chains,
            "positions": {name: by_position(each) for name, each in lines.items()},
            "estimates": {name: estimates(each) for name, each in lines.items()},
            "costs": costs(self.runtime, runs, self.methods),
        }


def compared(runs: Sequence[Run], methods: Sequence[str], baseline: str | None) -> dict[str, Any]:
    """Return speed over plain decoding, τ, differences between methods, and the figures over a baseline, by kind.

    Of all but `stages`, outputs that loop or are too short to time are left out, and kinds that have no others.
    """
    steady = [run for run in runs if run.timed and not run.loops]
    kinds = {ALL: steady, **by_kind(steady)} if steady else {}
    speeds, taus, against = ({name: dict[str, Any]() for name in methods} for _ in range(3))
    for name, (kind, some) in product(methods, kinds.items()):
        found, prompts = over(some, name, PLAIN), len({run.prompt for run in some})
        speeds[name][kind] = {"speed": found["speed"], "interval": found["speed_interval"], "prompts": prompts}
        taus[name][kind] = {"tau": found["tau"], "interval": found["interval"], "prompts": prompts}
        if baseline:
            against[name][kind] = over(some, name, baseline)
    return {
        "speeds": speeds,
        "tokens_a_step": taus,
        "pairs": [pair(steady, *each) for each in combinations(methods, 2)] if steady else [],
        "against": against if baseline else {},
        "stages": stages(runs, methods),
    }


def over(runs: Sequence[Run], method: str, baseline: str) -> dict[str, Any]:
    """Return a method's τ and its speed over the baseline's, with intervals over conversations."""
    ratio, (tau, interval) = times_as_fast(runs, [method], [baseline]), tokens_a_step(runs, method)
    return {"tau": tau, "interval": interval, "speed": ratio.ratio, "speed_interval": ratio.interval}


def pair(runs: Sequence[Run], first: str, second: str) -> dict[str, Any]:
    """Return the difference of τ and the ratio of speeds of two methods, with intervals over conversations.

    `separate` is True if the interval of the difference of τ does not hold 0.
    """
    ratio, (tau, interval) = times_as_fast(runs, [second], [first]), tokens_a_step(runs, second, first)
    return {
        "method": second, "than": first, "tau": tau, "tau_interval": interval,
        "speed": ratio.ratio, "speed_interval": ratio.interval,
        "separate": interval is not None and not interval[0] <= 0 <= interval[1],
    }  # fmt: skip


def tokens_a_step(runs: Sequence[Run], method: str, than: str | None = None) -> tuple[float, Interval | None]:
    """Return τ, or its difference from that of another method, with the interval over conversations."""
    names = [method] if than is None else [method, than]
    metrics = [[run.generations[name].metrics for name in names] for run in runs]
    rows = np.array([[(m.num_accepted_draft_tokens, m.num_steps) for m in each] for each in metrics], float)

    def statistic(sums: FloatArray) -> FloatArray:
        tau: FloatArray = 1 + sums[..., 0] / sums[..., 1]
        found: FloatArray = tau[..., 0] if than is None else tau[..., 0] - tau[..., 1]
        return found

    return float(statistic(rows.sum(0))), bootstrap(rows, statistic, [run.prompt for run in runs])


def stages(runs: Sequence[Run], methods: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the mean milliseconds of a verification step by method and stage: draft, resample, verify, and the rest.

    Plain decoding is among the methods. It is how Lyanna's Figure 13b splits a draft's time, for whole steps.
    """
    totals = {name: totals_of(runs, name) for name in (PLAIN, *methods)}
    return {name: {stage: one.stage_ms[stage] / max(one.steps, 1) for stage in STAGES} for name, one in totals.items()}


def by_depth(traces: Sequence[Trace]) -> dict[str, Any]:
    """Return figures by depth from 1 of the chains in traces.

    A drafter of trees drafts a deep chain only if it is sure of it. Engines whose drafters draft chains avoid that.

    drafts:      of at least this depth.   conditional: share that is right, of those that were right before.
    misaligned:  share whose token at this depth is not the text's (Figure 1c).
    """
    drafts, wrong, before, right = (np.zeros(CHAIN, int) for _ in range(4))
    for lines, text in traces:
        for line in map(json.loads, lines):
            if "position" not in line:
                continue
            still = True
            following = text[line["position"] + 1 :]
            for depth, (token, actual) in enumerate(zip(line["tokens"][1:], following, strict=False)):
                drafts[depth] += 1
                before[depth] += still
                wrong[depth] += token != actual
                still = still and token == actual
                right[depth] += still
    return {
        "drafts": drafts.tolist(),
        "conditional": [float(r / b) for r, b in zip(right, before, strict=True) if b],
        "misaligned": [float(w / d) for w, d in zip(wrong, drafts, strict=True) if d],
    }


def by_position(traces: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Return the accepted drafted tokens of a block by position in the output, in bins of BIN (SD², Figure 5).

    traces: of one request each. A verification adds a block, whose position is that of its last token.
    `position` is the middle of a bin, `accepted` the mean over its `blocks`. A bin without blocks is left out.
    """
    accepted: dict[int, list[int]] = defaultdict(list)
    for lines in traces:
        prompt = 0
        for line in map(json.loads, lines):
            prompt = len(line["prompt"]) if "prompt" in line else prompt
            if "position" in line:
                accepted[(line["position"] + len(line["committed"]) - prompt) // BIN].append(len(line["path"]))
    return [
        {"position": place * BIN + BIN // 2, "accepted": sum(counts) / len(counts), "blocks": len(counts)}
        for place, counts in sorted(accepted.items())
    ]


def estimates(traces: Sequence[Sequence[str]]) -> dict[str, Any] | None:
    """Return tokens a step that the controller's estimates promised, and those that the same steps brought.

    traces: of one request each.   steps: those whose size the controller chose by cost. Returns None without any.
    Raises DataError for a trace that does not follow from its own lines.
    """
    replays = [replay(lines) for lines in traces]
    steps = sum(one.weighed for one in replays)
    if not steps:
        return None
    return {
        "predicted": 1 + sum(sum(one.expected.values()) for one in replays) / steps,
        "measured": 1 + sum(one.observed.total() for one in replays) / steps,
        "steps": steps,
    }
