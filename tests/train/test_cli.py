"""`redraft train` from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from redraft.assembly import models
from redraft.cli import train
from redraft.cli.train import app
from redraft.train import drafter_run
from tests.train.conftest import SELF_TEXT, SMALL

RUNNER = CliRunner()


def test_the_command_line_needs_no_torch_until_it_trains():
    """`redraft --help` must work quickly without the export extra."""
    code = "import sys, redraft.cli.train; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_train_publish_and_measure_a_drafter(prose, verifier_folder, tmp_path):
    """All steps of a drafter's training by the command line, and its refusals."""
    recipe, run, out, prompts = (tmp_path / name for name in ("small.toml", "run", "out", "p.jsonl"))
    recipe.write_text(f'method = "lyanna"\n{SMALL}[drafter]\nrank = 4\nchain = 2\n{SELF_TEXT}', encoding="utf-8")
    command = ["lyanna", "--verifier", str(verifier_folder), "--out", str(run), "--config", str(recipe)]
    options = ["--data", f"prose={prose['prose']}", "--steps", "3", "--seed", "2", "--json"]
    result = RUNNER.invoke(app, [*command, *options])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"out": str(run), "steps": 3, "steps_run": 3}

    result = RUNNER.invoke(app, ["publish", str(run), "--out", str(out), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["recipe"]["seed"] == 2

    prompts.write_text(json.dumps({"turns": ["the cat sat on"]}), encoding="utf-8")
    measure = ["acceptance", str(out), "--verifier", str(verifier_folder), "--prompts", str(prompts)]
    result = RUNNER.invoke(app, [*measure, "--new-tokens", "16", "--json"])
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["p"]["top"]) == 2
    result = RUNNER.invoke(app, [*measure, "--new-tokens", "16"])
    assert "p (1 prompts): " in result.stdout


@pytest.mark.parametrize(("name", "found"), [("smollm2-135m", "cached.gguf"), ("tiny", "assets/tiny"), (".", ".")])
def test_a_verifier_is_named_as_in_a_build(monkeypatch, tmp_path, name, found):
    """A recipe with a package, a recipe with a folder, and a folder."""
    calls = []
    monkeypatch.setattr(models, "fetch_package_file", lambda *args: Path("cached.gguf"))
    monkeypatch.setattr(drafter_run, "train_drafter", lambda *args, **options: calls.append(args) or 0)
    monkeypatch.setattr(train, "_trained", lambda *args: None)
    result = RUNNER.invoke(app, ["lyanna", "--verifier", name, "--out", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert calls[0][1].resolve() == Path(found).resolve()


def test_a_name_that_is_no_verifier_is_refused(tmp_path):
    result = RUNNER.invoke(app, ["lyanna", "--verifier", "nothing", "--out", str(tmp_path / "run")])
    assert str(result.exception).startswith("no model 'nothing'")
    assert not (tmp_path / "run").exists()


def test_lines_of_a_drafters_run_show_writing_losses_and_acceptance(verifier_folder, tmp_path):
    recipe = tmp_path / "small.toml"
    recipe.write_text(f"steps = 2\nevaluate_every = 1\n{SMALL}{SELF_TEXT}text = 0.0\n", encoding="utf-8")
    options = ["--verifier", str(verifier_folder), "--out", str(tmp_path / "run"), "--config", str(recipe)]
    result = RUNNER.invoke(app, ["lyanna", *options])
    assert result.exit_code == 0, result.output
    assert "writing self.train.1: 4/4 rows" in result.stdout
    assert "step 1 accepted self 0." in result.stdout
    assert "step 2/2 ce " in result.stdout
