"""Bundles with the module inside of the verifier's checkpoint: texts are the verifier's, and the build names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests.export.drafters.native_checkpoints import LAYERS, write_native
from tests.export.models import write_checkpoint
from tests.little import write_tokenizer
from tests.runtime.fakes import CURVE

from redraft.assembly.drafters import OpenedDrafter, drafter_digests, native_drafter, open_drafter, settings_of
from redraft.assembly.options import choose_drafters
from redraft.cli import main
from redraft.config import NATIVE, BuildConfig, DrafterBuild
from redraft.errors import CheckpointError, UsageError
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.drafters.checkpoint import Identity
from redraft.runtime import Budget, Runtime, SamplingParams, SpeculationParams, api
from redraft.runtime.controllers.cost import VerifyCosts
from redraft.runtime.loop import speculation
from redraft.types import Costs

PROMPTS = [[3, 4, 5, 6], [9, 3] * 8, [7]]
Build = Callable[[str], tuple[Path, dict[str, Any]]]


@pytest.fixture
def built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Build:
    """Build a verifier of a layout with its module. Returns the bundle and the command's result."""

    def build(name: str) -> tuple[Path, dict[str, Any]]:
        folder, out = tmp_path / "verifier", tmp_path / "engines"
        write_tokenizer(write_native(folder, name))
        options = ["--drafter", "fast=native,steps=3,precision=fp32", "--eval-text", "none", "--json"]
        capsys.readouterr()
        assert main.run(["build", str(folder), "-o", str(out), *options]) == 0
        return out, json.loads(capsys.readouterr().out)

    return build


def check_texts(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts equal plain decoding's on each device, greedy and sampled."""
    monkeypatch.setattr(api, "load_costs", lambda verifier, identity: VerifyCosts({1: CURVE}))
    monkeypatch.setattr(speculation, "cached_costs", lambda *given: Costs())
    for device, slots in ((None, 1), ("cpu", 2)):
        with Runtime.open(bundle, threads=1, max_num_seqs=slots, device=device, verify=False) as runtime:
            for temperature in (0.0, 1.0):
                params = SamplingParams(max_tokens=24, temperature=temperature, seed=4, ignore_eos=True)
                plain = [text.token_ids for text in runtime.generate(PROMPTS, params, "none")]
                found = runtime.generate(PROMPTS, params, SpeculationParams("fast", budget=Budget(3, 3, 1)))
                assert [text.token_ids for text in found] == plain
                assert sum(text.metrics.num_draft_tokens for text in found) > 50


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("mimo", "MiMoForCausalLM"),  # transformers computes it as Qwen2
        ("qwen", "Qwen3NextForCausalLM"),
    ],
)
def test_a_bundle_with_a_module(name: str, architecture: str, built: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """The build compares the verifier with transformers, without the module."""
    bundle, summary = built(name)
    assert (summary["architecture"], summary["native"]) == (architecture, None)
    shape = summary["drafters"]["fast"]["shape"]
    assert (shape["steps"], shape["hidden_states"]) == (3, [str(LAYERS - 1) if name == "mimo" else "last"])
    check_texts(bundle, monkeypatch)


@pytest.mark.parametrize(
    ("drafter", "line"),
    [
        (
            "native,draft_vocabulary=9",
            "drafter mtp: draft_vocabulary needs counts of tokens, and a checkpoint's module has none; leave",
        ),
        (
            "d={},draft_vocabulary=9",
            "drafter d: draft_vocabulary needs counts of tokens, and a plain checkpoint has none; leave it out",
        ),
        ("d={},head_rank=9", "drafter d: head_rank is for the verifier's head, not for a plain checkpoint's; leave"),
        ("native,head_rank=48", "drafter mtp: head_rank must be below 48, the numbers of a hidden state, not 48"),
        ("native,head_rank=0", "drafter mtp: head_rank must be"),
    ],
)
def test_options_that_a_checkpoints_drafter_cannot_have_are_refused_before_the_export(
    drafter: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / "verifier", tmp_path / "engines"
    write_tokenizer(write_native(folder, "mimo"))
    asked = ["--drafter", drafter.format(folder), "--eval-text", "none"]
    command = ["build", str(folder), "-o", str(out), *asked]
    capsys.readouterr()
    assert main.run(command) == 2
    said = capsys.readouterr().err
    assert line in said
    assert "trace" not in said
    assert not out.exists()


def test_native_is_a_source_of_a_drafter() -> None:
    (alone,), (named,) = (choose_drafters(BuildConfig(), [text]) for text in ("native", "fast=native,steps=2"))
    assert alone == DrafterBuild("mtp", NATIVE, "mtp")
    assert named == DrafterBuild("fast", NATIVE, "mtp", {"steps": 2})


def opened(drafter: DrafterBuild, checkpoint: Checkpoint) -> OpenedDrafter:
    return open_drafter(settings_of(drafter, BuildConfig()), checkpoint, Identity((), ""), BuildConfig())


def test_the_drafters_files_are_the_checkpoints(tmp_path: Path) -> None:
    """A change of the module alone makes another bundle."""
    checkpoint = Checkpoint.open(write_native(tmp_path, "mimo"))
    drafter = DrafterBuild("mine", NATIVE)
    found = opened(drafter, checkpoint)
    assert (found.method.id, found.hidden_states) == ("mtp", (str(LAYERS - 1),))
    before = drafter_digests([settings_of(drafter, BuildConfig())], checkpoint)
    assert list(before) == ["drafter mine model.safetensors"]
    tensors = load_file(str(tmp_path / "model.safetensors"))
    tensors["model.mtp_layers.0.input_proj.weight"] += 1
    save_file(tensors, str(tmp_path / "model.safetensors"))
    assert drafter_digests([settings_of(drafter, BuildConfig())], checkpoint) != before


def test_a_drafter_that_is_not_inside(tmp_path: Path) -> None:
    checkpoint, inside = Checkpoint.open(write_checkpoint(tmp_path, "llama")), DrafterBuild("mine", NATIVE)
    with pytest.raises(CheckpointError, match="has no multi-token-prediction module; train a drafter"):
        opened(inside, checkpoint)
    with pytest.raises(UsageError, match="no checkpoint has a drafter of lyanna inside; leave out"):
        opened(DrafterBuild("mine", NATIVE, "lyanna"), checkpoint)
    with pytest.raises(UsageError, match="a verifier with random weights has no drafter inside; give mine=random"):
        settings_of(inside, BuildConfig(random_weights=True))


def test_a_build_without_drafters_names_the_module(tmp_path: Path) -> None:
    found = native_drafter(write_native(tmp_path / "native", "mimo"))
    assert found == "a multi-token-prediction module in MiMo's layout"
    assert native_drafter(write_checkpoint(tmp_path / "plain", "llama")) == ""
