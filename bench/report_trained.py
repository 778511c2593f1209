"""Trained comparisons in a report: runs with their seeds, and tables of them.

They are GRIFFIN's tables 2 to 8 and its Figure 1b. Intervals over seeds are Student's t.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from redraft.bench.report_runs import ALL
from redraft.bench.statistics import CONFIDENCE
from redraft.errors import UsageError


def trained(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the runs and tables of comparisons that `redraft train all` wrote. Raises UsageError without results."""
    found = []
    for folder in folders:
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
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{folder} has no comparison ({error})", "give a folder of `redraft train all`") from None
        found.append({"verifier": about["verifier"], "schedule": about["schedule"], "runs": runs, "tables": tables})
    return found


def _by_run(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the runs by name: size, cost, and tokens of a step of chains by seed and kind."""
    found: dict[str, dict[str, Any]] = {}
    for one in results:
        run = found.setdefault(one["name"], {"method": one["method"], "seeds": {}})
        run |= {"parameters": one["parameters"], "tokens": one["tokens"]}
        run["seeds"][str(one["seed"])] = {
            "seconds": one["seconds"], "acceptance": one["acceptance"], "wide": one["wide"],
            "tau": {**one["chain_tokens"], ALL: fmean(one["chain_tokens"].values())},
        }  # fmt: skip
    for run in found.values():
        run["seconds"] = fmean(seed["seconds"] for seed in run["seeds"].values())
        kinds = next(iter(run["seeds"].values()))["tau"]
        run["tau"] = {kind: over_seeds([seed["tau"][kind] for seed in run["seeds"].values()]) for kind in kinds}
        run["depths"], run["wide"] = _over_kinds(run, "acceptance"), _over_kinds(run, "wide")
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
    by seed, if that is finished."""
    rows = []
    for place, name in enumerate(names, 1):
        if name not in runs:
            continue
        first, own = runs.get(names[0], {}).get("seeds", {}), runs[name]["seeds"]
        both = [own[seed]["tau"][ALL] - first[seed]["tau"][ALL] for seed in own if seed in first]
        shared = {key: runs[name][key] for key in ("tau", "parameters", "depths", "wide")}
        rows.append({"run": name, "place": place, **shared, "difference": over_seeds(both) if both else None})
    return rows
