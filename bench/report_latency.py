"""What a draft's parts cost, and logits in one pass or one after another: Lyanna's Figure 13."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TOGETHER = "all"
"""The stages of a draft's logits in one graph."""


def tables(result: dict[str, Any]) -> dict[str, list[list[str]]]:
    """Return tables: logits by N, calls against verification, a draft's parts, and drafts computed from parts.

    result: what `python -m experiments.lyanna latency --json` prints.
    """
    first = next(iter(result["logits_ms"].values()))["one_pass"]
    stages = [stage for stage in first if stage != TOGETHER]
    logits = [["N", "way", *(f"{stage} ms" for stage in stages), "together ms", "least ms"]]
    for count, ways in result["logits_ms"].items():
        for way, taken in ways.items():
            cells = [f"{taken[stage]['median']:.4f}" for stage in (*stages, TOGETHER)]
            logits.append([count, way.replace("_", " "), *cells, f"{taken[TOGETHER]['least']:.4f}"])
    one = result["turns_ms"]["t(1)"]
    computed = [["draft", "ms", "of t(1)"]]
    computed += [
        [name.replace("_", " "), f"{ms:.4f}", f"{ms / one['median']:.3f}"]
        for name, ms in result["computed_from_parts_ms"].items()
    ]
    draft = f"one draft of {result['steps']} steps"
    return {
        "logits of N steps: one pass of N rows against N passes of one row": logits,
        "calls in turn with the verifier": _shares("call", result["turns_ms"], "t(1)"),
        f"{draft}, by graphs cut after each part": _shares("part", result["parts_ms"], "draft"),
        f"{draft}, profiled, which makes every kernel slower": _shares("part", result["profile_ms"], "call"),
        "drafts computed from measured parts (medians), not run": computed,
    }


def _shares(what: str, found: Mapping[str, Mapping[str, float]], whole: str) -> list[list[str]]:
    rows = [[what, "median ms", "least ms", f"median of {whole}", f"least of {whole}"]]
    for name, taken in found.items():
        kinds = ("median", "least")
        rows.append([name, *(f"{taken[k]:.4f}" for k in kinds), *(f"{taken[k] / found[whole][k]:.3f}" for k in kinds)])
    return rows
