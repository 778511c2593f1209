"""Table 1 of Lyanna's paper by its own measure: which drafts of real decodings are accepted, by step (§7.3).

Every bundle decodes the same prompts without resampling, with trees at most three deep, four wide and of 16 nodes. A
drafter that was built for smaller trees makes those. A step counts if all steps before it were accepted.
"""

from __future__ import annotations

import argparse
import io
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from experiments.lyanna.text import note
from experiments.lyanna.training import percents
from redraft.bench.compare import Settings, first_turn
from redraft.bench.environment import environment
from redraft.bench.prompts import load_prompts
from redraft.engines.manifest import load_manifest
from redraft.methods.lyanna import METHOD
from redraft.runtime import Runtime, SamplingParams, SpeculationParams
from redraft.runtime.trace import Replay, replay
from redraft.types import Budget, OfferKind

TREE = Budget(nodes=16, depth=3, width=4)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Decode the prompts with each bundle; return acceptance by step and the number of drafts, by bundle and kind."""
    prompts = load_prompts(options.prompts, options.limit)
    found: dict[str, Any] = {}
    trees: dict[str, dict[str, int]] = {}
    for folder in options.engines:
        note(f"decoding with {folder}")
        resample = {METHOD.id: {"resample": False}}
        with Runtime.open(folder, threads=options.threads, drafter_options=resample) as runtime:
            trees[str(folder)] = largest_tree(folder)
            settings = Settings(SamplingParams(max_tokens=options.max_new_tokens), chat=options.chat)
            how, kinds = SpeculationParams(METHOD.id, budget=TREE), defaultdict(list)
            for prompt in prompts:
                trace = io.StringIO()
                runtime.generate([first_turn(runtime, prompt, settings)], settings.params, how, trace=trace)
                kinds[prompt.kind].append(replay(trace.getvalue().splitlines()))
        everything = [played for some in kinds.values() for played in some]
        found[str(folder)] = {kind: _figures(some) for kind, some in {**kinds, "all": everything}.items()}
    return {"environment": environment(options.threads), "trees": trees, "bundles": found}


def largest_tree(folder: Path) -> dict[str, int]:
    """Return the limits of a bundle's trees: those of TREE, or its drafter's own if they are smaller."""
    built = METHOD.limits(METHOD.parse_shape(load_manifest(folder).drafters[METHOD.id].shape))
    return {name: min(most, vars(TREE)[name]) for name, most in vars(built).items()}


def _figures(played: list[Replay]) -> dict[str, Any]:
    together = Replay(
        steps=sum((one.steps for one in played), Counter()),
        tried=sum((one.tried for one in played), Counter()),
        correct=sum((one.correct for one in played), Counter()),
    )
    drafts = together.steps[OfferKind.FRESH]
    return {"acceptance": together.conditional_acceptance(OfferKind.FRESH), "drafts": drafts}


def tables(result: dict[str, Any]) -> dict[str, list[list[str]]]:
    """Return one table: rows by kind and bundle, columns by step, and the largest tree's nodes without its root."""
    rows = [["kind", "bundle", *(f"step {step}" for step in range(1, TREE.depth + 1)), "drafts", "nodes"]]
    for name, kinds in result["bundles"].items():
        for kind, found in kinds.items():
            missing = [""] * (TREE.depth - len(found["acceptance"]))
            counts = (found["drafts"], result["trees"][name]["nodes"])
            rows.append([kind, name, *percents(found["acceptance"]), *missing, *map(str, counts)])
    rows[1:] = sorted(rows[1:], key=lambda row: (row[0] == "all", row[0]))
    return {"conditional acceptance in decoding": rows}
