"""What the traces of runs say: acceptance by depth of drafted chains.

Acceptance and misaligned tokens by depth are those of GRIFFIN's Figure 1c.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from redraft.bench.compare import Run, Settings
from redraft.bench.turns import Report
from redraft.runtime import Budget, Runtime, SpeculationParams

CHAIN = 5
"""Depth of the drafts whose acceptance is measured by depth, as in GRIFFIN's Figure 1c."""


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
