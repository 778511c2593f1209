"""Compares greedy decoding with transformers' own `generate`, token by token.

    python -m experiments.transformers_check --engines build/engines/tiny --checkpoint assets/tiny \\
        --prompts assets/tiny/prompts/*.jsonl

Checks both methods. If tokens differ, it gives the logit margin of redraft's token over the runner-up. A margin under
1e-4 is a near-tie, which two kernels of one product may decide differently.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redraft.bench.command import bundle_parser, run
from redraft.bench.environment import environment
from redraft.bench.prompts import Prompt, load_prompts
from redraft.bench.statistics import first_difference
from redraft.bench.summary import NEAR_TIE
from redraft.export import quiet_export
from redraft.runtime import Runtime, SamplingParams

METHODS = ("none", "ngram")


def main() -> dict[str, Any]:
    """Compare with the options' engines, checkpoint and prompts."""
    options = _arguments()
    quiet_export()
    prompts = load_prompts(options.prompts, options.limit)
    with Runtime.open(options.engines, threads=options.threads) as runtime:
        expected = reference(options.checkpoint, [runtime.encode(prompt.text) for prompt in prompts], options)
        found = {method: differences(runtime, prompts, expected, method, options) for method in METHODS}
    return {
        "environment": environment(options.threads),
        "prompts": len(prompts),
        "max_new_tokens": options.max_new_tokens,
        "identical": {method: not rows for method, rows in found.items()},
        "identical_but_for_near_ties": {m: all(row["near_tie"] for row in rows) for m, rows in found.items()},
        "differences": found,
    }


def reference(checkpoint: Path, prompts: Sequence[list[int]], options: argparse.Namespace) -> list[list[int]]:
    """Return new tokens of transformers' greedy search in fp32, end-of-sequence token included."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    outputs = []
    for ids in prompts:
        tokens = torch.tensor([ids])
        attended = torch.ones_like(tokens)
        written = model.generate(
            tokens, attention_mask=attended, max_new_tokens=options.max_new_tokens, do_sample=False
        )
        outputs.append(written[0, len(ids) :].tolist())
    return outputs


def differences(
    runtime: Runtime, prompts: Sequence[Prompt], expected: Sequence[list[int]], method: str, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return the first token at which each prompt's output differs from the expected one, and its logit margin."""
    params = SamplingParams(max_tokens=options.max_new_tokens)
    rows = []
    for prompt, wanted in zip(prompts, expected, strict=True):
        written = runtime.generate([prompt.text], params, method, record_logit_margins=True)[0]
        place = first_difference(written.token_ids, wanted)
        if place is not None:
            logit_margins = written.logit_margins or ()
            gap = logit_margins[place] if place < len(logit_margins) else None
            near = gap is not None and gap < NEAR_TIE
            rows.append({"prompt": prompt.id, "token": place, "logit_margin": gap, "near_tie": near})
    return rows


def _arguments() -> argparse.Namespace:
    parser = bundle_parser(__doc__, 128)
    parser.add_argument("--checkpoint", type=Path, required=True, help="the checkpoint that it was built from")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
