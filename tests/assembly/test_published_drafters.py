"""Bundles of published draft checkpoints: the build says what it found, and texts are the verifier's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.cli.conftest import write_tokenizer
from tests.export.drafters.test_published import LAYERS, eagle_one, eagle_three, write
from tests.export.models import write_checkpoint
from tests.runtime.fakes import CURVE

from redraft.assembly.bundle import build_bundle
from redraft.assembly.models import Model
from redraft.assembly.options import parse_drafter
from redraft.config import BuildConfig
from redraft.errors import CheckpointError
from redraft.export.checkpoint import Checkpoint
from redraft.runtime import Budget, Runtime, SamplingParams, SpeculationParams, api, speculators
from redraft.runtime.cost import VerifyCosts
from redraft.types import Costs

PROMPTS = [[3, 4, 5, 6], [9, 3] * 8, [7]]


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A verifier of as many layers as EAGLE-3's usual hidden states need."""
    folder = tmp_path_factory.mktemp("published") / "verifier"
    write_checkpoint(folder, "llama", num_hidden_layers=LAYERS, rope_parameters=None, max_position_embeddings=96)
    write_tokenizer(folder)
    return folder


@pytest.fixture
def published(tmp_path: Path) -> dict[str, Path]:
    """Folders by the ids of their drafters."""
    torch.manual_seed(0)
    return {"first": write(tmp_path / "first", *eagle_one()), "third": write(tmp_path / "third", *eagle_three())}


def test_a_bundle_of_published_drafters(
    verifier: Path, published: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "load_costs", lambda verifier, identity: VerifyCosts.of(CURVE))
    monkeypatch.setattr(speculators, "cached_costs", lambda verifier, drafter, identity: Costs())
    drafters = tuple(parse_drafter(f"{name}={path},precision=fp32", ()) for name, path in published.items())
    assert [drafter.method for drafter in drafters] == ["eagle", "eagle3"]
    lines: list[str] = []
    model = Model("little", str(verifier), verifier)
    manifest, _ = build_bundle(model, BuildConfig(drafters=drafters), tmp_path / "engines", {}, False, lines.append)
    assert "drafter first: EAGLE-1, EAGLE-2 or HASS in SafeAILab's layout" in lines
    assert "drafter third: EAGLE-3 in SafeAILab's layout" in lines
    assert manifest.drafters["first"].hidden_states == ("last",)
    assert manifest.drafters["third"].hidden_states == ("1", "3", "4")
    with Runtime.open(tmp_path / "engines", threads=1, verify=False) as runtime:
        for temperature in (0.0, 1.0):
            params = SamplingParams(max_tokens=40, temperature=temperature, seed=4, ignore_eos=True)
            plain = [g.token_ids for g in runtime.generate(PROMPTS, params, "none")]
            for name in published:
                found = runtime.generate(PROMPTS, params, SpeculationParams(name, budget=Budget(8, 4, 3)))
                assert [g.token_ids for g in found] == plain
                assert sum(g.metrics.num_draft_tokens for g in found) > 50


def test_a_published_drafter_of_another_verifier(verifier: Path, published: dict[str, Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_checkpoint(other, "llama", num_hidden_layers=LAYERS, rope_parameters=None, hidden_size=32)
    write_tokenizer(other)
    assert Checkpoint.open(other)
    drafters = (parse_drafter(f"first={published['first']}", ()),)
    with pytest.raises(CheckpointError, match="has hidden states of width 48, the verifier has 32"):
        build_bundle(
            Model("other", str(other), other), BuildConfig(drafters=drafters), tmp_path / "engines", {}, False,
            lambda line: None,
        )  # fmt: skip
