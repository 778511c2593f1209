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

RUNNER = CliRunner()
RECIPE = """
method = "lyanna"
batch_tokens = 64
seq_len = 16
decay_seq_len = 16
held_out_every = 3
evaluate_every = 1

[drafter]
rank = 4
chain = 2

[self_text]
rows = 4
prompt_tokens = 6
new_tokens = 20
held_out_rows = 2
"""


def test_the_command_line_needs_no_torch_until_it_trains():
    """`redraft --help` must work quickly without the export extra."""
    code = "import sys, redraft.cli.train; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def called(*arguments):
    """The output of a command that ends well."""
    result = RUNNER.invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_train_publish_and_measure_a_drafter(prose, verifier_folder, tmp_path):
    """All steps of a drafter's training by the command line; lines show writing, losses and acceptance."""
    recipe, run, out, prompts = (tmp_path / name for name in ("small.toml", "run", "out", "p.jsonl"))
    recipe.write_text(RECIPE, encoding="utf-8")
    command = ["lyanna", "--verifier", verifier_folder, "--out", run, "--config", recipe, "--steps", 2, "--seed", 2]
    command += ["--data", f"prose={prose['prose']}"]
    lines = called(*command)
    assert "writing prose.train.1: 4/4 rows" in lines
    assert "step 1 accepted prose 0." in lines
    assert "step 2/2 ce " in lines
    assert json.loads(called(*command, "--resume", "--json")) == {"out": str(run), "steps": 2, "steps_run": 0}
    assert json.loads(called("publish", run, "--out", out, "--json"))["recipe"]["seed"] == 2

    prompts.write_text(json.dumps({"turns": ["the cat sat on"]}), encoding="utf-8")
    measure = ["acceptance", out, "--verifier", verifier_folder, "--prompts", prompts, "--new-tokens", 16]
    assert len(json.loads(called(*measure, "--json"))["p"]["top"]) == 2
    assert "p (1 prompts): " in called(*measure)


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
