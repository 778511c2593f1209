"""Generate, stream and choose how each request drafts, in a script: `python examples/plain.py ENGINES`."""

from __future__ import annotations

import sys

from redraft.runtime import Runtime, SamplingParams, SpeculationParams


def main(engines: str) -> None:
    """Print a text as it comes, then the figures of three requests that share a batch."""
    params = SamplingParams(max_tokens=48)
    with Runtime.open(engines, max_num_seqs=3) as runtime:
        for chunk in runtime.stream("def main():", params):
            print(chunk, end="", flush=True)
        print()
        speculation = ["none", "ngram", SpeculationParams(prediction="def f(first, second):\n    return first\n")]
        generations = runtime.generate(["def f(first, second):"] * 3, params, speculation)
        for how, generation in zip(("plain", "ngram", "prediction"), generations, strict=True):
            print(f"{how}: {generation.metrics.mean_acceptance_length:.2f} tokens a step")
        assert len({generation.text for generation in generations}) == 1  # drafts never change a text


if __name__ == "__main__":
    main(*sys.argv[1:])
