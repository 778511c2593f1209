"""Drafting methods on one budget: trained on the same tokens, built into one bundle, measured on the same prompts.

    python -m redraft.bench.family COMPARISON --verifier MODEL --texts TEXTS --out DIR --prompts FILES [--chat]

COMPARISON is a recipe of `redraft train all`, whose `rates` are learning rates: each run is trained with each of them
on the first seed, and goes on with the best one for all seeds. What is finished is not done again, so that a command
which was killed continues.

Each method has two figures, both over outputs that do not loop (and over all of them):

tau     tokens of a step that drafted, with the whole tree that the drafter was built for and no controller. This is
        what the papers report. Lyanna resamples in place of drafting where it can, as its method is.
speed   times plain decoding's, with the default controller. This is what users get.

Both are of the first seed's drafters; `chain_tokens` is of all seeds: tokens of a step with chains of the depth that
acceptance is measured to for every method, on held-out text.

Methods take turns on every prompt. With `--acceptance rejection`, as in the papers, texts differ between methods, but
not their distribution. Intervals are paired bootstraps over prompts; `tau_over_base` and `speed_over_base` compare with
the recipe's first run. A method is ahead of another one only if its interval is.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from redraft.bench.command import as_json, budget, markdown_table, one_line_errors
from redraft.bench.compare import Run, Settings, by_kind, compare, times_as_fast, totals_of
from redraft.bench.environment import environment
from redraft.bench.prompts import ALL, BenchPrompt, load_prompts
from redraft.bench.statistics import Speedup, Timing, interval_text, speedup
from redraft.errors import UsageError
from redraft.files import write_json
from redraft.runtime import Budget, Runtime, SamplingParams, SpeculationParams
from redraft.runtime.params import ACCEPTANCE, COUPLED

if TYPE_CHECKING:
    from redraft.train.compare import CompareRecipe
    from redraft.train.compare_results import Result

WHOLE = Budget(nodes=64, depth=24, width=16)
"""More than any drafter's trees: each has its own size."""
_FIXED = "{} fixed"
Json = dict[str, Any]


def train(  # noqa: PLR0913 - facts of a comparison
    comparison: str, runs: Sequence[str], seeds: Sequence[int], verifier: str, sources: Mapping[str, str],
    texts: Path | None, out: Path,
) -> list[Json]:  # fmt: skip
    """Train runs and seeds of a comparison at their best rates, all if none is named. Returns a record for each run.

    It belongs into a process of its own, since it imports torch. Raises as `train_all`.
    """
    from redraft.assembly.models import find_checkpoint
    from redraft.train.compare import CompareRecipe, chosen, train_all
    from redraft.train.publish import publish_drafter
    from redraft.train.verifier_model import fast_dtype

    recipe = chosen(CompareRecipe.load(comparison), runs, seeds)
    folder = Path(verifier)
    checkpoint = folder if folder.is_dir() else find_checkpoint(verifier, _report)

    def run(tried: CompareRecipe) -> list[Result]:
        def begun(name: str, seed: int) -> None:
            _report(f"{name}, seed {seed}")

        return train_all(tried, checkpoint, sources, out, texts=texts, dtype=fast_dtype("cpu"), begun=begun)

    best = recipe
    if recipe.rates:
        best = recipe.at_best_rates(run(recipe.at_every_rate()))
    results = run(best)
    records = []
    for name, table in best.runs.items():
        own = [result for result in results if result.name == name]
        word = _word(name)
        drafter = out / "drafters" / word
        depth = min(len(shares) for result in results for shares in result.acceptance.values())
        publish_drafter(out / f"{name}.{best.seeds[0]}", drafter)
        tokens = [result.tokens_of(depth) for result in own]
        records.append(
            {
                "name": word,
                "run": name,
                "build": table.build,
                "drafter": str(drafter),
                "method": table.decoded_by or table.method,
                "rate": best.recipe_of(name, best.seeds[0]).lr,
                "seeds": len(own),
                "parameters": own[0].parameters,
                "tokens": own[0].tokens,
                "minutes": round(fmean(result.seconds for result in own) / 60, 1),
                "chain_tokens": {"depth": depth, "mean": fmean(tokens), "least": min(tokens), "most": max(tokens)},
            }
        )
    return records


