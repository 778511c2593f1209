"""The embedded model with two drafters: texts are the verifier's, and drafts of a trained module are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from redraft.runtime import Budget, Runtime, SamplingParams, SpeculationParams
from redraft.runtime.observe.profiling import Recording

PROMPTS = ["def add(a, b):\n    return", "Tom has 3 apples. He buys", "import os\n\n\ndef"]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "max_num_seqs"), [(None, 1), ("cpu", 2)])
def test_texts_are_the_verifiers_and_drafts_are_kept(tiny_bundle: Path, device: str | None, max_num_seqs: int) -> None:
    with Runtime.open(tiny_bundle, threads=1, max_num_seqs=max_num_seqs, device=device, verify=False) as runtime:
        assert runtime.methods[:6] == ("none", "ngram", "suffix", "lookahead", "lyanna", "fast")
        plain = [text.token_ids for text in runtime.generate(PROMPTS, PARAMS, "none")]
        for method in ("ngram+fast", "lyanna"):  # the drafters read different hidden states
            found = runtime.generate(PROMPTS, PARAMS, method)
            assert [text.token_ids for text in found] == plain
        found = runtime.generate(PROMPTS, PARAMS, SpeculationParams("fast", budget=Budget(3, 3, 1)))
        assert [text.token_ids for text in found] == plain
        assert sum(text.metrics.num_accepted_draft_tokens for text in found) > 0.8 * sum(
            text.metrics.num_steps for text in found
        )


WAYS = [
    SpeculationParams("lyanna", budget=Budget(8, 4, 4)),
    SpeculationParams("fast", budget=Budget(3, 3, 1)),
    "none",
    "ngram+lyanna",
    SpeculationParams("ngram", budget=Budget(6, 6, 1)),
    SpeculationParams("lyanna", budget=Budget(8, 4, 4)),
    "ngram+fast",
    SpeculationParams("fast", prediction="def add(a, b):\n    return a + b\n"),
]


@pytest.mark.slow
@pytest.mark.parametrize("device", [None, "cpu"])
def test_methods_share_a_batch_and_one_verification(tiny_bundle: Path, device: str | None) -> None:
    """Each request has its own method. A step calls the verifier once, and each drafter once a run of slots.

    Four slots have at most two runs. Rows of prompts that drafters have put off take calls of their own.
    """
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(len(WAYS))]
    with Runtime.open(tiny_bundle, threads=1, max_num_seqs=4, device=device, verify=False) as runtime:
        plain = [text.token_ids for text in runtime.generate(prompts, PARAMS, "none")]
        recording = Recording()
        with runtime.verifier.ranges.listening(recording):
            found = runtime.generate(prompts, PARAMS, WAYS)
    assert [text.token_ids for text in found] == plain
    for text, way in zip(found, WAYS, strict=True):
        if way == "none":
            assert text.metrics.num_draft_tokens == 0
        elif isinstance(way, SpeculationParams) and way.budget:
            assert text.metrics.num_accepted_draft_tokens > 0
    steps = [
        [inner for inner in recording.ranges if step.started <= inner.started and inner.ended <= step.ended]
        for step in recording.ranges
        if step.name == "step"
    ]
    late = [ranges for ranges in recording.ranges if ranges.name == "catch-up"]
    steps = [
        [one.name for one in ranges if not any(of.started <= one.started and one.ended <= of.ended for of in late)]
        for ranges in steps
    ]
    calls = [[name for name in names if name.startswith("engine.")] for names in steps]
    assert all(names.count("engine.verifier") == 1 for names in calls)
    assert all(names.count(name) <= 2 for names in calls for name in names)
    drafted = [{name for name in names if "draft" in name or "resample" in name} for names in calls]
    assert any(len(names) > 1 for names in drafted)
