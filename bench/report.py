"""Figures of a report: methods that draft, on one verifier, as the papers of drafters compare them.

`report_runs` has the statistics of timed runs, `report_traces` those of traces, `report_sizes` costs and sizes, and
`report_trained` the comparisons that `redraft train all` wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from redraft.bench.compare import PLAIN, Run, Settings, compare
from redraft.bench.prompts import Prompt
from redraft.bench.report_runs import against, pairs, speeds, stages, tokens_a_step
from redraft.bench.report_sizes import costs, drafter_sizes
from redraft.bench.report_traces import by_position, depths, estimates, traced
from redraft.bench.summary import summarise
from redraft.bench.turns import Report
from redraft.engines import Bundle
from redraft.errors import UsageError
from redraft.runtime import Runtime

TEMPERATURES = (0.0, 1.0)
MarginOf = Callable[[Run, int], float | None]


def check_report() -> None:
    """Raise UsageError if the libraries of a report are missing."""
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
        import scipy  # noqa: F401
    except ImportError as error:
        raise UsageError(f"a report needs {error.name}", "install redraft[bench]") from None


def measure(
    runtime: Runtime, bundle: Bundle, prompts: Sequence[Prompt], methods: Sequence[str], settings: Settings,
    margin_finder: Callable[[Settings], MarginOf], report: Report, chains: Runtime | None = None,
    baseline: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the figures of a report, without those of trained comparisons.

    settings: its temperature is replaced by each of TEMPERATURES.   margin_finder: see `summarise`.
    chains: engines of the same model whose drafters draft chains, for the figures by depth; None takes `runtime`.
    baseline: the drafter that others are compared with; None for no such table.
    Raises UsageError for a baseline that is not measured.
    """
    found: dict[str, Any] = {"methods": [name for name in methods if name != PLAIN], "temperatures": {}}
    if baseline is not None and baseline not in found["methods"]:
        raise UsageError(f"--baseline {baseline!r} is not among the methods", f"one of {', '.join(found['methods'])}")
    found["baseline"] = baseline
    for temperature in TEMPERATURES:
        now = replace(settings, params=replace(settings.params, temperature=temperature))
        runs = compare(runtime, prompts, methods, now, _prefixed(report, f"temperature {temperature:g}"))
        found["temperatures"][f"{temperature:g}"] = {
            "methods": summarise(runs, margin_finder(now)),
            "speeds": {name: speeds(runs, name) for name in found["methods"]},
            "tokens_a_step": {name: tokens_a_step(runs, name) for name in found["methods"]},
            "pairs": pairs(runs, found["methods"]),
            "against": against(runs, found["methods"], baseline) if baseline else {},
            "stages": stages(runs, found["methods"]),
        }
        if not temperature:
            measured = runtime if chains is None else chains
            there = [name for name in found["methods"] if name in measured.methods and "+" not in name]
            found["depths"] = depths(measured, runs, there, now, report)
            traces = traced(runtime, runs, found["methods"], now, report)
            found["positions"] = {name: by_position(lines) for name, lines in traces.items()}
            found["estimates"] = {name: estimates(lines) for name, lines in traces.items()}
            report("costs")
            found["costs"] = costs(runtime, runs, found["methods"])
    return {**found, "sizes": drafter_sizes(bundle, found["methods"])}


def _prefixed(report: Report, prefix: str) -> Report:
    return lambda text: report(f"{prefix}: {text}")
