"""The comparison passes a correct product, and finds each planted fault."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.check import Result, check, compared, reference_texts
from experiments.checkpoints import VOCABULARY, write_checkpoint
from redraft.assembly.bundle import build_bundle
from redraft.assembly.models import Model
from redraft.assembly.tokenizers import write_stand_in
from redraft.config import BuildConfig
from redraft.engines import open_bundle
from redraft.errors import CheckpointError
from redraft.runtime.host_step import HostStep

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def mistral(tmp_path_factory):
    """A bundle of a Mistral with a window shorter than the prompts, and its reference texts."""
    folder = tmp_path_factory.mktemp("mistral")
    write_checkpoint(folder / "checkpoint", "mistral")
    texts = reference_texts(folder / "checkpoint")
    write_stand_in(folder / "checkpoint", VOCABULARY)
    model = Model("mistral", "mistral", folder / "checkpoint")
    build_bundle(model, BuildConfig(), folder / "bundle", {}, True, lambda line: None)
    return open_bundle(folder / "bundle"), texts


def test_a_right_product_is_the_same(mistral):
    found = compared(*mistral)
    assert (found.result, found.note) == (Result.SAME, "")
    assert found.difference < 1e-4
    assert found.accepted > 40  # rows of accepted branches moved, for one text and for two


def test_rows_that_were_not_moved_are_found(mistral, monkeypatch):
    """Plain decoding never moves a row: only trees with accepted branches show this."""
    monkeypatch.setattr(HostStep, "_compact", lambda *_: None)
    found = compared(*mistral)
    assert found.result is Result.WRONG
    assert found.note.startswith("trees: token ")


def test_other_logits_are_found_under_the_same_tokens(mistral):
    bundle, texts = mistral
    moved = [type(text)(text.prompt, text.tokens, text.logits + 1e-2 * np.cos(text.logits)) for text in texts]
    assert compared(bundle, moved).result is Result.WRONG


def test_failed_and_refused_checkpoints_have_different_results(tmp_path):
    refused = check(tmp_path / "a", "mamba", {})
    assert refused.result is Result.REFUSED
    assert "mamba" in refused.note
    assert check(tmp_path / "b", "llama", {"hidden_size": 63}).result is Result.NOT_MADE


def test_notes_name_no_folder_of_this_machine(tmp_path, monkeypatch):
    """A refusal names files of the checkpoint; the table must not depend on the folder."""

    def refuse(model: Model, *_: object) -> None:
        raise CheckpointError(f"{model.path}/config.json is damaged")

    monkeypatch.setattr("experiments.check.build_bundle", refuse)
    assert check(tmp_path, "llama", {}).note == "checkpoint/config.json is damaged"
