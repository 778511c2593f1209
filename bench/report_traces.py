"""Figures from the traces of runs: acceptance by depth, accepted tokens by position, and the controller's estimates.

Acceptance and misaligned tokens by depth are those of GRIFFIN's Figure 1c; acceptance by depth is also Lyanna's
table 1. Accepted tokens by position in the output are SD²'s Figure 5.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from redraft.bench.compare import Run, Settings, speculation
from redraft.bench.turns import Report
from redraft.runtime import Budget, Runtime, SpeculationParams
from redraft.runtime.trace import replay

CHAIN = 5
"""Depth of the drafts whose acceptance is measured by depth, as in GRIFFIN's Figure 1c."""
BIN = 16
"""Positions of the output that make one point of SD²'s Figure 5."""


def depths(
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
            before = file.tell()
            made = runtime.generate([run.token_ids], settings.params, how, trace=file)[0]
            if file.tell() > before:  # a text of one token takes no step, and has no line
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


def traced(
    runtime: Runtime, runs: Sequence[Run], methods: Sequence[str], settings: Settings, report: Report
) -> dict[str, list[list[str]]]:
    """Return by method the lines of a trace of every run whose text does not loop.

    Each run is decoded once more, as it was measured but not timed, since writing a trace takes time.
    """
    found: dict[str, list[list[str]]] = {}
    for name in methods:
        report(f"traces of {name}")
        found[name] = []
        for run in runs:
            if run.loops:
                continue
            file = io.StringIO()
            runtime.generate([run.token_ids], settings.params, speculation(name, settings), trace=file)
            found[name].append(file.getvalue().splitlines())
    return found


def by_position(traces: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Return the accepted drafted tokens of a block by position in the output, in bins of BIN (SD², Figure 5).

    traces: of one request each.
    A block is what one verification adds, and its position is that of its last token, 0 for the output's first token.
    `position` is the middle of a bin, `accepted` the mean over its `blocks`. A bin without blocks is left out.
    """
    blocks, accepted = Counter[int](), Counter[int]()
    for lines in traces:
        prompt = 0
        for line in map(json.loads, lines):
            prompt = len(line["prompt"]) if "prompt" in line else prompt
            if "position" in line:
                place = (line["position"] + len(line["committed"]) - prompt) // BIN
                blocks[place] += 1
                accepted[place] += len(line["path"])
    return [
        {"position": place * BIN + BIN // 2, "accepted": accepted[place] / blocks[place], "blocks": blocks[place]}
        for place in sorted(blocks)
    ]


def estimates(traces: Sequence[Sequence[str]]) -> dict[str, Any] | None:
    """Return tokens a step that the controller's estimates promised, and those that the same steps brought.

    traces: of one request each.   steps: those whose size the controller chose by cost. Returns None without any.
    Raises DataError for a trace that does not follow from its own lines.
    """
    played = [replay(lines) for lines in traces]
    steps = sum(one.weighed for one in played)
    if not steps:
        return None
    return {
        "predicted": 1 + sum(sum(one.expected.values()) for one in played) / steps,
        "measured": 1 + sum(one.observed.total() for one in played) / steps,
        "steps": steps,
    }
