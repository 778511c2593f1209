"""Figures of a report that other commands measured: controllers, peers, the parts of a draft, and training."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from redraft.bench.command import read_json
from redraft.bench.controllers import tables as controller_tables
from redraft.bench.peers.figures import ratio_rows, speed_rows
from redraft.bench.prompts import ALL
from redraft.bench.statistics import CONFIDENCE
from redraft.errors import UsageError

TOGETHER = "all"
"""The stages of a draft's logits in one graph."""
SIGNIFICANT = 0.05
"""The largest p of a Welch test that the page marks, as in SD²'s table 4."""
Tables = list[tuple[str, list[list[str]]]]
"""Titles and rows of text, headers first."""
_PEERS = ("environment", "chat", "max_new_tokens", "prompts", "new_tokens", "looping_answers", "precisions", "peers",
          "versions", "left_out", "ratios")  # fmt: skip
_HINT = "give what the command printed with --json"
_OTHER_FORM = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, StopIteration)
"""Errors of reading JSON that has another form."""


def read_controllers(path: Path) -> dict[str, Any]:
    """Return what `redraft bench --controllers NAMES --json` printed. Raises UsageError for any other file."""
    hint = "give the output of `redraft bench --controllers … --json`"
    with _of_another_form(path, "comparison of controllers", hint):
        figures = read_json(path, _HINT)
        controller_tables(figures)
        counts = {key: int(figures[key]) for key in ("outputs", "timed")}
        return {key: figures[key] for key in ("method", *figures) if key != "plots"} | counts


def read_peers(path: Path) -> dict[str, Any]:
    """Return what `python -m redraft.bench.peers --json` printed, without folders of its machine.

    Raises UsageError for any other file.
    """
    with _of_another_form(path, "peers", "give the output of `python -m redraft.bench.peers --json`"):
        figures = read_json(path, _HINT)
        decoders = {
            precision: {
                name: {"modes": {m: {"tokens_per_second": s["tokens_per_second"]} for m, s in one["modes"].items()}}
                for name, one in by_name.items()
            }
            for precision, by_name in figures["decoders"].items()
        }
        shown = {**{key: figures[key] for key in _PEERS}, "decoders": decoders, "failed": sorted(figures["failed"])}
        peer_tables(shown)
        return shown


def read_latency(path: Path) -> dict[str, Any]:
    """Return the times of a draft's parts that an experiment printed. Raises UsageError for any other file."""
    hint = "docs/benchmarks.md, `--latency-json`, has the command that prints them"
    with _of_another_form(path, "times of a draft's parts", hint):
        figures = read_json(path, _HINT)
        latency_tables(figures)
        return {**figures, "environment": dict(figures["environment"])}


@contextmanager
def _of_another_form(path: Path, content: str, hint: str) -> Iterator[None]:
    """Raise UsageError if reading what a file should contain fails."""
    try:
        yield
    except _OTHER_FORM:
        raise UsageError(f"{path} has no {content}", hint) from None


def peer_tables(peers: Mapping[str, Any]) -> Tables:
    """Return the tables of peers."""
    speeds = f"Tokens a second over {peers['prompts']} prompts"
    return [(speeds, speed_rows(peers)), ("Speed of redraft over the best mode of a peer", ratio_rows(peers))]


def latency_tables(result: Mapping[str, Any]) -> dict[str, list[list[str]]]:
    """Return tables: logits by N, calls against verification, a draft's parts, and drafts computed from parts.

    They are Lyanna's Figure 13. result: what `python -m experiments.lyanna latency --json` prints.
    """
    first = next(iter(result["logits_ms"].values()))["one_pass"]
    stages = [stage for stage in first if stage != TOGETHER]
    logits = [["N", "way", *(f"{stage} ms" for stage in stages), "together ms", "least ms"]]
    for count, ways in result["logits_ms"].items():
        for way, taken in ways.items():
            cells = [f"{taken[stage]['median']:.4f}" for stage in (*stages, TOGETHER)]
            logits.append([count, way.replace("_", " "), *cells, f"{taken[TOGETHER]['least']:.4f}"])
    one = result["turns_ms"]["t(1)"]["median"]
    computed = [["draft", "ms", "of t(1)"]]
    for name, ms in result["computed_from_parts_ms"].items():
        computed.append([name.replace("_", " "), f"{ms:.4f}", f"{ms / one:.3f}"])
    draft = f"one draft of {result['steps']} steps"
    return {
        "logits of N steps: one pass of N rows against N passes of one row": logits,
        "calls in turn with the verifier": _shares("call", result["turns_ms"], "t(1)"),
        f"{draft}, by graphs cut after each part": _shares("part", result["parts_ms"], "draft"),
        f"{draft}, profiled, which makes every kernel slower": _shares("part", result["profile_ms"], "call"),
        "drafts computed from measured parts (medians), not run": computed,
    }


def _shares(what: str, times: Mapping[str, Mapping[str, float]], whole: str) -> list[list[str]]:
    rows = [[what, "median ms", "least ms", f"median of {whole}", f"least of {whole}"]]
    for name, taken in times.items():
        kinds = ("median", "least")
        rows.append([name, *(f"{taken[k]:.4f}" for k in kinds), *(f"{taken[k] / times[whole][k]:.3f}" for k in kinds)])
    return rows


