"""`redraft train` from the command line."""

from __future__ import annotations

import json
import subprocess
import sys

from typer.testing import CliRunner

from redraft.cli.train import app
from redraft.errors import UsageError

RUNNER = CliRunner()


def data_options(sources):
    return [option for kind, source in sources.items() for option in ("--data", f"{kind}={source}")]


def write_recipe(folder, steps=4):
    path = folder / "small.toml"
    path.write_text(
        f"steps = {steps}\nbatch_tokens = 64\nseq_len = 16\ndecay_seq_len = 32\nheld_out_every = 3\n"
        "[model]\nvocab_size = 400\nhidden_size = 32\nlayers = 2\nintermediate_size = 64\nheads = 2\nkv_heads = 1\n"
        "head_dim = 16\nmax_positions = 64\n",
        encoding="utf-8",
    )
    return path


def test_train_publish_evaluate(sources, tmp_path):
    """All steps of a verifier's training; `--json` prints only one object."""
    recipe, run, out = write_recipe(tmp_path), tmp_path / "run", tmp_path / "out"
    common = ["verifier", *data_options(sources), "--out", str(run), "--config", str(recipe), "--json"]
    result = RUNNER.invoke(app, [*common, "--checkpoint-every", "2"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"out": str(run), "steps": 4, "steps_run": 4}

    again = RUNNER.invoke(app, common)
    assert isinstance(again.exception, UsageError)
    assert "--resume" in str(again.exception)

    result = RUNNER.invoke(app, ["publish", str(run), *data_options(sources), "--out", str(out), "--json"])
    assert result.exit_code == 0, result.output
    published = json.loads(result.stdout)
    assert published == json.loads((out / "evaluation.json").read_text(encoding="utf-8"))
    card = (out / "README.md").read_text(encoding="utf-8")
    assert f"{published['kinds']['prose']['bits_per_byte']:.3f}" in card
    assert "{" not in card

    result = RUNNER.invoke(app, ["evaluate", str(out), "--json"])
    assert json.loads(result.stdout) == published


def test_lines_without_a_terminal_give_losses_speed_and_time_left(sources, tmp_path):
    recipe = write_recipe(tmp_path)
    result = RUNNER.invoke(
        app, ["verifier", *data_options(sources), "--out", str(tmp_path / "run"), "--config", str(recipe)]
    )
    assert result.exit_code == 0, result.output
    last = next(line for line in result.stdout.splitlines() if line.startswith("step 4"))
    assert last.startswith("step 4/4 ")
    assert all(word in last for word in ("code", "mtp", "tok/s", "eta"))


def test_kinds_other_than_the_recipes_are_refused(sources, tmp_path):
    sources = {"code": sources["code"]}
    result = RUNNER.invoke(app, ["verifier", *data_options(sources), "--out", str(tmp_path / "run")])
    assert isinstance(result.exception, UsageError)
    assert "word_problems" in str(result.exception)


def test_the_command_line_needs_no_torch_until_it_trains():
    """`redraft --help` must work quickly without the export extra."""
    code = "import sys, redraft.cli.train; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_train_publish_and_measure_a_drafter(sources, verifier_folder, tmp_path):
    """All steps of a drafter's training by the command line, and its refusals."""
    recipe, run, out, prompts = (tmp_path / name for name in ("small.toml", "run", "out", "p.jsonl"))
    recipe.write_text(
        'method = "lyanna"\nbatch_tokens = 64\nseq_len = 16\ndecay_seq_len = 16\nheld_out_every = 3\n'
        "[drafter]\nrank = 4\nchain = 2\n"
        "[self_text]\nrows = 4\nprompt_tokens = 6\nnew_tokens = 20\nheld_out_rows = 2\n",
        encoding="utf-8",
    )
    common = ["--verifier", str(verifier_folder), "--out", str(run), "--config", str(recipe)]
    data = ["--data", f"prose={sources['prose']}"]
    result = RUNNER.invoke(app, ["lyanna", *common, *data, "--steps", "3", "--seed", "2", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"out": str(run), "steps": 3, "steps_run": 3}

    assert isinstance(RUNNER.invoke(app, ["publish", str(run), *data, "--out", str(out)]).exception, UsageError)
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


def test_lines_of_a_drafters_run_show_writing_losses_and_acceptance(verifier_folder, tmp_path):
    recipe = tmp_path / "small.toml"
    recipe.write_text(
        "steps = 2\nbatch_tokens = 64\nseq_len = 16\ndecay_seq_len = 16\nevaluate_every = 1\n"
        "[self_text]\nrows = 4\nprompt_tokens = 6\nnew_tokens = 20\nheld_out_rows = 2\ntext = 0.0\n",
        encoding="utf-8",
    )
    options = ["--verifier", str(verifier_folder), "--out", str(tmp_path / "run"), "--config", str(recipe)]
    result = RUNNER.invoke(app, ["lyanna", *options])
    assert result.exit_code == 0, result.output
    assert "writing self.train.1: 4/4 rows" in result.stdout
    assert "step 1 accepted self 0." in result.stdout
    assert "step 2/2 ce " in result.stdout


def test_a_verifiers_run_is_not_published_without_its_data(run, tmp_path):
    result = RUNNER.invoke(app, ["publish", str(run), "--out", str(tmp_path)])
    assert isinstance(result.exception, UsageError)
    assert "--data" in str(result.exception)
