"""Speculation's speed against the bound by its acceptance and the cost of verification (`redraft.bench.bound`).

    python -m experiments.bound --engines build/engines/tiny --prompts assets/tiny/prompts/code.jsonl \\
        --synthetic-acceptance 0.9,0.8,0.7 --budget nodes=8,depth=4,width=2

Measures t in the same process, before and after the prompts. Without --budget the controller chooses the tree's size at
every step. Without --synthetic-acceptance the drafter of --method drafts.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import numpy as np

from redraft.bench.bound import achieved
from redraft.bench.command import budget, bundle_parser, rates, run
from redraft.bench.compare import Settings, compare
from redraft.bench.environment import environment
from redraft.bench.prompts import load_prompts
from redraft.runtime import Runtime, SamplingParams
from redraft.runtime.measurements import measure_curve


def main() -> dict[str, Any]:
    """Take the measurements that the options ask for."""
    options = _arguments()
    params = SamplingParams(max_tokens=options.max_new_tokens, ignore_eos=not options.chat)
    settings = Settings(params, options.budget, options.synthetic_acceptance, chat=options.chat)
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


def _arguments() -> argparse.Namespace:
    parser = bundle_parser(__doc__, 64)
    parser.add_argument("--budget", type=budget, help="such as nodes=8,depth=4,width=2; chosen at every step")
    parser.add_argument("--chat", action="store_true", help="wrap prompts in the chat template; answers may end")
    parser.add_argument("--method", help="drafting method; the bundle's best by default")
    parser.add_argument("--synthetic-acceptance", type=rates, help="force acceptance by depth, such as 0.9,0.8")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
