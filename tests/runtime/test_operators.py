"""Texts with redraft's operators and with ONNX Runtime's kernels: both are exact, and they are told apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from redraft.config import Precision
from redraft.plugins.operators import OFF, OPERATORS_VARIABLE, Operators
from redraft.runtime import Budget, Generation, Runtime, SamplingParams, SpeculationParams
from tests.conftest import Once
from tests.runtime.lyanna_bundle import write_lyanna_bundle

PROMPTS = [[5, 6, 7], [8, 9, 5, 6] * 3, [3, 4] * 10]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=1)
WAYS = ("ngram", SpeculationParams("lyanna", budget=Budget(12, 4, 4)))
Texts = tuple[str, list[Generation]]


def decoded(bundle: Path, library: str, monkeypatch: pytest.MonkeyPatch) -> Texts:
    """Return a runtime's fingerprint and its plain texts, after comparing them with all others."""
    monkeypatch.setenv(OPERATORS_VARIABLE, library)

    def opened(max_num_seqs: int) -> Runtime:
        return Runtime.open(bundle, threads=1, max_num_seqs=max_num_seqs, verify=False)

    with opened(1) as alone, opened(3) as together:
        expected = [alone.generate([prompt], GREEDY, "none")[0] for prompt in PROMPTS]
        for runtime, ways in ((alone, WAYS), (together, ("none", *WAYS))):
            for way in ways:
                found = runtime.generate(PROMPTS, GREEDY, way)
                assert [one.token_ids for one in found] == [one.token_ids for one in expected], way
                assert [one.logprobs for one in found] == [one.logprobs for one in expected], way
        return alone.fingerprint, expected


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_a_text_is_the_same_by_every_method_with_either_kernels(
    precision: Precision, once: Once, operators_library: Operators, unmeasured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = once(write_lyanna_bundle, precision) / "engines"
    name, ours = decoded(bundle, str(operators_library.path), monkeypatch)
    other, others = decoded(bundle, OFF, monkeypatch)
    assert name != other
    assert [one.logprobs for one in ours] != [one.logprobs for one in others]
