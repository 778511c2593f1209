"""Acceptance of a published drafter on the verifier's own text."""

from __future__ import annotations

import json

import pytest

from redraft.errors import CheckpointError, DataError
from redraft.train.drafter_config import SelfText
from redraft.train.drafter_evaluate import evaluate_drafter, read_prompts
from redraft.train.drafter_run import train_drafter
from redraft.train.objectives import find_training
from redraft.train.objectives.lyanna import LyannaTable
from redraft.train.publish import publish_drafter
from tests.train.conftest import altered

LyannaRecipe = find_training("lyanna").recipe


@pytest.fixture(scope="module")
def published(verifier_folder, tmp_path_factory):
    """A drafter after one step."""
    folder = tmp_path_factory.mktemp("drafter")
    own = SelfText(rows=4, prompt_tokens=3, new_tokens=30, text=0.0, held_out_rows=2)
    sizes = dict(steps=1, batch_tokens=64, seq_len=16, decay_seq_len=16)
    recipe = LyannaRecipe(**sizes, drafter=LyannaTable(rank=4, chain=3), self_text=own)
    train_drafter("lyanna", verifier_folder, {}, folder / "run", recipe)
    publish_drafter(folder / "run", folder / "published")
    return folder / "published"


def test_acceptance_is_by_category_over_drafts_from_the_prompts_last_token_on(published, verifier_folder, tmp_path):
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
