"""Acceptance of a published drafter on the verifier's own text."""

from __future__ import annotations

import json

import pytest

from redraft.errors import CheckpointError, DataError
from redraft.train.drafter_evaluate import evaluate_drafter, read_prompts
from tests.train.conftest import altered


def test_acceptance_is_by_category_over_drafts_from_the_prompts_last_token_on(lyanna_run, verifier_folder, tmp_path):
    published = lyanna_run / "published"
    prompts = tmp_path / "prompts.jsonl"
    a, b, c = ({"turns": [text]} for text in ("the cat sat on", "the dogs run by the", "rain " * 60))
    items = [a | {"category": "a"}, b, c]
    prompts.write_text("\n".join(map(json.dumps, items)), encoding="utf-8")
    found = evaluate_drafter(published, verifier_folder, [prompts], new_tokens=16)
    assert set(found) == {"a", "prompts"}
    assert found["prompts"].prompts == 1  # the third is too long for the verifier's positions
    assert 0 < found["a"].acceptance.starts[0] <= 16 - 1
    with pytest.raises(DataError, match="fits the verifier"):
        evaluate_drafter(published, verifier_folder, [prompts], new_tokens=64)
    with pytest.raises(CheckpointError, match="another verifier"):
        evaluate_drafter(published, altered(verifier_folder, tmp_path / "other"), [prompts])


@pytest.mark.parametrize("line", ["{", '{"turns": []}', "3", '{"text": "x"}'])
def test_damaged_prompts_are_named(tmp_path, line):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"turns": ["x"]}) + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"p\.jsonl:2"):
        read_prompts([path])


def test_missing_and_empty_prompts_are_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_prompts([tmp_path / "absent.jsonl"])
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no prompts"):
        read_prompts([tmp_path / "empty.jsonl"])
