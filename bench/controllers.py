"""Controllers compared over a range of first draft lengths, as in the GammaTune paper (§3, Table 2, Appendix A).

Every controller decodes every prompt once with each first length, all taking turns in one process (`compare`). The
adaptive controller has no first length and decodes once. The baseline is `fixed`, the paper's SpecDecode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, pstdev
from typing import Any

from redraft.bench.compare import PLAIN, Run, Totals, by_kind, times_as_fast, totals_of
from redraft.bench.statistics import interval_text, rate_text, ratio_text
from redraft.errors import UsageError
from redraft.runtime import Budget, SpeculationParams
from redraft.runtime.controllers import ADAPTIVE, FIXED, parse_controller

PAPER_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 24)
"""The first lengths of §5."""
Ways = Mapping[str, Mapping[int, str]]
"""By controller and first length, the name of a way of decoding. ADAPTIVE has one way, under NO_LENGTH."""
NO_LENGTH = 0
_HEAD = ["controller", "tokens/s", "mean rate", "over fixed", "over plain", "over best fixed", "α", "drafted", "τ"]
_EQUATIONS = ["γ", "α", "c (1)", "cost (2), ms", "steps (3, 4)", "drafted (5)", "cost (6), ms", "steps", "drafted",
              "ms"]  # fmt: skip


def ways_of(controllers: Sequence[str], lengths: Sequence[int]) -> dict[str, dict[int, str]]:
    """Return the ways of `fixed` and of these controllers. Raises UsageError for a controller that is unknown."""
    ways: dict[str, dict[int, str]] = {}
    for text in dict.fromkeys((FIXED, *controllers)):
        name, _ = parse_controller(text)
        if "gamma=" in text.replace(" ", ""):
            raise UsageError(f"controller {text!r}: gamma is the first length, which is varied", "leave it out")
        ways[text] = {NO_LENGTH: text} if name == ADAPTIVE else {n: f"{text},gamma={n}" for n in lengths}
    return ways


def speculations(ways: Ways, method: str, budget: Budget | None) -> dict[str, SpeculationParams]:
    """Return how each way decodes. Raises UsageError for an option that its controller refuses."""
    return {
        way: SpeculationParams(method, budget=budget, controller=way) for each in ways.values() for way in each.values()
    }


def figures(runs: Sequence[Run], ways: Ways) -> dict[str, Any]:
    """Return the figures of a comparison, over all runs and by kind.

    Outputs that are too short to time take no part, nor do those that end in a loop, which speculation predicts.
    """
    timed = [run for run in runs if run.timed and not run.loops]
    differing = sum(one.token_ids != run.answer for run in runs for one in run.generations.values())
    counts = {"outputs": len(runs), "timed": len(timed), "differing_outputs": differing}
    if not timed:
        return {**counts, "controllers": {}, "kinds": {}, "equations": []}
    plain = totals_of(timed, PLAIN)
    return {
        **counts,
        "plain_tokens_per_second": plain.rate,
        "controllers": _controllers(timed, ways),
        "kinds": {kind: _controllers(some, ways) for kind, some in by_kind(timed).items()},
        "equations": equations(plain, {length: totals_of(timed, way) for length, way in ways[FIXED].items()}),
    }


def _controllers(runs: Sequence[Run], ways: Ways) -> dict[str, Any]:
    """Return the figures of each controller: Table 2, the first lengths, and paired ratios."""
    fixed_ways = ways[FIXED]
    fixed_rates = {length: totals_of(runs, way).rate for length, way in fixed_ways.items()}
    fixed, best = fmean(fixed_rates.values()), max(fixed_rates, key=lambda length: fixed_rates[length])
    controllers = {}
    for name, own in ways.items():
        lengths = {str(length): _of_a_length(totals_of(runs, way)) for length, way in own.items()}
        rates = [one["tokens_per_second"] for one in lengths.values()]
        over_plain, over_fixed, over_best = (
            asdict(times_as_fast(runs, [*own.values()], base))
            for base in ([PLAIN], [*fixed_ways.values()], [fixed_ways[best]])
        )
        controllers[name] = {
            "tokens_per_second": over_plain["rate"],
            "mean_rate": fmean(rates) / fixed,
            "deviation": pstdev(rates) / fixed,
            "over_fixed": over_fixed,
            "over_plain": over_plain,
            "best_fixed_length": best,
            "over_best_fixed": over_best,
            "lengths": lengths,
            **{
                key: fmean(one[key] for one in lengths.values())
                for key in ("draft_acceptance_rate", "mean_draft_length", "mean_acceptance_length")
            },
        }
    return controllers


def _of_a_length(totals: Totals) -> dict[str, float]:
    """Return the figures of Figure 1 and Appendix A."""
    return {
        "tokens_per_second": totals.rate,
        "draft_acceptance_rate": totals.acceptance,
        "mean_draft_length": totals.draft_length,
        "mean_acceptance_length": totals.tau,
        "steps": totals.steps,
    }


def equations(plain: Totals, fixed: Mapping[int, Totals]) -> list[dict[str, float]]:
    """Return Eq. 1 to 6 of §3 for each fixed length, next to what was measured.

    T_target is the time of plain decoding's calls. T_draft is a draft's time over its length, so that c (Eq. 1) varies
    with the length if one call drafts all tokens. Eq. 3 to 6 assume that every step drafts γ tokens.
    """
    target_ms = plain.stage_ms["verify"] / plain.steps
    rows = []
    for gamma, one in fixed.items():
        draft_ms = one.drafting_ms / (gamma * one.steps)
        steps = one.tokens / (one.acceptance * gamma + 1)
        rows.append({
            "gamma": gamma,
            "alpha": one.acceptance,
            "target_ms": target_ms,
            "draft_ms": draft_ms,
            "eq1_c": target_ms / draft_ms if draft_ms else 0.0,
            "eq2_cost_ms": target_ms * one.steps + draft_ms * gamma * one.steps,
            "eq3_steps": steps,
            "eq4_target_calls": steps,
            "eq5_draft_calls": gamma * steps,
            "eq6_cost_ms": steps * (target_ms + gamma * draft_ms),
            "steps": one.steps,
            "drafted": one.drafted,
            "measured_ms": one.seconds * 1e3,
        })  # fmt: skip
    return rows


def tables(result: Mapping[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """Return titles and rows of the tables that a user reads, headers first."""
    controllers = result["controllers"]
    if not controllers:
        return []
    title = "Table 2: mean rate of first lengths over that of fixed ones ± deviation, then ratios of speeds"
    parts = {f"{kind}: the same": part for kind, part in result["kinds"].items() if len(result["kinds"]) > 1}
    shown = [
        (name, [_HEAD, *(_row(*each) for each in part.items())]) for name, part in {title: controllers, **parts}.items()
    ]
    lengths = list(controllers[FIXED]["lengths"])
    rates = [
        [name, *[f"{one['lengths'][n]['tokens_per_second']:.0f}" if n in one["lengths"] else "-" for n in lengths]]
        for name, one in controllers.items()
    ]
    rows = [
        [str(row["gamma"]), f"{row['alpha']:.2f}", f"{row['eq1_c']:.1f}", f"{row['eq2_cost_ms']:.0f}",
         f"{row['eq3_steps']:.0f}", f"{row['eq5_draft_calls']:.0f}", f"{row['eq6_cost_ms']:.0f}",
         str(row["steps"]), str(row["drafted"]), f"{row['measured_ms']:.0f}"]
        for row in result["equations"]
    ]  # fmt: skip
    return [
        *shown,
        ("Figure 1: tokens a second by first length", [["controller", *lengths], *rates]),
        ("Equations 1 to 6 for fixed lengths, then what was measured", [_EQUATIONS, *rows]),
    ]


def _row(name: str, one: Mapping[str, Any]) -> list[str]:
    ratios = [_ratio_text(one[key]) for key in ("over_fixed", "over_plain", "over_best_fixed")]
    return [name, rate_text(one["tokens_per_second"]), f"{one['mean_rate']:.2f} ± {one['deviation']:.2f}", *ratios,
            f"{one['draft_acceptance_rate']:.2f}", f"{one['mean_draft_length']:.1f}",
            f"{one['mean_acceptance_length']:.2f}"]  # fmt: skip


def _ratio_text(ratio: Mapping[str, Any]) -> str:
    interval = ratio["interval"]
    return ratio_text(ratio["rate"], ratio["base_rate"]) + (f" ({interval_text(interval)})" if interval else "")
