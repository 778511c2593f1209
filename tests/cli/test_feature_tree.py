"""Drafters that predict features by the command line: trained, published, built, used; and drafters that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.cli.conftest import Run, trained_drafter
from tests.little import write_checkpoint


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("family") / "verifier")


def test_a_drafter_from_training_to_text(verifier: Path, run: Run, tmp_path: Path) -> None:
    """Two methods use one drafter in one bundle, and a request picks one."""
    drafter, engines = trained_drafter("eagle", verifier, run, tmp_path), tmp_path / "engines"
    both = ("--drafter", f"{drafter},precision=fp32", "--drafter", f"eagle2={drafter},method=eagle2,precision=fp32")
    built = run("build", verifier, "-o", engines, *both, "--skip-check")["drafters"]
    assert built["eagle"]["summary"] == "4 steps, static trees 3 wide of 12 nodes"
    assert built["eagle2"]["summary"] == "4 steps, trees 3 wide of 12 nodes"
    ways = ("none", "eagle", "eagle2", "ngram+eagle2")
    for temperature in (0, 1):
        sampled = ("--temperature", temperature, "--seed", 3, "--max-new-tokens", 24, "--ignore-eos", "--threads", "1")
        texts = {
            way: run("generate", "--engines", engines, "--prompt", "abc", "--method", way, "--no-verify", *sampled)
            for way in ways
        }
        assert len({str(found["token_ids"]) for found in texts.values()}) == 1
        assert texts["eagle2"]["metrics"]["num_spec_steps"] > 0


@pytest.mark.parametrize("method", ["eagle3", "griffin"])
def test_a_drafter_of_another_form_from_training_to_text(verifier: Path, run: Run, tmp_path: Path, method: str) -> None:
    drafter, engines = trained_drafter(method, verifier, run, tmp_path), tmp_path / "engines"
    built = run("build", verifier, "-o", engines, "--drafter", f"{drafter},precision=fp32", "--skip-check")["drafters"]
    assert built[method]["method"] == method
    prompt = ("--prompt", "abc", "--max-new-tokens", 24, "--ignore-eos", "--threads", 1, "--no-verify")
    budget = ("--budget", "nodes=6,depth=3,width=2")
    plain = run("generate", "--engines", engines, "--method", "none", *prompt)
    drafted = run("generate", "--engines", engines, "--method", method, *prompt, *budget)
    assert drafted["token_ids"] == plain["token_ids"]
    assert len(plain["token_ids"]) == 24
    assert drafted["metrics"]["num_draft_tokens"] > 20


def test_drafters_that_do_not_fit(verifier: Path, refused: Callable[..., str], tmp_path: Path) -> None:
    def line(drafter: str) -> str:
        return refused("build", verifier, "-o", tmp_path / "out", "--drafter", drafter, "--skip-check", status=1)

    def usage(drafter: str) -> str:
        return refused("build", verifier, "-o", tmp_path / "out", "--drafter", drafter, "--skip-check", status=2)

    assert "is not a drafter: config.json cannot be read" in line(f"eagle3={tmp_path}")
    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "config.json").write_text('{"model_type": "llama"}')
    save_file({"block.weight": torch.ones(2)}, tmp_path / "unknown" / "model.safetensors")
    assert "unknown has an unknown layout: no known layout has block.weight; " in line(f"eagle3={tmp_path / 'unknown'}")
    assert "width must be a number from 1 to 10, not 11" in usage("e=random,method=griffin,width=11")
    assert "a tree of 10 levels of 10 nodes computes 90 rows" in usage("e=random,method=hass,width=10,steps=10")
    assert "nodes must be a positive number, not 0" in usage("e=random,method=fspad,nodes=0")
