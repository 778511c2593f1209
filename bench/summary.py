"""Runs of a comparison to figures: speed from pairs, acceptance, losslessness; over all outputs and without loops.

Also what acceptance and costs allow. A step that verifies n tokens (the root included) commits τ of them and costs t(n)
plus drafting. Plain decoding commits one token for t(1). So no speculation can be faster than τ·t(1) / (t(n) + draft)
times plain decoding. Here t(n) and the cost of drafting are means over the sizes that the steps really had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from redraft.bench.compare import INEXACT, PLAIN, Run, Totals, times_as_fast, totals_of
from redraft.bench.prompts import ALL
from redraft.bench.statistics import (
    LONGEST_PERIOD,
    LOOP_TOKENS,
    first_difference,
    interval_text,
    rate_text,
    ratio_text,
)
from redraft.engines.draft_costs import least_accepted
from redraft.runtime import Runtime, SamplingParams

NEAR_TIE = 1e-4
"""Two logits closer than this may change places between two kernels of one product."""
HEADER = ("method", "kind", "tokens/s", "speed", "95 % interval", "τ", "overhead", "timed", "looping", "same as plain")
MarginOf = Callable[[Run, int], float | None]
"""Returns the logit margin of a plain output's token of this index over the runner-up; None past its end."""
Compared = tuple[Run, Mapping[str, Any] | None]
"""A run, and the first difference of one method's output from the plain one: None if equal, or if forced."""


def margin_finder(runtime: Runtime, params: SamplingParams) -> MarginOf:
    """Return a function that computes logit margins of plain decoding by decoding the prompt again."""

    def margin_of(run: Run, token: int) -> float | None:
        (again,) = runtime.generate([run.token_ids], params, PLAIN, record_logit_margins=True)
        margins = again.logit_margins or ()
        return margins[token] if token < len(margins) else None

    return margin_of


def summarise(runs: Sequence[Run], margin_of: MarginOf, synthetic: bool = False) -> dict[str, Any]:
    """Return figures by method, plain decoding first. synthetic: acceptance was forced, so texts are not compared."""
    methods = sorted(runs[0].generations, key=lambda method: method != PLAIN)
    return {method: _method(runs, method, margin_of, synthetic and method != PLAIN) for method in methods}


def difference(run: Run, method: str, margin_of: MarginOf) -> dict[str, Any] | None:
    """Return the first token that differs from plain decoding, and its logit margin; None if all are equal."""
    token = first_difference(run.answer, run.generations[method].token_ids)
    if token is None:
        return None
    margin = None if method == INEXACT else margin_of(run, token)  # inexact decoding promises no text
    near = margin is not None and margin < NEAR_TIE
    return {"prompt": run.prompt.id, "turn": run.turn, "token": token, "logit_margin": margin, "near_tie": near}


def _method(runs: Sequence[Run], method: str, margin_of: MarginOf, synthetic: bool) -> dict[str, Any]:
    if synthetic:
        return {"synthetic_acceptance": True, **_sections([(run, None) for run in runs], method, compared=False)}
    outcomes = [(run, difference(run, method, margin_of)) for run in runs]
    kinds = sorted({run.prompt.kind for run in runs})
    return {
        **_sections(outcomes, method),
        "differences": [differs for _, differs in outcomes if differs],
        "kinds": {kind: _sections([o for o in outcomes if o[0].prompt.kind == kind], method) for kind in kinds},
    }


def _sections(outcomes: Sequence[Compared], method: str, compared: bool = True) -> dict[str, Any]:
    """Return figures over all outcomes and, as `not_looping`, over those whose plain output does not loop."""
    steady = [each for each in outcomes if not each[0].loops]
    whole, not_looping = (
        {
            **_figures([run for run, _ in some], method),
            **(_identity(some) if compared else {"identical_to_plain": None}),
            "outputs": len(some),
        }
        for some in (outcomes, steady)
    )
    return {**whole, "looping_outputs": len(outcomes) - len(steady), "not_looping": not_looping}


def _figures(runs: Sequence[Run], method: str) -> dict[str, Any]:
    """Return speed, acceptance and overhead over the runs that are long enough to time.

    `prompts` counts these runs. In a chat every turn has a prompt of its own, the conversation until there.
    """
    timed = [run for run in runs if run.timed]
    if not timed:
        return {"prompts": 0, "tokens": 0}
    ratio, totals = times_as_fast(timed, [method]), totals_of(timed, method)
    return {
        "tokens_per_second": ratio.rate,
        "plain_tokens_per_second": ratio.base_rate,
        "speedup": ratio.ratio,
        "speedup_interval": ratio.interval,
        "mean_acceptance_length": totals.tau,
        "draft_acceptance_rate": totals.acceptance,
        **break_even(totals_of(timed, PLAIN), totals),
        "overhead_fraction": totals.overhead / totals.seconds,
        "prompts": len(timed),
        "tokens": totals.tokens,
    }


