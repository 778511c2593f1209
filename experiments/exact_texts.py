"""Number of texts that differ from plain decoding of one sequence, by method and batch size.

    python -m experiments.exact_texts --chat --engines build/engines/smollm2 --prompts mt_bench.jsonl humaneval.jsonl

Decodes greedily the first turn of every prompt, with kinds taking turns. Prints one JSON object. It has the environment
and, for each batch size and method, the number of differing outputs, their first differing positions, and the number of
looping outputs.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from redraft.bench.command import run
from redraft.bench.environment import environment, usable_threads
from redraft.bench.prompts import load_prompts
from redraft.bench.statistics import loops
from redraft.errors import UsageError
from redraft.runtime import Runtime, SamplingParams, SpeculationParams
from redraft.runtime.conversation import Conversation
from redraft.types import Budget


def main() -> dict[str, Any]:
    """Count the differing texts; see the module."""
    arguments = _arguments()
    if arguments.limit < 1:
        raise UsageError(f"a limit of {arguments.limit} leaves no prompt", "give --limit at least 1")
    texts = [prompt.text for prompt in load_prompts(arguments.prompts)[: arguments.limit]]
    found: dict[str, Any] = {}
    plain: list[tuple[int, ...]] = []
    for max_num_seqs in arguments.max_num_seqs:
        with Runtime.open(
            arguments.engines, max_num_seqs=max_num_seqs, verify=False, exact=not arguments.inexact
        ) as runtime:
            prompts = [Conversation(runtime).ask(text) if arguments.chat else text for text in texts]
            for method in ["none", *arguments.methods]:
                began = time.perf_counter()
                outputs = _outputs(runtime, prompts, arguments.max_new_tokens, method)
                plain = plain or outputs
                found[f"{method}, {max_num_seqs} at once"] = result = _compared(plain, outputs)
                result["seconds"] = round(time.perf_counter() - began, 1)
                print(method, max_num_seqs, result, file=sys.stderr, flush=True)
    return {
        "environment": environment(usable_threads()),
        "prompts": len(texts),
        "looping": sum(map(loops, plain)),
        "differing": found,
    }


def _outputs(runtime: Runtime, prompts: list[Any], tokens: int, method: str) -> list[tuple[int, ...]]:
    """Decode by `METHOD`, or `METHOD:nodes,depth,width` for trees of one size."""
    name, _, size = method.partition(":")
    budget = Budget(*map(int, size.split(","))) if size else None
    made = runtime.generate(prompts, SamplingParams(max_tokens=tokens), SpeculationParams(name, budget=budget))
    return [generation.token_ids for generation in made]


def _compared(plain: list[tuple[int, ...]], outputs: list[tuple[int, ...]]) -> dict[str, Any]:
    pairs = [pair for pair in zip(plain, outputs, strict=True) if pair[0] != pair[1]]
    apart = [next((n for n, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), -1) for pair in pairs]
    return {"differ": len(pairs), "differ_not_looping": sum(not loops(one) for one, _ in pairs), "first_at": apart[:5]}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSON lines")
    parser.add_argument("--max-num-seqs", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--methods", nargs="+", default=["ngram"])
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--chat", action="store_true", help="through the bundle's chat template")
    parser.add_argument("--inexact", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