def _word(name: str) -> str:
    """Return a run's name as a drafter's."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def build(verifier: str, records: Sequence[Json], precision: str, out: Path) -> Path:
    """Build all drafters into one bundle of this precision. Returns its folder."""
    from redraft.assembly.bundle import build_bundles
    from redraft.assembly.options import BuildRequest

    drafters = tuple(
        ",".join(filter(None, (f"{one['name']}={one['drafter']}", f"method={one['method']}", one["build"])))
        for one in records
    )
    request = BuildRequest(
        verifier, out / f"engines-{_word(precision)}", precision=precision, drafters=drafters, texts={}
    )
    (built,) = build_bundles(request, lambda message: None)
    return built.out


def measure(
    bundle: Path, names: Sequence[str], prompts: Sequence[BenchPrompt], settings: Settings, limits: Budget,
    threads: int | None,
) -> Json:  # fmt: skip
    """Return the figures of all methods of a bundle, by kind of prompt and over all.   limits: of fixed trees."""
    ways = {_FIXED.format(name): SpeculationParams(name, budget=limits, controller="fixed") for name in names}
    with Runtime.open(bundle, threads=threads) as runtime:
        runs = compare(runtime, prompts, [*ways, *names], replace(settings, ways=ways), _report)
    return figures(runs, names)


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def figures(runs: Sequence[Run], names: Sequence[str]) -> Json:
    """Return the figures over all outputs that do not loop, over all, and by kind of those that do not loop."""
    steady = [run for run in runs if not run.loops]
    differing = sum(one.token_ids != run.answer for run in runs for one in run.generations.values())
    return {
        "outputs": len(runs),
        "looping_outputs": len(runs) - len(steady),
        "differing_outputs": differing,
        "not_looping": {name: _figures(steady, name, names[0]) for name in names},
        ALL: {name: _figures(runs, name, names[0]) for name in names},
        "kinds": {
            kind: {name: _figures(some, name, names[0]) for name in names} for kind, some in by_kind(steady).items()
        },
    }


def _figures(runs: Sequence[Run], name: str, base: str) -> Json:
    timed = [run for run in runs if run.timed]
    if not timed:
        return {"prompts": 0}
    fixed = totals_of(timed, _FIXED.format(name))
    drafting = [run for run in timed if all(_steps(run, one).seconds for one in (name, base))]
    tau = {"tau": 1 + fixed.accepted / fixed.drafts, "drafted": fixed.draft_length} if fixed.drafts else {}
    return {
        "prompts": len(timed),
        **tau,
        **({"tau_over_base": _ratio(_tau_over(drafting, name, base))} if drafting else {}),
        "fixed_speed": _ratio(times_as_fast(timed, [_FIXED.format(name)])),
        "speed": _ratio(times_as_fast(timed, [name])),
        "speed_over_base": _ratio(times_as_fast(timed, [name], [base])),
    }


def _steps(run: Run, name: str) -> Timing:
    """Return the tokens of steps that drafted, and their number in place of seconds."""
    metrics = run.generations[_FIXED.format(name)].metrics
    return Timing(metrics.num_spec_steps + metrics.num_accepted_draft_tokens, metrics.num_spec_steps)


def _tau_over(runs: Sequence[Run], name: str, base: str) -> Speedup:
    return speedup([_steps(run, base) for run in runs], [_steps(run, name) for run in runs], [r.prompt for r in runs])


def _ratio(found: Speedup) -> Json:
    return {"ratio": found.ratio, "interval": found.interval}


def table(records: Sequence[Json], measured: Mapping[str, Json]) -> str:
    """Return the figures of all bundles as a table of Markdown."""
    depth = records[0]["chain_tokens"]["depth"]
    rows = [["method", "parameters", "tokens", "minutes", f"chains of {depth}, seeds"]]
    for precision in measured:
        rows[0] += [f"{precision}: τ", "over the first", "speed", "least kind"]
    for record in records:
        chain = record["chain_tokens"]
        row = [
            record["run"], f"{record['parameters'] / 1e6:.2f} M", f"{record['tokens'] / 1e6:.2f} M",
            f"{record['minutes']:g}", f"{chain['mean']:.3f} ({chain['least']:.3f} to {chain['most']:.3f})",
        ]  # fmt: skip
        for found in measured.values():
            own = found["not_looping"][record["name"]]
            kinds = {kind: each[record["name"]].get("speed") for kind, each in found["kinds"].items()}
            least = min([(speed["ratio"], kind) for kind, speed in kinds.items() if speed], default=None)
            row += [
                f"{own['tau']:.2f}" if "tau" in own else "-", _text(own.get("tau_over_base")), _text(own.get("speed")),
                f"{least[0]:.2f} {least[1]}" if least else "-",
            ]  # fmt: skip
        rows.append(row)
    return markdown_table(rows)


def _text(found: Json | None) -> str:
    return "-" if found is None else f"{found['ratio']:.2f} ({interval_text(found['interval'])})"


def main() -> None:
    """Train, build, measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", help="a comparison of redraft, or a .toml file")
    parser.add_argument("--verifier", required=True, help="as MODEL of `redraft build`")
    parser.add_argument("--texts", type=Path, help="a folder of `redraft train text` or `states`, instead of --data")
    parser.add_argument("--data", action="append", default=[], help="KIND=SOURCE, once for each kind")
    parser.add_argument("--runs", default="", help="some of the comparison's, separated by commas")
    parser.add_argument("--seeds", type=int, nargs="+", default=[], help="instead of the comparison's")
    parser.add_argument("--out", type=Path, required=True, help="texts, runs, drafters, bundles and figures")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSON lines")
    parser.add_argument("--limit", type=int, help="at most this many prompts of each kind")
    parser.add_argument("--chat", action="store_true", help="prompts are conversations")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--acceptance", choices=ACCEPTANCE, default=COUPLED, help="above temperature 0")
    parser.add_argument("--budget", type=budget, default=WHOLE, help="of a fixed tree; each drafter's own by default")
    parser.add_argument(
        "--precision", nargs="+", default=["fp32", "int8"], help="of each bundle, as `redraft build` has"
    )
    parser.add_argument("--threads", type=int, help="to decode with")
    parser.add_argument("--markdown", action="store_true", help="print a table")
    asked = parser.parse_args()
    from redraft.assembly.options import parse_precisions
    from redraft.train.data import parse_sources

    if bool(asked.texts) == bool(asked.data):
        raise UsageError("the texts come from --texts or from --data", "give one of them")
    if any(len(parse_precisions(one)) > 1 for one in asked.precision):  # before anything slow
        raise UsageError("each --precision is that of one bundle", "separate them by spaces")
    if asked.acceptance != COUPLED and not asked.temperature:
        raise UsageError(f"--acceptance {asked.acceptance} is for drawn tokens", "give a --temperature above 0")
    params = SamplingParams(
        temperature=asked.temperature, max_tokens=asked.max_new_tokens, seed=0, acceptance=asked.acceptance
    )
    settings, prompts = Settings(params, chat=asked.chat), load_prompts(asked.prompts, asked.limit)
    with ProcessPoolExecutor(1, get_context("spawn")) as other:
        sources = parse_sources(asked.data)
        runs = [name for name in asked.runs.split(",") if name]
        records = other.submit(
            train, asked.comparison, runs, asked.seeds, asked.verifier, sources, asked.texts, asked.out
        ).result()
        bundles = {
            precision: other.submit(build, asked.verifier, records, precision, asked.out).result()
            for precision in asked.precision
        }
    measured = {
        precision: measure(
            bundle, [record["name"] for record in records], prompts, settings, asked.budget, asked.threads
        )
        for precision, bundle in bundles.items()
    }
    if asked.acceptance != COUPLED:
        for found in measured.values():
            del found["differing_outputs"]  # texts differ by design
    sampling = {"temperature": asked.temperature, "acceptance": asked.acceptance}
    result = {
        "environment": environment(), "sampling": sampling, "base": records[0]["run"], "runs": records,
        "measured": measured,
    }  # fmt: skip
    write_json(asked.out / "family.json", json.loads(json.dumps(result)))
    print(table(records, measured) if asked.markdown else as_json(result))


if __name__ == "__main__":
    with one_line_errors():
        main()
