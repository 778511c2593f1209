"""Trained comparisons in a report: runs with their seeds, and tables of them.

They are GRIFFIN's tables 2 to 8 and its Figure 1b, SD²'s table 4 and Figure 4, and Lyanna's tables 1 and 2 and its
Figures 5 and 7. Intervals over seeds are Student's t.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from redraft.bench.prompts import ALL
from redraft.bench.statistics import CONFIDENCE
from redraft.errors import UsageError

SIGNIFICANT = 0.05
"""The largest p of a Welch test that the page marks, as in SD²'s table 4."""
_MEASURED = ("chain_tokens", "accuracy")


def trained(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the runs and tables of comparisons that `redraft train all` wrote. Raises UsageError without results."""
    found = []
    for folder in folders:
        try:
            about = json.loads((folder / "compare.json").read_text(encoding="utf-8"))
            results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
            if not results:
                raise ValueError("no run is finished")
            runs, frequencies = _by_run(results), results[0].get("frequencies", [])
            tables = [
                {**table, "title": title, "rows": _rows(runs, table["runs"])}
                for title, table in about.get("tables", {}).items()
            ]
            found.append({
                "verifier": about["verifier"], "schedule": about["schedule"], "runs": runs, "tables": tables,
                "frequencies": frequencies,
            })  # fmt: skip
        except (OSError, ValueError, LookupError, TypeError, AttributeError, StopIteration) as error:
            raise UsageError(f"{folder} has no comparison ({error})", "give a folder of `redraft train all`") from None
    return found


def _by_run(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the runs by name: size, cost, and tokens of a step of chains by seed and kind."""
    found: dict[str, dict[str, Any]] = {}
    for one in results:
        if ALL in one["chain_tokens"]:
            raise ValueError(f"the kind {ALL!r} stands for all kinds together")
        run = found.setdefault(one["name"], {"method": one["method"], "seeds": {}})
        run |= {"parameters": one["parameters"], "tokens": one["tokens"]}
        run["seeds"][str(one["seed"])] = {
            "seconds": one["seconds"], "acceptance": one["acceptance"], "wide": one["wide"],
            "progress": one.get("progress", []),
            "tau": {**one["chain_tokens"], ALL: fmean(one["chain_tokens"].values())},
        }  # fmt: skip
    for run in found.values():
        run["seconds"] = fmean(seed["seconds"] for seed in run["seeds"].values())
        kinds = next(iter(run["seeds"].values()))["tau"]
        run["tau"] = {kind: over_seeds([seed["tau"][kind] for seed in run["seeds"].values()]) for kind in kinds}
        run["progress"] = _progress(run)
        run["depths"], run["wide"] = _over_kinds(run, "acceptance"), _over_kinds(run, "wide")
    return found


def _progress(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return chain tokens, accuracy and loss by training step: means over kinds, then over seeds.

    chain_tokens: SD²'s Figure 4, which has them without the verifier's own token.   accuracy: the mean over depths of
    acceptance (Lyanna's table 2, Figure 5).   loss: in training, None without (its Figure 5). A step counts if all
    seeds measured it.
    """
    seeds = [{line["step"]: line for line in seed["progress"]} for seed in run["seeds"].values()]
    steps = sorted(set.intersection(*(set(lines) for lines in seeds)))
    found = []
    for step in steps:
        losses = [lines[step].get("loss") for lines in seeds]
        measured = {key: fmean(fmean(lines[step][key].values()) for lines in seeds) for key in _MEASURED}
        found.append({"step": step, **measured, "loss": None if None in losses else fmean(losses)})
    return found


def _welch(own: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return Welch's t-test of chain tokens over seeds against the first run's, by kind (SD², table 4).

    t: above 0 if the run has more tokens.   p: two-sided probability of a |t| as large if the two do not differ.
    Empty unless both have two seeds. A kind is left out if no seed changes it in either run.
    """
    from scipy import stats

    if min(len(own), len(first)) < 2:
        return {}
    found = {}
    for kind in next(iter(own.values()))["tau"]:
        columns = [[seed["tau"][kind] for seed in run.values()] for run in (own, first)]
        if any(len(set(column)) > 1 for column in columns):
            t, p = stats.ttest_ind(*columns, equal_var=False)
            found[kind] = {"t": float(t), "p": float(p)}
    return found


def _over_kinds(run: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return shares by depth: for each seed the mean over kinds, then mean and interval over seeds."""
    seeds = [list(seed[name].values()) for seed in run["seeds"].values()]
    by_seed = [[fmean(shares) for shares in zip(*kinds, strict=False)] for kinds in seeds]
    return [over_seeds(shares) for shares in zip(*by_seed, strict=False)]


def over_seeds(values: Sequence[float]) -> dict[str, Any]:
    """Return mean and 95 % interval of the mean over seeds (Student's t); no interval for a single seed."""
    from scipy import stats

    mean = fmean(values)
    if len(values) < 2 or not (error := float(stats.sem(values))):
        return {"mean": mean, "interval": None, "seeds": len(values)}
    low, high = map(float, stats.t.interval(CONFIDENCE, len(values) - 1, mean, error))
    return {"mean": mean, "interval": (low, high), "seeds": len(values)}


def _rows(runs: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return a table's finished runs with their place in it from 1: tokens a step, and its difference to the first run
    by seed and Welch's test against that run, if it is finished."""
    rows = []
    for place, name in enumerate(names, 1):
        if name not in runs:
            continue
        first, own = runs.get(names[0], {}).get("seeds", {}), runs[name]["seeds"]
        both = [own[seed]["tau"][ALL] - first[seed]["tau"][ALL] for seed in own if seed in first]
        shared = {key: runs[name][key] for key in ("tau", "parameters", "depths", "wide", "progress")}
        tests = _welch(own, first) if name != names[0] else {}
        difference = over_seeds(both) if both else None
        rows.append({"run": name, "place": place, **shared, "difference": difference, "welch": tests})
    return rows
