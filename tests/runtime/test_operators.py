"""Texts with redraft's operators and with ONNX Runtime's kernels: both are exact, and they are told apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from redraft import names
from redraft.cli.inspect import as_lines
from redraft.engines import open_bundle
from redraft.engines.sizes import kv_bytes
from redraft.plugins.operators import OFF, OPERATORS_VARIABLE, Operators
from redraft.runtime import Budget, Generation, Runtime, SamplingParams, SpeculationParams
from tests.conftest import Once
from tests.runtime.lyanna_bundle import CONTEXT, write_lyanna_bundle

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


HALF = "int8,kv=fp16"


@pytest.mark.parametrize("precision", ["fp32", HALF, "int4"])
def test_a_text_is_the_same_by_every_method_with_either_kernels(
    precision: str, once: Once, operators_library: Operators, unmeasured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = once(write_lyanna_bundle, precision) / "engines"
    name, ours = decoded(bundle, str(operators_library.path), monkeypatch)
    other, others = decoded(bundle, OFF, monkeypatch)
    assert name != other
    assert [one.logprobs for one in ours] != [one.logprobs for one in others]


def test_figures_of_the_memory_follow_the_type_of_keys_and_values(once: Once, unmeasured: None) -> None:
    half, usual = (open_bundle(once(write_lyanna_bundle, precision) / "engines") for precision in (HALF, "fp32"))
    assert usual.manifest.graphs.keys() - half.manifest.graphs.keys() == {names.VERIFIER_SINGLE, names.VERIFIER_FAST}
    assert f"int8, KV in fp16, context {CONTEXT}, KV of a full slot" in "\n".join(as_lines(half, None))
    assert kv_bytes(half.manifest, 4) == kv_bytes(usual.manifest, 2)
    for device, slots in ((None, 4), ("cpu", 2)):
        with Runtime.open(half.path, threads=1, max_num_seqs=2, device=device, verify=False) as runtime:
            rows = runtime.verifier.steps.host_kv()
            assert {array.dtype.name for array in rows} == {"float16"}
            assert sum(array.nbytes for array in rows) >= kv_bytes(half.manifest, slots)
            runtime.generate(PROMPTS[:1], GREEDY)
