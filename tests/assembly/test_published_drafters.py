"""Bundles of published draft checkpoints: the build says what it found, and texts are the verifier's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.export.drafters.published_checkpoints import (
    LAYERS,
    eagle_one,
    eagle_three,
    speculators_block,
    write,
    z_lab,
)
from tests.export.models import write_checkpoint
from tests.little import write_tokenizer
from tests.runtime.fakes import CURVE

from redraft.assembly.bundle import build_bundle
from redraft.assembly.drafters import settings_of
from redraft.assembly.models import Model
from redraft.assembly.options import parse_drafter
from redraft.config import BuildConfig, DrafterBuild
from redraft.errors import CheckpointError
from redraft.runtime import Budget, Runtime, SamplingParams, SpeculationParams, api
from redraft.runtime.controllers.cost import VerifyCosts
from redraft.runtime.loop import speculation
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
    made = {"first": eagle_one(), "third": eagle_three(), "block": z_lab()}
    made["after-tokens"] = speculators_block("dspark", markov_rank=6)
    return {name: write(tmp_path / name, *one) for name, one in made.items()}


def test_a_bundle_of_published_drafters(
    verifier: Path, published: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "load_costs", lambda verifier, identity: VerifyCosts({1: CURVE}))
    monkeypatch.setattr(speculation, "cached_costs", lambda *given: Costs())
    drafters = tuple(parse_drafter(f"{name}={path},precision=fp32", ()) for name, path in published.items())
    assert [drafter.method for drafter in drafters] == ["eagle", "eagle3", "dflash", "dspark"]
    lines: list[str] = []
    model = Model("little", str(verifier), verifier)
    config = BuildConfig(drafters=drafters)
    manifest, _ = build_bundle(model, config, tmp_path / "engines", report=lines.append)
    assert "drafter first: EAGLE-1, EAGLE-2 or HASS in SafeAILab's layout" in lines
    assert "drafter third: EAGLE-3 in SafeAILab's layout" in lines
    assert "drafter block: DFlash in z-lab's layout" in lines
    assert "drafter after-tokens: DSpark in speculators' layout" in lines
    assert manifest.drafters["block"].hidden_states == ("1", "3", "last")
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


def test_the_id_in_an_option_names_the_method_of_a_published_drafter(published: dict[str, Path]) -> None:
    """A drafter of EAGLE-1's form becomes EAGLE-2 or HASS, unless `method=` names another."""
    texts = {
        "hass={}": "hass", "eagle2={},width=2": "eagle2", "eagle3={}": "eagle", "mine={}": "eagle", "{}": "eagle",
        "hass={},method=eagle": "eagle", "eagle2={},nodes=9,method=hass": "hass",
    }  # fmt: skip
    for text, method in texts.items():
        assert parse_drafter(text.format(published["first"]), ()).method == method, text
    for text in ("hass={}", "eagle2={}", "mine={}", "{}"):
        assert parse_drafter(text.format(published["third"]), ()).method == "eagle3", text


def test_a_recipes_drafter_takes_its_ids_method(published: dict[str, Path]) -> None:
    drafters = [DrafterBuild(name, str(published["first"])) for name in ("hass", "mine")]
    assert [settings_of(drafter, BuildConfig()).method.id for drafter in drafters] == ["hass", "eagle"]


@pytest.mark.parametrize("method", [None, "eagle3"])
def test_a_drafter_of_an_unknown_layout(verifier: Path, tmp_path: Path, method: str | None) -> None:
    """The build refuses it before it exports anything, if the id or `method=` names a method."""
    values, tensors = eagle_three()
    renamed = {name.replace("midlayer.", "block."): tensor for name, tensor in tensors.items()}
    del values["draft_vocab_size"]
    folder, out = write(tmp_path / "it", values, renamed), tmp_path / "engines"
    config = BuildConfig(drafters=(DrafterBuild("eagle3", str(folder), method),))
    lines: list[str] = []
    with pytest.raises(CheckpointError, match=r"it has an unknown layout: no known layout has block\.") as error:
        build_bundle(Model("little", str(verifier), verifier), config, out, report=lines.append)
    assert "in the layout of SafeAILab, SpecForge or speculators" in str(error.value)
    assert "\n" not in str(error.value)
    assert set(lines) <= {"reading the checkpoint", "loading libraries"}
    assert not out.exists()


def test_a_published_drafter_of_another_verifier(verifier: Path, published: dict[str, Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_checkpoint(other, "llama", num_hidden_layers=1, rope_parameters=None, hidden_size=32)
    write_tokenizer(other)
    config = BuildConfig(drafters=(parse_drafter(f"first={published['first']}", ()),))
    with pytest.raises(CheckpointError, match="has hidden states of width 48, the verifier has 32"):
        build_bundle(Model("other", str(other), other), config, tmp_path / "engines")
