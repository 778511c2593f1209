"""Sampled texts, and the sampling defaults that a model's bundle keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from redraft.config import Precision
from redraft.errors import BundleError, UsageError
from redraft.runtime import Budget, Runtime, SamplingParams, SpeculationParams
from redraft.runtime.sampling import model_sampling
from tests.conftest import Once
from tests.runtime.lyanna_bundle import write_lyanna_bundle

PROMPTS = [[5, 6, 7], [8, 9, 5, 6] * 3, [3, 4] * 10]
PARAMS = (
    SamplingParams(max_tokens=48, temperature=1.0, seed=5, ignore_eos=True, logprobs=2),
    SamplingParams(
        max_tokens=48, temperature=0.8, seed=6, top_k=8, top_p=0.95, min_p=0.01, repetition_penalty=1.1,
        presence_penalty=0.2, frequency_penalty=0.1, logit_bias={7: 1.0}, banned_tokens=(10,), min_tokens=8, logprobs=0,
    ),
    SamplingParams(max_tokens=48, repetition_penalty=1.3, ignore_eos=True, logprobs=1),
)  # fmt: skip
WAYS = (
    "ngram", "lyanna", "ngram+lyanna",
    *[SpeculationParams(method, budget=Budget(12, 4, 4)) for method in ("ngram", "lyanna")],
)  # fmt: skip


def opened(bundle: Path, max_num_seqs: int = 1) -> Runtime:
    return Runtime.open(bundle, threads=1, max_num_seqs=max_num_seqs, verify=False)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_seed_gives_the_same_tokens_whatever_the_method_and_the_batch(
    precision: Precision, lyanna_bundle: Path, once: Once
) -> None:
    bundle = lyanna_bundle if precision == "fp32" else once(write_lyanna_bundle, precision) / "engines"
    with opened(bundle) as alone, opened(bundle, 3) as together:
        for params in PARAMS:
            expected = [alone.generate([prompt], params, "none")[0] for prompt in PROMPTS]
            for runtime in (alone, together):
                for way in WAYS:
                    found = runtime.generate(PROMPTS, params, way)
                    assert [one.token_ids for one in found] == [one.token_ids for one in expected], way
                    assert [one.logprobs for one in found] == [one.logprobs for one in expected], way
                    if isinstance(way, SpeculationParams):
                        assert sum(one.metrics.num_accepted_draft_tokens for one in found) > 0, way


CHAT = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05}


@pytest.mark.parametrize(
    ("kept", "given", "expected"),
    [
        (CHAT, {}, {name: value for name, value in CHAT.items() if name != "do_sample"}),
        (CHAT, {"temperature": 0.0, "top_k": 0}, {"top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05}),
        ({"do_sample": True}, {"max_tokens": 5}, {"temperature": 1.0, "max_tokens": 5}),
        ({**CHAT, "do_sample": False}, {}, {"top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05}),
        ({"temperature": 0.9, "top_p": 0.6}, {"temperature": 0.5}, {"temperature": 0.5, "top_p": 0.6}),
        ({}, {}, {}),
    ],
)
def test_given_values_go_before_the_models(
    kept: dict[str, object], given: dict[str, object], expected: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(kept))
    assert model_sampling(tmp_path, given) == SamplingParams(**expected)


def test_missing_damaged_and_impossible_defaults(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="this bundle keeps no sampling defaults of its model"):
        model_sampling(tmp_path, {})
    file = tmp_path / "generation_config.json"
    file.write_text('{"top_p": 0}')
    with pytest.raises(UsageError, match=r"the model's generation_config\.json: top_p must be above 0 and at most 1"):
        model_sampling(tmp_path, {"top_k": 3})
    assert model_sampling(tmp_path, {"top_p": 0.5}).top_p == 0.5, "a value that is not used may be impossible"
    file.write_text("{")
    with pytest.raises(BundleError, match="cannot be read as JSON"):
        model_sampling(tmp_path, {})


def test_an_opened_bundle_has_its_models_defaults(lyanna_bundle: Path) -> None:
    with opened(lyanna_bundle) as runtime:
        assert runtime.model_sampling(max_tokens=3) == SamplingParams(max_tokens=3)