def trained(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the runs and tables of comparisons that `redraft train all` wrote. Raises UsageError without results.

    They are GRIFFIN's tables 2 to 8 and its Figure 1b, SD²'s table 4 and Figure 4, and Lyanna's tables 1 and 2 and its
    Figures 5 and 7. Intervals over seeds are Student's t.
    """
    return [_comparison(folder) for folder in folders]


def _comparison(folder: Path) -> dict[str, Any]:
    try:
        about = json.loads((folder / "compare.json").read_text(encoding="utf-8"))
        results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        if not results:
            raise ValueError("no run is finished")
        runs = _by_run(results)
        tables = [
            {**table, "title": title, "rows": _rows(runs, table["runs"])}
            for title, table in about.get("tables", {}).items()
        ]
        return {
            "verifier": about["verifier"], "schedule": about["schedule"], "runs": runs, "tables": tables,
            "frequencies": results[0].get("frequencies", []),
        }  # fmt: skip
    except (OSError, *_OTHER_FORM) as error:
        raise UsageError(f"{folder} has no comparison ({error})", "give a folder of `redraft train all`") from None


def _by_run(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the runs by name: size, cost, and tokens of a step of chains by seed and kind."""
    runs: dict[str, dict[str, Any]] = {}
    for one in results:
        if ALL in one["chain_tokens"]:
            raise ValueError(f"the kind {ALL!r} stands for all kinds together")
        run = runs.setdefault(one["name"], {"method": one["method"], "seeds": {}})
        run |= {"parameters": one["parameters"], "tokens": one["tokens"]}
        run["seeds"][str(one["seed"])] = {
            "seconds": one["seconds"], "acceptance": one["acceptance"], "wide": one["wide"],
            "progress": one.get("progress", []),
            "tau": {**one["chain_tokens"], ALL: fmean(one["chain_tokens"].values())},
        }  # fmt: skip
    for run in runs.values():
        seeds = list(run["seeds"].values())
        run["seconds"] = fmean(seed["seconds"] for seed in seeds)
        run["tau"] = {kind: over_seeds([seed["tau"][kind] for seed in seeds]) for kind in seeds[0]["tau"]}
        run["progress"] = _progress([seed["progress"] for seed in seeds])
        run["depths"], run["wide"] = (_over_kinds([seed[key] for seed in seeds]) for key in ("acceptance", "wide"))
    return runs


def _progress(seeds: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return chain tokens (SD², Figure 4), accuracy and loss (Lyanna, Figure 5) by training step.

    They are means over kinds, then over seeds. A step counts if all seeds measured it.
    """
    by_step = [{line["step"]: line for line in lines} for lines in seeds]
    points = []
    for step in sorted(set.intersection(*map(set, by_step))):
        lines = [each[step] for each in by_step]
        losses: list[Any] = [line.get("loss") for line in lines]
        means = {key: fmean(fmean(line[key].values()) for line in lines) for key in ("chain_tokens", "accuracy")}
        points.append({"step": step, **means, "loss": None if None in losses else fmean(losses)})
    return points


def _over_kinds(seeds: Sequence[Mapping[str, Sequence[float]]]) -> list[dict[str, Any]]:
    """Return shares by depth: for each seed the mean over kinds, then mean and interval over seeds."""
    by_seed = [[fmean(shares) for shares in zip(*kinds.values(), strict=False)] for kinds in seeds]
    return [over_seeds(shares) for shares in zip(*by_seed, strict=False)]


def over_seeds(values: Sequence[float]) -> dict[str, Any]:
    """Return mean and 95 % interval of the mean over seeds (Student's t); no interval for a single seed."""
    from scipy import stats

    interval: tuple[float, ...] | None = None
    if len(set(values)) > 1:
        interval = tuple(map(float, stats.ttest_1samp(values, 0).confidence_interval(CONFIDENCE)))
    return {"mean": fmean(values), "interval": interval, "seeds": len(values)}


def _welch(own: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return Welch's two-sided t-test of chain tokens over seeds against the first run's, by kind (SD², table 4).

    Empty unless both have two seeds. A kind is left out if no seed changes it in either run.
    """
    from scipy import stats

    if min(len(own), len(first)) < 2:
        return {}
    tests = {}
    for kind in next(iter(own.values()))["tau"]:
        columns = [[seed["tau"][kind] for seed in run.values()] for run in (own, first)]
        if any(len(set(column)) > 1 for column in columns):
            t, p = stats.ttest_ind(*columns, equal_var=False)
            tests[kind] = {"t": float(t), "p": float(p)}
    return tests


def _rows(runs: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return a table's finished runs with their places from 1, and how they differ from the first run of the table."""
    first = runs.get(names[0], {}).get("seeds", {})
    rows = []
    for place, name in enumerate(names, 1):
        if name not in runs:
            continue
        own = runs[name]["seeds"]
        both = [own[seed]["tau"][ALL] - first[seed]["tau"][ALL] for seed in own if seed in first]
        shared = {key: runs[name][key] for key in ("tau", "parameters", "depths", "wide", "progress")}
        tests = _welch(own, first) if name != names[0] else {}
        difference = over_seeds(both) if both else None
        rows.append({"run": name, "place": place, **shared, "difference": difference, "welch": tests})
    return rows
