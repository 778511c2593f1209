"""How near speculation comes to what its acceptance and the cost of verification allow.

    python -m redraft.bench.bound --engines build/engines/tiny --prompts assets/tiny/prompts/code.jsonl \\
        --synthetic-acceptance 0.9,0.8,0.7 --budget nodes=8,depth=4,width=2

A step that verifies n tokens (the root included) commits τ of them and costs t(n) plus drafting, where plain decoding
commits one for t(1): no speculation can be faster than τ·t(1) / (t(n) + draft) times plain. t is measured in the same
process, before and after the prompts; it is the mean over the sizes that the steps really had, as is drafting. Without
--budget the tree's size is chosen at every step, without --synthetic-acceptance by the drafter that --method names.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from redraft.bench.command import budget, rates, run
from redraft.bench.compare import PLAIN, Run, Settings, compare
from redraft.bench.environment import environment
from redraft.bench.prompts import load_prompts
from redraft.bench.statistics import median_estimate
from redraft.runtime import Runtime, SamplingParams
from redraft.runtime.cost import measure_curve


def main() -> dict[str, Any]:
    """Measure what the options ask for."""
    options = _arguments()
    params = SamplingParams(max_tokens=options.max_new_tokens, ignore_eos=True)
    settings = Settings(params, options.budget, options.synthetic_acceptance)
    with Runtime.open(options.engines, threads=options.threads) as runtime:
        method = options.method or ("ngram" if options.synthetic_acceptance else runtime.default_method)
        curves = [measure_curve(runtime.verifier)]
        runs = compare(runtime, load_prompts(options.prompts, options.limit), [method], settings)
        curves.append(measure_curve(runtime.verifier))
    table = np.mean([curve.table_ms for curve in curves], axis=0).tolist()
    return {
        "method": method,
        "synthetic_acceptance": options.synthetic_acceptance,
        "environment": environment(options.threads),
        "budget": asdict(options.budget) if options.budget else None,
        **achieved(runs, method, table),
    }


def achieved(runs: list[Run], method: str, table_ms: Sequence[float]) -> dict[str, Any]:
    """Speed reached, its bound and their ratio, over all runs; `table_ms[n]` is t(n).

    `speedup` is the median of pairs; the share is of the whole run's speed, which is what the bound is about.
    """
    metrics = [run.generations[method].metrics for run in runs]
    steps = sum(m.num_steps for m in metrics)
    acceptance = 1 + sum(m.num_accepted_draft_tokens for m in metrics) / steps
    drafting_ms = sum(m.stage_ms["draft"] + m.stage_ms["resample"] for m in metrics) / steps
    spent = sum(count * table_ms[n] for m in metrics for n, count in enumerate(m.size_histogram) if count)
    one_ms, many_ms = table_ms[1], spent / steps
    pairs = [(run.generations[PLAIN].metrics, run.generations[method].metrics) for run in runs]
    speedup = median_estimate([m.decode_tokens_per_second / plain.decode_tokens_per_second for plain, m in pairs])
    bound = speed_bound(acceptance, one_ms, many_ms, drafting_ms)
    reached = overall_rate(runs, method) / overall_rate(runs, PLAIN)
    return {
        "mean_acceptance_length": acceptance,
        "verification_ms": {"one": one_ms, "step": many_ms},
        "draft_ms": drafting_ms,
        "speedup": speedup.median,
        "speedup_interval": [speedup.low, speedup.high],
        "overall_speedup": reached,
        "bound": bound,
        "share_of_bound": reached / bound,
        "prompts": len(runs),
    }


def overall_rate(runs: list[Run], method: str) -> float:
    """Tokens a second over all prompts together, as τ is a mean over all steps together."""
    tokens = [len(run.generations[method].token_ids) - 1 for run in runs]
    rates = [run.generations[method].metrics.decode_tokens_per_second for run in runs]
    return sum(tokens) / sum(count / rate for count, rate in zip(tokens, rates, strict=True))


def speed_bound(acceptance_length: float, one_ms: float, many_ms: float, draft_ms: float) -> float:
    """τ·t(1) / (t(n) + draft)."""
    return acceptance_length * one_ms / (many_ms + draft_ms)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=Path, required=True, help="an engine bundle")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSON lines")
    parser.add_argument("--budget", type=budget, help="such as nodes=8,depth=4,width=2; chosen at every step")
    parser.add_argument("--method", help="how to draft; the bundle's best by default")
    parser.add_argument("--synthetic-acceptance", type=rates, help="force acceptance by depth, such as 0.9,0.8")
    parser.add_argument("--limit", type=int, help="prompts a kind")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
