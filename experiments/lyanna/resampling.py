"""Figure 12 of Lyanna's paper: decoding with fresh drafts alone and with resampling, prompt by prompt in one process.

Every variant is its own runtime over the same bundle, without n-gram lookup. A ratio is of two decodings of one prompt.
Traces of a second, untimed pass give the resampled trees and their results.
"""

from __future__ import annotations

import argparse
import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TextIO

from experiments.lyanna.text import note
from redraft.bench.compare import FEWEST_TOKENS, Settings, first_turn, in_turns, timing
from redraft.bench.environment import environment
from redraft.bench.prompts import BenchPrompt, load_prompts
from redraft.bench.statistics import interval_text, rate_text, ratio_text, speedup
from redraft.methods.lyanna import METHOD
from redraft.runtime import Budget, Generation, Runtime, SamplingParams, SpeculationParams
from redraft.runtime.trace import Replay, replay
from redraft.types import OfferKind

FRESH = "fresh only"
MADE = (OfferKind.FRESH, OfferKind.RESAMPLE)


@dataclass(frozen=True)
class Variant:
    """The controller of a tree's size (`fixed` or `adaptive`), and the drafts it comes from."""

    controller: str
    drafts: str

    def __str__(self) -> str:
        return f"{self.controller}, {self.drafts}"


Decode = Callable[[BenchPrompt], Generation]
Decoded = dict[Variant, list[Generation]]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Decode the prompts by all variants. Raises UsageError if the bundle has no such drafter."""
    prompts = load_prompts(options.prompts, options.limit)
    settings = Settings(SamplingParams(max_tokens=options.max_new_tokens), chat=options.chat)
    budgets: dict[str, Budget | None] = {"fixed": options.budget, "adaptive": None}
    with ExitStack() as stack:
        runtimes = {}
        for name, chosen in drafter_settings(options.thresholds).items():
            opened = Runtime.open(options.engines, threads=options.threads, drafter_options={METHOD.id: chosen})
            runtimes[name] = stack.enter_context(opened)

        def decode(variant: Variant, prompt: BenchPrompt, trace: TextIO | None = None) -> Generation:
            runtime = runtimes[variant.drafts]
            how = SpeculationParams(METHOD.id, budget=budgets[variant.controller])
            ids = first_turn(runtime, prompt, settings)
            return runtime.generate([ids], settings.params, how, trace=trace)[0]

        def traced(variant: Variant, prompt: BenchPrompt) -> Replay:
            file = io.StringIO()
            decode(variant, prompt, file)
            return replay(file.getvalue().splitlines())

        variants = [Variant(controller, drafts) for controller in budgets for drafts in runtimes]
        decoded = decode_in_turns({variant: partial(decode, variant) for variant in variants}, prompts)
        note("tracing")
        traces = {variant: [traced(variant, prompt) for prompt in prompts] for variant in variants}
    return {
        "environment": environment(options.threads),
        "budget": asdict(options.budget),
        "prompts": len(prompts),
        "max_new_tokens": options.max_new_tokens,
        "chat": options.chat,
        "controllers": {
            controller: {drafts: _figures(Variant(controller, drafts), decoded, traces, prompts) for drafts in runtimes}
            for controller in budgets
        },
    }


def drafter_settings(thresholds: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Return the drafter's options by variant."""
    resampling = {f"resampling, r = {r}": {"resample": True, "threshold": r} for r in thresholds}
    return {FRESH: {"resample": False}, **resampling}


def decode_in_turns(decoders: Mapping[Variant, Decode], prompts: Sequence[BenchPrompt]) -> Decoded:
    """Decode every prompt by every variant, after an uncounted warm-up."""
    decoded: Decoded = {variant: [] for variant in decoders}
    kinds = [prompt.kind for prompt in prompts]
    orders = in_turns(list(decoders), kinds, lambda variant: decoders[variant](prompts[0]), note)
    for prompt, order in zip(prompts, orders, strict=True):
        for variant in order:
            decoded[variant].append(decoders[variant](prompt))
    return decoded


