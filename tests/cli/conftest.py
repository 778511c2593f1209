"""Helpers of tests of the command line: other chat templates, commands that must fail, and trained drafters."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.little import Redraft, write_tokenizer

from redraft import names
from redraft.engines.manifest import signed

__all__ = ["write_tokenizer"]  # tests.runtime imports it from here
Run = Callable[..., dict[str, Any]]
Refused = Callable[..., str]
SCHEDULE = """
steps = 3
batch_tokens = 64
seq_len = 16
decay_seq_len = 16
warmup_steps = 1
optimizer = "adam"
lr = 0.003
held_out_every = 3
evaluate_every = 3
"""
"""A training of three steps, for any method."""
SELF_TEXT = """
[self_text]
rows = 4
prompt_tokens = 4
new_tokens = 20
held_out_rows = 2
"""


@pytest.fixture
def with_template(bundle: Path, tmp_path: Path) -> Callable[[str | None], Path]:
    """Copy the bundle with another chat template, or with none."""

    return lambda template: copy_with_template(bundle, tmp_path / "templated", template)


def copy_with_template(bundle: Path, target: Path, template: str | None) -> Path:
    """Copy a bundle with another chat template, or with none."""
    folder = Path(shutil.copytree(bundle, target))
    manifest = json.loads((folder / "manifest.json").read_text())
    file = folder / names.CHAT_TEMPLATE_FILE
    if template is None:
        file.unlink()
        del manifest["files"][file.name]
    else:
        file.write_text(template)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        manifest["files"][file.name] = {"size": file.stat().st_size, "sha256": digest}
    (folder / "manifest.json").write_text(json.dumps(signed(manifest)))
    return folder


@pytest.fixture
def refused(redraft: Redraft, capfd: pytest.CaptureFixture[str]) -> Refused:
    """Run a command that must fail like a user's mistake: one line, no output. Returns the line."""

    def command(*words: object, status: int, text: str = "") -> str:
        capfd.readouterr()
        done = redraft(*words, input=text)
        assert done.returncode == status, done.stderr
        shown = done.stderr + capfd.readouterr().err  # C++ writes past `sys.stderr`
        lines = [line for line in shown.splitlines() if not line.startswith("[")]
        assert len(lines) == 1, shown
        assert lines[0].startswith("redraft: error: ")
        assert done.stdout == ""
        return lines[0]

    return command


@pytest.fixture(scope="session")
def run(redraft: Redraft) -> Run:
    """Run a command with --json in this process. Returns its object."""

    def command(*words: object) -> dict[str, Any]:
        done = redraft(*words, "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return command


def trained_drafter(
    method: str, verifier: Path, run: Run, folder: Path, recipe: str = SELF_TEXT, *options: object
) -> Path:
    """Train a drafter for a few steps in `folder`/run and publish it. Returns its folder.

    recipe: what follows the schedule, or begins with its method.   options: of the training.
    """
    folder.mkdir(exist_ok=True)
    own, _, rest = recipe.partition("\n")
    (folder / "recipe.toml").write_text(f"{own}\n{SCHEDULE}{rest}")
    text = folder / "text.txt"
    animals = ("cat", "dog", "fox", "hen", "pig", "rat") * 20
    text.write_text("\n<|endoftext|>\n".join(f"the {word} sat on a mat, and so did {word}." * 4 for word in animals))
    trained, drafter = folder / "run", folder / "drafter"
    data = ("--verifier", verifier, "--data", f"prose={text}", "--config", folder / "recipe.toml", "--threads", "1")
    assert run("train", method, *data, "--out", trained, *options)["steps_run"] == 3
    run("train", "publish", trained, "--out", drafter)
    return drafter
