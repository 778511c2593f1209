"""A model's sampling defaults: what a bundle keeps of generation_config.json, and what a user's values change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from redraft.errors import BundleError, UsageError
from redraft.runtime import Runtime, SamplingParams
from redraft.runtime.sampling import model_sampling

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


def test_an_opened_bundle_has_its_models_defaults(bundle: Path) -> None:
    with Runtime.open(bundle, threads=1, verify=False) as runtime:
        assert runtime.model_sampling(max_tokens=3) == SamplingParams(max_tokens=3)