def _figures(
    variant: Variant, decoded: Decoded, traces: Mapping[Variant, list[Replay]], prompts: Sequence[BenchPrompt]
) -> dict[str, Any]:
    """Return speed, pairs against fresh drafts alone, and figures of the traces."""
    fresh = decoded[Variant(variant.controller, FRESH)]
    found = speed(decoded[variant], fresh)
    if variant.drafts != FRESH:
        kinds = sorted({prompt.kind for prompt in prompts})
        places = {kind: [i for i, prompt in enumerate(prompts) if prompt.kind == kind] for kind in kinds}
        found["kinds"] = {
            kind: speed([decoded[variant][i] for i in some], [fresh[i] for i in some]) for kind, some in places.items()
        }
    return {**found, **sources(traces[variant])}


def speed(generations: Sequence[Generation], against: Sequence[Generation]) -> dict[str, Any]:
    """Return speed and acceptance, and the ratio of speeds to another variant (`speedup`) with its interval.

    Outputs too short to time take no part in speed.
    """
    pairs = [
        (timing(one), timing(other))
        for one, other in zip(generations, against, strict=True)
        if min(len(one.token_ids), len(other.token_ids)) >= FEWEST_TOKENS
    ]
    ratio = speedup([other for _, other in pairs], [one for one, _ in pairs]) if pairs else None
    steps = sum(g.metrics.num_steps for g in generations)
    accepted = sum(g.metrics.num_accepted_draft_tokens for g in generations)
    return {
        "tokens_per_second": ratio and ratio.rate,
        "over_fresh": ratio and ratio.to_json(),
        "mean_acceptance_length": 1 + accepted / max(steps, 1),
        "other_texts": sum(a.token_ids != b.token_ids for a, b in zip(generations, against, strict=True)),
    }


def sources(traces: Sequence[Replay]) -> dict[str, Any]:
    """Return the share of steps with a resampled tree; by source, the trees' nodes and accepted nodes."""
    steps, nodes, accepted = Counter[str](), Counter[str](), Counter[str]()
    for played in traces:
        steps.update(played.steps)
        nodes.update(played.nodes)
        accepted.update(played.accepted)
    return {
        "resampled_steps": steps[OfferKind.RESAMPLE] / max(steps.total(), 1),
        "trees": {
            str(source): {
                "steps": steps[source],
                "nodes_per_tree": nodes[source] / steps[source],
                "accepted_per_tree": accepted[source] / steps[source],
            }
            for source in MADE
            if steps[source]
        },
    }


def tables(result: dict[str, Any]) -> dict[str, list[list[str]]]:
    """Return a line for each controller and variant, then ratios by kind."""
    rows = [
        ["controller", "drafts", "tokens/s", "over fresh", "95 % interval", "τ", "resampled steps", "fresh trees",
         "resampled trees", "other texts"]
    ]  # fmt: skip
    by_kind = [["controller", "drafts", "kind", "over fresh", "95 % interval", "τ"]]
    for controller, variants in result["controllers"].items():
        for drafts, found in variants.items():
            rate = "-" if found["tokens_per_second"] is None else rate_text(found["tokens_per_second"])
            trees = [_tree(found["trees"].get(source)) for source in MADE]
            tau, share = f"{found['mean_acceptance_length']:.3f}", f"{100 * found['resampled_steps']:.1f} %"
            ratio = _ratio(found["over_fresh"])
            rows.append([controller, drafts, rate, *ratio, tau, share, *trees, str(found["other_texts"])])
            by_kind += [
                [controller, drafts, kind, *_ratio(part["over_fresh"]), f"{part['mean_acceptance_length']:.3f}"]
                for kind, part in found.get("kinds", {}).items()
            ]
    budget = ", ".join(f"{name} {value}" for name, value in result["budget"].items())
    title = f"resampling over {result['prompts']} prompts (fixed: {budget}); trees: accepted of verified nodes a tree"
    return {title: rows, "by kind": by_kind}


def _ratio(estimate: dict[str, Any] | None) -> list[str]:
    if estimate is None:
        return ["-", "-"]
    ratio = ratio_text(estimate["rate"], estimate["base_rate"], digits=3)
    return [ratio, interval_text(estimate["interval"], digits=3)]


def _tree(found: dict[str, float] | None) -> str:
    return f"{found['accepted_per_tree']:.2f} of {found['nodes_per_tree']:.1f}" if found else "-"
