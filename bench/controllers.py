"""Controllers compared over a range of first draft lengths, as in the GammaTune paper (§3, Table 2, Appendix A).

Every controller decodes every prompt once with each first length, all taking turns in one process (`compare`). The
adaptive controller has no first length and decodes once. The baseline is `fixed`, the paper's SpecDecode.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from redraft.bench.compare import PLAIN, Run, Totals, timing
from redraft.bench.statistics import Timing, first_difference, interval_text, rate_text, ratio_text, speedup
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
    counts = {"outputs": len(runs), "timed": len(timed), "differing_outputs": _differing(runs)}
    if not timed:
        return {**counts, "controllers": {}, "kinds": {}, "equations": []}
    kinds = sorted({run.prompt.kind for run in timed})
    return {
        **counts,
        "plain_tokens_per_second": _totals(timed, PLAIN).rate,
        "controllers": _controllers(timed, ways),
        "kinds": {kind: _controllers([run for run in timed if run.prompt.kind == kind], ways) for kind in kinds},
        "equations": equations(
            _totals(timed, PLAIN), {length: _totals(timed, way) for length, way in ways[FIXED].items()}
        ),
    }


def _controllers(runs: Sequence[Run], ways: Ways) -> dict[str, Any]:
    """Return the figures of each controller: Table 2, the first lengths, and paired ratios."""
    totals = {name: {length: _totals(runs, way) for length, way in each.items()} for name, each in ways.items()}
    fixed = fmean(one.rate for one in totals[FIXED].values())
    best = max(totals[FIXED], key=lambda length: totals[FIXED][length].rate)
    controllers = {}
    for name, by_length in totals.items():
        own = list(ways[name].values())
        rates = [one.rate for one in by_length.values()]
        lengths = {str(length): _of_a_length(one) for length, one in by_length.items()}
        over_plain = _ratio(runs, own, [PLAIN])
        controllers[name] = {
            "tokens_per_second": over_plain["rate"],
            "mean_rate": fmean(rates) / fixed,
            "deviation": pstdev(rates) / fixed,
            "over_fixed": _ratio(runs, own, ways[FIXED].values()),
            "over_plain": over_plain,
            "best_fixed_length": best,
            "over_best_fixed": _ratio(runs, own, [ways[FIXED][best]]),
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


def _ratio(runs: Sequence[Run], ways: Iterable[str], base: Iterable[str]) -> dict[str, Any]:
    """Return how many times as fast some ways are as others together, with its interval over prompts."""
    own, others = ([_together(run, some) for run in runs] for some in (list(ways), list(base)))
    return speedup(others, own, [run.prompt for run in runs]).to_json()


def _together(run: Run, ways: Sequence[str]) -> Timing:
    each = [timing(run.generations[way]) for way in ways]
    return Timing(sum(one.tokens for one in each), sum(one.seconds for one in each))


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


def _differing(runs: Sequence[Run]) -> int:
    """Return how many outputs differ from the plain ones."""
    return sum(
        first_difference(run.generations[PLAIN].token_ids, one.token_ids) is not None
        for run in runs
        for one in run.generations.values()
    )


def _totals(runs: Sequence[Run], way: str) -> Totals:
    return Totals.of(run.generations[way] for run in runs)
