"""A steered drafter by the command line: pretrained, steered, published, built, used; and one without steering."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.little import write_checkpoint

from redraft.cli import main

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
PRETRAINED = f'method = "draft_model"\n{SCHEDULE}\n[drafter]\nlayers = [0, 1]\nkl = 0.0\nhard = 1.0\n'
STEERED = f'method = "steered"\n{SCHEDULE}\n[drafter]\nlayers = [0, 1]\n'
TEXT = "\n[self_text]\nrows = 4\nprompt_tokens = 4\nnew_tokens = 20\nheld_out_rows = 2\ngreedy = 0.0\n"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Run a command with --json in this process. Returns its object."""

    def command(*words: object) -> dict[str, Any]:
        assert main.run([*map(str, words), "--json"]) == 0, capsys.readouterr().err
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return command


def test_a_steered_drafter_from_training_to_text(
    run: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It begins with a student that was trained on plain text, which has no steering of its own."""
    verifier = write_checkpoint(tmp_path / "verifier")
    (tmp_path / "pretrained.toml").write_text(f"{PRETRAINED}{TEXT}sampled = 0.0\ntext = 1.0\n")
    (tmp_path / "steered.toml").write_text(f"{STEERED}{TEXT}sampled = 1.0\ntext = 0.0\ntemperatures = [1.0]\n")
    text = tmp_path / "text.txt"
    animals = ("cat", "dog", "fox", "hen", "pig", "rat") * 20
    text.write_text("\n<|endoftext|>\n".join(f"the {word} sat on a mat, and so did {word}." * 4 for word in animals))
    data = ("--verifier", verifier, "--data", f"prose={text}", "--threads", 1)
    pretrained, trained, drafter = (tmp_path / name for name in ("pretrained", "trained", "drafter"))
    run("train", "student", *data, "--config", tmp_path / "pretrained.toml", "--out", pretrained)
    more = ("--config", tmp_path / "steered.toml", "--start", pretrained)
    assert run("train", "steered", *data, *more, "--out", trained)["steps_run"] == 3
    run("train", "publish", trained, "--out", drafter)
    engines = tmp_path / "engines"
    built = run("build", verifier, "-o", engines, "--drafter", f"{drafter},steps=4", "--skip-check")["drafters"]
    assert built["steered"]["summary"] == "2 layers, 4 steps, steering by hidden states 1, 0"
    for temperature in (0, 1):
        sampled = ("--temperature", temperature, "--seed", 3, "--max-new-tokens", 24, "--ignore-eos", "--threads", 1)
        texts = {
            way: run("generate", "--engines", engines, "--prompt", "abc", "--method", way, "--no-verify", *sampled)
            for way in ("none", "steered", "ngram+steered")
        }
        assert len({str(found["token_ids"]) for found in texts.values()}) == 1
        assert texts["steered"]["metrics"]["num_spec_steps"] > 0

    run("train", "publish", pretrained, "--out", tmp_path / "student")
    wrong = f"{tmp_path / 'student'},method=steered"
    words = ("build", verifier, "-o", tmp_path / "out", "--drafter", wrong, "--skip-check")
    assert main.run([str(word) for word in words]) == 1
    *_, line = capsys.readouterr().err.splitlines()
    assert "student is a drafter of draft_model: it has no steering; train it on with `redraft train steered" in line
