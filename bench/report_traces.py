"""Figures from the traces of runs: acceptance by depth, accepted tokens by position, and the controller's estimates.

Acceptance and misaligned tokens by depth are those of GRIFFIN's Figure 1c; acceptance by depth is also Lyanna's
table 1. Accepted tokens by position in the output are SD²'s Figure 5.
"""

from __future__ import annotations

import io
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from redraft.bench.compare import Progress, Run, Settings, speculation
from redraft.runtime import Budget, Runtime, SamplingParams, SpeculationParams
from redraft.runtime.trace import replay

CHAIN = 5
"""Depth of the drafts whose acceptance is measured by depth, as in GRIFFIN's Figure 1c."""
BIN = 16
"""Positions of the output that make one point of SD²'s Figure 5."""


def trace_of(
    runtime: Runtime, token_ids: Sequence[int], params: SamplingParams, how: SpeculationParams
) -> tuple[list[str], list[int]]:
    """Decode once. Return the lines of the trace, none for one token, and the tokens of prompt and output."""
    file = io.StringIO()
    (generation,) = runtime.generate([token_ids], params, how, trace=file)
    return file.getvalue().splitlines(), [*token_ids, *generation.token_ids]


def depths(
    runtime: Runtime, runs: Sequence[Run], methods: Sequence[str], settings: Settings, progress: Progress
) -> dict[str, Any]:
    """Return acceptance by depth of every drafter's chains of at most CHAIN tokens, over texts that do not loop.

    A drafter of trees drafts a deep chain only if it is sure of it. Engines whose drafters draft chains avoid that.
    """
    figures = {}
    for name in methods:
        progress(f"chains of {name}")
        how = SpeculationParams(name, budget=Budget(CHAIN, CHAIN, 1))
        steady = [run for run in runs if not run.loops]
        figures[name] = by_depth([trace_of(runtime, run.token_ids, settings.params, how) for run in steady])
    return figures


def by_depth(traces: Sequence[tuple[Sequence[str], Sequence[int]]]) -> dict[str, Any]:
    """Return figures by depth from 1 of the chains in traces, each with the tokens of its prompt and output.

    drafts:      of at least this depth.   conditional: share that is right, of those that were right before.
    misaligned:  share whose token at this depth is not the text's (Figure 1c).
    """
    drafts, wrong, before, right = (np.zeros(CHAIN, int) for _ in range(4))
    for lines, text in traces:
        for line in map(json.loads, lines):
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
    runtime: Runtime, runs: Sequence[Run], methods: Sequence[str], settings: Settings, progress: Progress
) -> dict[str, list[list[str]]]:
    """Decode every run whose text does not loop once more, not timed. Return by method the lines of the traces."""
    traces: dict[str, list[list[str]]] = {}
    for name in methods:
        progress(f"traces of {name}")
        how = speculation(name, settings)
        traces[name] = [trace_of(runtime, run.token_ids, settings.params, how)[0] for run in runs if not run.loops]
    return traces


def by_position(traces: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Return the accepted drafted tokens of a block by position in the output, in bins of BIN (SD², Figure 5).

    traces: of one request each. A verification adds a block, whose position is that of its last token.
    `position` is the middle of a bin, `accepted` the mean over its `blocks`. A bin without blocks is left out.
    """
    accepted: dict[int, list[int]] = defaultdict(list)
    for lines in traces:
        prompt = 0
        for line in map(json.loads, lines):
            prompt = len(line["prompt"]) if "prompt" in line else prompt
            if "position" in line:
                accepted[(line["position"] + len(line["committed"]) - prompt) // BIN].append(len(line["path"]))
    return [
        {"position": place * BIN + BIN // 2, "accepted": sum(counts) / len(counts), "blocks": len(counts)}
        for place, counts in sorted(accepted.items())
    ]


def estimates(traces: Sequence[Sequence[str]]) -> dict[str, Any] | None:
    """Return tokens a step that the controller's estimates promised, and those that the same steps brought.

    traces: of one request each.   steps: those whose size the controller chose by cost. Returns None without any.
    Raises DataError for a trace that does not follow from its own lines.
    """
    replays = [replay(lines) for lines in traces]
    steps = sum(one.weighed for one in replays)
    if not steps:
        return None
    return {
        "predicted": 1 + sum(sum(one.expected.values()) for one in replays) / steps,
        "measured": 1 + sum(one.observed.total() for one in replays) / steps,
        "steps": steps,
    }
