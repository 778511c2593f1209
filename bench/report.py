"""Figures of a report: methods that draft, on one verifier, as the papers of drafters compare them.

Speed and acceptance of every method and kind at temperatures 0 and 1 (GRIFFIN, table 1), differences between methods,
acceptance and misaligned tokens by depth (its Figure 1c), costs, sizes, and the trained comparisons with their seeds
(its tables 2 to 8, Figure 1b). Intervals are SciPy's percentile bootstrap over prompts, and Student's t over seeds.
"""

from __future__ import annotations

import io
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from redraft.bench.compare import PLAIN, Run, Settings, compare
from redraft.bench.prompts import Prompt
from redraft.bench.statistics import CONFIDENCE, FEWEST_VALUES, RESAMPLES
from redraft.bench.summary import FEWEST_TOKENS, summarise
from redraft.bench.turns import Report
from redraft.engines.manifest import Manifest
from redraft.errors import UsageError
from redraft.runtime import Budget, Runtime, SpeculationParams
from redraft.runtime.cost import MEASURED_KV_LEN, SIZES

TEMPERATURES = (0.0, 1.0)
CHAIN = 5
"""Depth of the drafts whose acceptance is measured by depth, as in Figure 1c."""
ALL = "all"
_ROUNDS = 25

Interval = tuple[float, float] | None
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
    runtime: Runtime, manifest: Manifest, prompts: Sequence[Prompt], methods: Sequence[str], settings: Settings,
    margin_finder: Callable[[Settings], MarginOf], report: Report, chains: Runtime | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the figures of a report, without those of trained comparisons.

    settings: its temperature is replaced by each of TEMPERATURES.   margin_finder: see `summarise`.
    chains: engines of the same model whose drafters draft chains, for the figures by depth; None takes `runtime`.
    """
    found: dict[str, Any] = {"methods": [name for name in methods if name != PLAIN], "temperatures": {}}
    for temperature in TEMPERATURES:
        now = replace(settings, params=replace(settings.params, temperature=temperature))
        runs = compare(runtime, prompts, methods, now, _prefixed(report, f"temperature {temperature:g}"))
        found["temperatures"][f"{temperature:g}"] = {
            "methods": summarise(runs, margin_finder(now)),
            "speeds": {name: speeds(runs, name) for name in found["methods"]},
            "tokens_a_step": {name: _tokens_a_step(runs, name) for name in found["methods"]},
            "pairs": pairs(runs, found["methods"]),
        }
        if not temperature:
            measured = runtime if chains is None else chains
            there = [name for name in found["methods"] if name in measured.methods]
            found["depths"] = _depths(measured, runs, there, now, report)
            report("costs")
            found["costs"] = _costs(runtime, runs, found["methods"])
    return {**found, "sizes": _sizes(manifest, found["methods"])}


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


def _by_kind(runs: Sequence[Run]) -> dict[str, Sequence[Run]]:
    """Return all runs, and those of each kind of prompt."""
    kinds = sorted({run.prompt.kind for run in runs})
    return {ALL: runs, **{kind: [run for run in runs if run.prompt.kind == kind] for kind in kinds}}


def speeds(runs: Sequence[Run], method: str) -> dict[str, Any]:
    """Return the median over prompts of speed over plain decoding, with its interval, by kind and over all."""
    found = {}
    for kind, some in _by_kind(runs).items():
        sums = _sums(some, [PLAIN, method])
        ratios = [a.token_seconds / b.token_seconds for a, b in zip(sums[PLAIN], sums[method], strict=True)]
        if ratios:
            found[kind] = {"speed": median(ratios), "interval": interval(np.median, ratios), "prompts": len(ratios)}
    return found


def _tau(accepted: Any, steps: Any, axis: int = -1) -> Any:
    return 1 + accepted.sum(axis) / steps.sum(axis)


def _columns(sums: Sequence[_Sums]) -> tuple[list[float], list[float]]:
    return [float(one.accepted) for one in sums], [float(one.steps) for one in sums]


def _tokens_a_step(runs: Sequence[Run], method: str) -> dict[str, Any]:
    """Return τ with its interval, by kind and over all: the tokens of a step, the verifier's own included."""
    found = {}
    for kind, some in _by_kind(runs).items():
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


def _prefixed(report: Report, prefix: str) -> Report:
    return lambda text: report(f"{prefix}: {text}")


def _depths(
    runtime: Runtime, runs: Sequence[Run], methods: Sequence[str], settings: Settings, report: Report
) -> dict[str, Any]:
    """Return acceptance by depth of every drafter's chains of at most CHAIN tokens, over texts that do not loop.

    A drafter of trees drafts a deep chain only if it is sure of it, so its figures are those of its surest drafts. Give
    engines whose drafters draft chains to have the same drafts of all methods.
    """
    found, chain = {}, Budget(CHAIN, CHAIN, 1)
    some = [run for run in runs if not run.loops]
    for name in methods:
        report(f"chains of {name}")
        file = io.StringIO()
        how = SpeculationParams(name, budget=chain)
        texts = []
        for run in some:
            made = runtime.generate([run.token_ids], settings.params, how, trace=file)[0]
            texts.append([*run.token_ids, *made.token_ids])
        found[name] = by_depth(file.getvalue().splitlines(), texts)
    return found


def by_depth(lines: Sequence[str], texts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return figures by depth from 1 of the chains in a trace: a list of each.

    lines: of the trace; every request's first line begins the next of `texts`.   texts: tokens of prompt and output.
    drafts:      of at least this depth.   conditional: share that is right, of those that were right before.
    misaligned:  share whose token at this depth is not the text's (Figure 1c).
    """
    drafts, wrong, before, right = (np.zeros(CHAIN, int) for _ in range(4))
    number, text = -1, texts[0] if texts else []
    for line in map(json.loads, lines):
        if "prompt" in line:
            number += 1
            text = texts[number]
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


def _costs(runtime: Runtime, runs: Sequence[Run], methods: Sequence[str]) -> dict[str, Any]:
    """Return median milliseconds of a verification by nodes, and mean ones of a step's drafting in these runs."""
    sizes = [size for size in SIZES if size <= runtime.costs.largest]
    verify: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(_ROUNDS):
        for size in sizes:
            verify[size].append(runtime.verifier.measure_ms(1, size, MEASURED_KV_LEN))
    drafts = {}
    for name in methods:
        metrics = [run.generations[name].metrics for run in runs]
        spent = sum(m.stage_ms["draft"] + m.stage_ms["resample"] for m in metrics)
        drafts[name] = spent / max(sum(m.num_spec_steps for m in metrics), 1)
    return {
        "kv_len": MEASURED_KV_LEN,
        "verify_ms": {str(size): median(times) for size, times in verify.items()},
        "draft_ms": drafts,
    }


def _sizes(manifest: Manifest, methods: Sequence[str]) -> dict[str, Any]:
    """Return the bytes of every drafter's own weights, the hidden states that it reads, and its largest tree."""
    found = {}
    for name in methods:
        record = manifest.drafters.get(name)
        if record is None:
            continue
        weights = {(ref.file, ref.offset): ref for ref in record.weights if Path(ref.file).stem == name}
        found[name] = {
            "method": record.method, "bytes": sum(ref.length for ref in weights.values()),
            "hidden_states": list(record.hidden_states), "nodes": record.limits.nodes, "depth": record.limits.depth,
        }  # fmt: skip
    return found


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
