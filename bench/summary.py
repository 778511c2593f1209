"""Runs of a comparison to figures: speed from pairs, acceptance, losslessness, share of repetition."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from redraft.bench.compare import PLAIN, Run
from redraft.bench.statistics import LOOPING_SHARE, first_difference, is_looping, median_estimate, repeated_share
from redraft.runtime import Generation

NEAR_TIE = 1e-4
"""Two logits closer than this may change places between two kernels of one product."""
FEWEST_TOKENS = 8
"""Shorter outputs say nothing about speed and take no part in ratios."""
GapOf = Callable[[Run, int], float | None]


def summarise(runs: Sequence[Run], gap_of: GapOf, synthetic: bool = False) -> dict[str, Any]:
    """Figures by method.

    gap_of: lead of the plain output's token of this index over the runner-up, in logits; None past its end.
    """
    methods = list(runs[0].generations)
    methods.sort(key=lambda method: method != PLAIN)
    return {method: _method(runs, method, gap_of, synthetic and method != PLAIN) for method in methods}


def _method(runs: Sequence[Run], method: str, gap_of: GapOf, synthetic: bool) -> dict[str, Any]:
    figures = _figures(runs, method)
    if synthetic:
        return {"synthetic_acceptance": True, **figures, "identical_to_plain": None}
    kinds = sorted({run.prompt.kind for run in runs})
    return {
        **figures,
        **_identity(runs, method, gap_of),
        "kinds": {kind: _figures([run for run in runs if run.prompt.kind == kind], method) for kind in kinds},
        "repetition": _repetition(runs, method),
    }


def _figures(runs: Sequence[Run], method: str) -> dict[str, Any]:
    """Speed, acceptance and overhead over the runs that are long enough to say something."""
    timed = [run for run in runs if min(_length(g) for g in run.generations.values()) >= FEWEST_TOKENS]
    if not timed:
        return {"prompts": 0, "tokens": 0}
    pairs = [(run.generations[PLAIN].metrics, run.generations[method].metrics) for run in timed]
    rates = [other.decode_tokens_per_second for _, other in pairs]
    seconds = np.array([(_length(run.generations[method]) - 1) / rate for run, rate in zip(timed, rates, strict=True)])
    overheads = np.array([other.overhead_fraction for _, other in pairs])
    speedup = median_estimate(
        [other.decode_tokens_per_second / plain.decode_tokens_per_second for plain, other in pairs]
    )
    steps = sum(other.num_steps for _, other in pairs)
    drafted = sum(other.num_draft_tokens for _, other in pairs)
    accepted = sum(other.num_accepted_draft_tokens for _, other in pairs)
    return {
        "tokens_per_second": float(np.median(rates)),
        "speedup": speedup.median,
        "speedup_interval": [speedup.low, speedup.high],
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "overhead_fraction": float(seconds @ overheads / seconds.sum()),
        "prompts": len(timed),
        "tokens": sum(_length(run.generations[method]) for run in timed),
    }


def _identity(runs: Sequence[Run], method: str, gap_of: GapOf) -> dict[str, Any]:
    """Whether every output equals the plain one; where one does not, the token and the gap it turned on."""
    differences = []
    for run in runs:
        place = first_difference(run.generations[PLAIN].token_ids, run.generations[method].token_ids)
        if place is not None:
            gap = gap_of(run, place)
            near = gap is not None and gap < NEAR_TIE
            differences.append({"prompt": run.prompt.id, "token": place, "gap": gap, "near_tie": near})
    lossless = all(difference["near_tie"] for difference in differences)
    return {"identical_to_plain": not differences, "lossless": lossless, "differences": differences}


def _repetition(runs: Sequence[Run], method: str) -> dict[str, Any]:
    """Share of repeated 4-grams in the plain outputs, and the figures again without the outputs that loop."""
    outputs = [run.generations[PLAIN].token_ids for run in runs]
    steady = [run for run, output in zip(runs, outputs, strict=True) if not is_looping(output)]
    return {
        "repeated_4gram_share": float(np.mean([repeated_share(output) for output in outputs])),
        "looping_above_share": LOOPING_SHARE,
        "looping_outputs": len(runs) - len(steady),
        "without_looping": _figures(steady, method),
    }


def table(methods: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Rows for reading: a header, then a line a method and kind."""
    rows = [["method", "kind", "tokens/s", "speed", "95 % interval", "τ", "overhead", "prompts", "same as plain"]]
    for method, figures in methods.items():
        name = f"{method} (synthetic)" if figures.get("synthetic_acceptance") else method
        same = "not compared" if figures["identical_to_plain"] is None else _same(figures)
        rows.append([name, "all", *_cells(figures), same])
        rows += [[name, kind, *_cells(part), ""] for kind, part in figures.get("kinds", {}).items()]
        if "repetition" in figures and method != PLAIN:
            rows.append([name, "not looping", *_cells(figures["repetition"]["without_looping"]), ""])
    return rows


def _same(figures: Mapping[str, Any]) -> str:
    if figures["identical_to_plain"]:
        return "yes"
    count = len(figures["differences"])
    return f"but for {count} near-ties" if figures["lossless"] else f"NO, {count} differ"


def _cells(figures: Mapping[str, Any]) -> list[str]:
    if not figures["prompts"]:
        return ["-", "-", "-", "-", "-", "0"]
    low, high = figures["speedup_interval"]
    return [
        f"{figures['tokens_per_second']:.0f}",
        f"{figures['speedup']:.2f}",
        f"{low:.2f} to {high:.2f}",
        f"{figures['mean_acceptance_length']:.2f}",
        f"{100 * figures['overhead_fraction']:.1f} %",
        str(figures["prompts"]),
    ]


def _length(generation: Generation) -> int:
    return len(generation.token_ids)
