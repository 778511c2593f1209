"""Random loads over real engines: each request has the tokens and log-probabilities that it has alone."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from redraft.runtime import Budget, Runtime, SamplingParams, SpeculationParams
from tests.conftest import Once
from tests.runtime.lyanna_bundle import FULL, write_lyanna_bundle

HOWS = (
    "none", "ngram", "suffix", "lookahead", "lyanna", "ngram+lyanna", SpeculationParams("lyanna", budget=FULL),
    SpeculationParams("lyanna", budget=Budget(3, 3, 1)), SpeculationParams("ngram", prediction=[5, 6, 7] * 10),
)  # fmt: skip
Job = tuple[list[int], SamplingParams, str | SpeculationParams]


def jobs(rng: random.Random, count: int) -> list[Job]:
    """Return requests whose prompts often begin alike."""
    bases = [[rng.randrange(3, 13) for _ in range(rng.randrange(1, 60))] for _ in range(6)]
    found = []
    for _ in range(count):
        base = rng.choice(bases)
        prompt = base[: rng.randrange(1, len(base) + 1)] + [rng.randrange(3, 13) for _ in range(rng.randrange(5))]
        params = SamplingParams(
            max_tokens=rng.randrange(1, 36), temperature=rng.choice([0, 0.8]), seed=rng.randrange(3), logprobs=1,
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        )  # fmt: skip
        found.append((prompt, params, rng.choice(HOWS)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("seed", range(2))
def test_a_request_under_load_is_the_one_alone(
    once: Once, lyanna_bundle: Path, unmeasured: None, precision: str, seed: int
) -> None:
    path = lyanna_bundle if precision == "fp32" else once(write_lyanna_bundle, precision="int8") / "engines"
    rng = random.Random(seed)
    asked = jobs(rng, 120)
    with Runtime.open(path, threads=1, verify=False, prefix_slots=0) as runtime:
        expected = []
        for prompt, params, _ in asked:
            runtime.forget_prefixes()
            expected += runtime.generate([prompt], params, "none")
    with Runtime.open(path, threads=1, max_num_seqs=3, verify=False) as runtime:
        submitted, timers = [], []
        for prompt, params, how in asked:
            submitted.append(runtime.submit(prompt, params, how, priority=rng.randrange(3)))
            if rng.random() < 0.3:
                time.sleep(rng.random() * 0.01)
            if rng.random() < 0.15:
                timers.append(threading.Timer(rng.random() * 0.03, submitted[-1].abort))
                timers[-1].start()
        found = [one.result(120) for one in submitted]
        health = runtime.health
    for one, own in zip(found, expected, strict=True):
        count = len(one.token_ids)
        assert one.token_ids == own.token_ids[:count]
        assert one.logprobs == own.logprobs[:count]
        assert one.finish_reason in ("abort", own.finish_reason)
        assert one.finish_reason == "abort" or count == len(own.token_ids)
    assert sum(one.cached_tokens > 0 for one in found) > 0
    assert sum(one.metrics.num_accepted_draft_tokens for one in found) > 50
    assert (health.requests, health.error) == (0, None)