def _identity(outcomes: Sequence[Compared]) -> dict[str, Any]:
    """Return whether every output equals the plain one, or differs only at near-ties; None without outputs."""
    if not outcomes:
        return {"identical_to_plain": None, "lossless": None, "differing_outputs": 0}
    differences = [differs for _, differs in outcomes if differs]
    lossless = all(differs["near_tie"] for differs in differences)
    return {"identical_to_plain": not differences, "lossless": lossless, "differing_outputs": len(differences)}


def achieved(runs: Sequence[Run], method: str, table_ms: Sequence[float]) -> dict[str, Any]:
    """Return the reached speed, its bound τ·t(1) / (t(n) + draft) and their ratio; `table_ms[n]` is t(n)."""
    totals, reached = totals_of(runs, method), times_as_fast(runs, [method])
    histograms = [run.generations[method].metrics.size_histogram for run in runs]
    nodes_ms = sum(count * table_ms[n] for each in histograms for n, count in enumerate(each) if count)
    one_ms, many_ms, drafting_ms = table_ms[1], nodes_ms / totals.steps, totals.drafting_ms / totals.steps
    bound = totals.tau * one_ms / (many_ms + drafting_ms)
    return {
        "mean_acceptance_length": totals.tau,
        "verification_ms": {"one": one_ms, "step": many_ms},
        "draft_ms": drafting_ms,
        "speedup": reached.ratio,
        "speedup_interval": reached.interval,
        "bound": bound,
        "share_of_bound": reached.ratio / bound,
        "prompts": len(runs),
    }


def break_even(plain: Totals, own: Totals) -> dict[str, float]:
    """Return mean length and cost of drafted tokens and the acceptance from which they pay; empty without drafts.

    The cost is that of `draft_costs`: the time of all drafting over the tokens that were verified, relative to a plain
    step. Steps without a draft count as plain ones.
    """
    plain_ms = sum(plain.stage_ms.values()) / max(plain.steps, 1)
    if not own.drafts or not plain_ms:
        return {}
    verifying_ms = sum(own.stage_ms.values()) - own.drafting_ms - (own.steps - own.drafts) * plain_ms
    cost = own.drafting_ms / own.drafted / plain_ms
    least = least_accepted(cost, own.draft_length, verifying_ms / own.drafts / plain_ms)
    return {"draft_length": own.draft_length, "draft_cost": cost, "drafts_pay_above": least}


def describe_break_even(figures: Mapping[str, Any]) -> str:
    """Return `break_even` in words, next to the share that was accepted."""
    length, cost, least = (figures[name] for name in ("draft_length", "draft_cost", "drafts_pay_above"))
    return (
        f"drafts of {length:.1f} tokens, each {cost:.2f} times a plain step: they pay if more than "
        f"{100 * max(least, 0):.0f} % are accepted; {100 * figures['draft_acceptance_rate']:.0f} % were"
    )


def table(methods: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return a table: a header, then for each method and kind all outputs, and those that do not loop.

    A kind without looping outputs has one row.
    """
    rows = [list(HEADER)]
    for method, figures in methods.items():
        name = f"{method} (synthetic)" if figures.get("synthetic_acceptance") else method
        rows += _rows(name, ALL, figures)
        for kind, part in figures.get("kinds", {}).items():
            rows += _rows(name, kind, part)[: 2 if part["looping_outputs"] else 1]
    return rows


def _rows(method: str, kind: str, figures: Mapping[str, Any]) -> list[list[str]]:
    """Return a row over all outputs, and one over those that do not loop."""
    steady = figures["not_looping"]
    looping = f"{figures['looping_outputs']} of {figures['outputs']}"
    same = _same(steady) if steady["outputs"] else "every output loops"
    return [
        [method, kind, *_cells(figures), looping, _same(figures)],
        [method, f"{kind}, not looping", *_cells(steady), f"0 of {steady['outputs']}", same],
    ]


def _same(figures: Mapping[str, Any]) -> str:
    if figures["identical_to_plain"] is None:
        return "not compared"
    if figures["identical_to_plain"]:
        return "yes"
    count = figures["differing_outputs"]
    return f"but for {count} near-ties" if figures["lossless"] else f"NO, {count} differ"


def _cells(figures: Mapping[str, Any]) -> list[str]:
    if not figures["prompts"]:
        return ["-", "-", "-", "-", "-", "0"]
    return [
        rate_text(figures["tokens_per_second"]),
        ratio_text(figures["tokens_per_second"], figures["plain_tokens_per_second"]),
        interval_text(figures["speedup_interval"]),
        f"{figures['mean_acceptance_length']:.2f}",
        f"{100 * figures['overhead_fraction']:.1f} %",
        str(figures["prompts"]),
    ]


def describe_loops(plain: Mapping[str, Any]) -> str:
    """Return how many plain outputs loop, in words."""
    return (
        f"plain outputs that loop (the last {LOOP_TOKENS} tokens repeat a period of at most {LONGEST_PERIOD}): "
        f"{plain['looping_outputs']} of {plain['outputs']}"
    )
