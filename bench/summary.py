"""Runs of a comparison to figures: speed from pairs, acceptance, losslessness; over all outputs and without loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from redraft.bench.break_even import measured
from redraft.bench.compare import INEXACT, PLAIN, Run
from redraft.bench.prompts import ALL
from redraft.bench.statistics import first_difference, interval_text, median_estimate
from redraft.runtime import Generation

NEAR_TIE = 1e-4
"""Two logits closer than this may change places between two kernels of one product."""
FEWEST_TOKENS = 8
"""Shorter outputs are too short to time and take no part in ratios."""
HEADER = ("method", "kind", "tokens/s", "speed", "95 % interval", "τ", "overhead", "timed", "looping", "same as plain")
GapOf = Callable[[Run, int], float | None]


@dataclass(frozen=True)
class Outcome:
    """A run, and the first difference of one method's output from the plain one: None if equal, or if forced."""

    run: Run
    difference: Mapping[str, Any] | None = None


def summarise(runs: Sequence[Run], margin_of: GapOf, synthetic: bool = False) -> dict[str, Any]:
    """Return figures by method.

    margin_of: logit margin of the plain output's token of this index over the runner-up; None past its end.
    """
    methods = list(runs[0].generations)
    methods.sort(key=lambda method: method != PLAIN)
    return {method: _method(runs, method, margin_of, synthetic and method != PLAIN) for method in methods}


def _method(runs: Sequence[Run], method: str, margin_of: GapOf, synthetic: bool) -> dict[str, Any]:
    if synthetic:
        return {"synthetic_acceptance": True, **_sections([Outcome(run) for run in runs], method, compared=False)}
    if method == INEXACT:  # inexact decoding promises no text, so its near-ties mean nothing

        def margin_of(run: Run, token: int) -> None:
            return None

    outcomes = [Outcome(run, difference(run, method, margin_of)) for run in runs]
    kinds = sorted({run.prompt.kind for run in runs})
    return {
        **_sections(outcomes, method),
        "differences": [each.difference for each in outcomes if each.difference],
        "kinds": {kind: _sections([o for o in outcomes if o.run.prompt.kind == kind], method) for kind in kinds},
    }


def _sections(outcomes: Sequence[Outcome], method: str, compared: bool = True) -> dict[str, Any]:
    """Return figures over all outcomes and, as `not_looping`, over those whose plain output does not loop."""
    steady = [each for each in outcomes if not each.run.loops]
    return {
        **_section(outcomes, method, compared),
        "looping_outputs": len(outcomes) - len(steady),
        "not_looping": _section(steady, method, compared),
    }


def _section(outcomes: Sequence[Outcome], method: str, compared: bool) -> dict[str, Any]:
    identity = _identity(outcomes) if compared else {"identical_to_plain": None}
    return {**_figures([each.run for each in outcomes], method), **identity, "outputs": len(outcomes)}


def _figures(runs: Sequence[Run], method: str) -> dict[str, Any]:
    """Return speed, acceptance and overhead over the runs that are long enough to time.

    `prompts` counts these runs. In a chat every turn has a prompt of its own, the conversation until there. Turns of a
    conversation depend on each other, so that the interval is over conversations.
    """
    timed = [run for run in runs if min(_length(g) for g in run.generations.values()) >= FEWEST_TOKENS]
    if not timed:
        return {"prompts": 0, "tokens": 0}
    pairs = [(run.generations[PLAIN].metrics, run.generations[method].metrics) for run in timed]
    rates = [other.decode_tokens_per_second for _, other in pairs]
    seconds = np.array([(_length(run.generations[method]) - 1) / rate for run, rate in zip(timed, rates, strict=True)])
    overheads = np.array([other.overhead_fraction for _, other in pairs])
    speedup = median_estimate(
        [other.decode_tokens_per_second / plain.decode_tokens_per_second for plain, other in pairs],
        clusters=[run.prompt for run in timed],
    )
    steps = sum(other.num_steps for _, other in pairs)
    drafted = sum(other.num_draft_tokens for _, other in pairs)
    accepted = sum(other.num_accepted_draft_tokens for _, other in pairs)
    return {
        "tokens_per_second": float(np.median(rates)),
        "speedup": speedup.median,
        "speedup_interval": speedup.interval,
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        **measured(pairs),
        "overhead_fraction": float(seconds @ overheads / seconds.sum()),
        "prompts": len(timed),
        "tokens": sum(_length(run.generations[method]) for run in timed),
    }


def difference(run: Run, method: str, margin_of: GapOf) -> dict[str, Any] | None:
    """Return the first token that differs from plain decoding, and its logit margin; None if all are equal."""
    place = first_difference(run.generations[PLAIN].token_ids, run.generations[method].token_ids)
    if place is None:
        return None
    gap = margin_of(run, place)
    near = gap is not None and gap < NEAR_TIE
    return {"prompt": run.prompt.id, "turn": run.turn, "token": place, "logit_margin": gap, "near_tie": near}


def _identity(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return whether every output equals the plain one, or differs only at near-ties; None without outputs."""
    if not outcomes:
        return {"identical_to_plain": None, "lossless": None, "differing_outputs": 0}
    differences = [each.difference for each in outcomes if each.difference]
    lossless = all(difference["near_tie"] for difference in differences)
    return {"identical_to_plain": not differences, "lossless": lossless, "differing_outputs": len(differences)}


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
        f"{figures['tokens_per_second']:.0f}",
        f"{figures['speedup']:.2f}",
        interval_text(*(figures["speedup_interval"] or (None, None))),
        f"{figures['mean_acceptance_length']:.2f}",
        f"{100 * figures['overhead_fraction']:.1f} %",
        str(figures["prompts"]),
    ]


def _length(generation: Generation) -> int:
    return len(generation.token_ids)
