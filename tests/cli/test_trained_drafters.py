"""Drafters by the command line: trained, published, built and used; and drafters that do not fit."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.cli.conftest import Refused, Run, trained_drafter

from redraft.cli import main

STEERING = """
[self_text]
rows = 4
prompt_tokens = 4
new_tokens = 20
held_out_rows = 2
greedy = 0.0
sampled = {sampled}
text = {text}
temperatures = [1.0]
"""
"""Text for steered training: of the verifier itself, or plain."""


@dataclass(frozen=True)
class Case:
    """A method's drafter.

    options: of the build.   summary: of the bundle, and its end.   others: methods that draft with it too.
    refused: options of builds that are refused, with a part of the line.
    """

    method: str
    options: str = "precision=fp32"
    summary: str = ""
    others: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    measured: bool = False


CASES = (
    Case(
        "medusa",
        "draft_vocabulary=20,nodes=9",
        "heads, static tree of 9 nodes, 20 of 32 tokens",
        ("ngram+medusa",),
        (
            ("steps=5", "the drafter has 4 heads, which draft no tree of 5 levels; build it with at most steps=4"),
            ("width=11", "has accuracies of 10 candidates of a head, not of 11; build it with at most width=10"),
            ("width=3,draft_vocabulary=2", "a node cannot have 3 children of 2 tokens; lower width, or raise"),
        ),
        measured=True,
    ),
    Case(
        "multi_head",
        "draft_vocabulary=20,nodes=9",
        "3 heads, static tree of 9 nodes, 20 of 32 tokens",
        ("ngram+multi_head",),
        (
            ("steps=4", "the drafter has 3 heads, which draft no tree of 4 levels; build it with at most steps=3"),
            ("method=medusa", "is a drafter of multi_head: "),
        ),
        measured=True,
    ),
    Case("eagle", summary="4 steps, static trees 3 wide of 12 nodes", others=("eagle2", "ngram+eagle2")),
    Case("eagle3"),
    Case("griffin"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.method)
def test_a_drafter_from_training_to_text(
    case: Case, checkpoint: Path, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Texts are the verifier's, greedy and sampled, on the host and over step graphs."""
    drafter, engines = trained_drafter(case.method, checkpoint, run, tmp_path), tmp_path / "engines"
    if case.measured:
        measured = json.loads((tmp_path / "run" / "progress.jsonl").read_text().splitlines()[-1])
        config = json.loads((drafter / "config.json").read_text())["config"]
        assert config["rank_accuracies"] == measured["rank_accuracies"]
        assert {len(shares) for shares in config["rank_accuracies"]} == {10}
    build = ("build", checkpoint, "-o", engines, "--skip-check", "--eval-text", "none")
    for options, line in case.refused:
        assert main.run([*map(str, build), "--drafter", f"{drafter},{options}"]) in (1, 2)
        errors = capsys.readouterr().err
        assert line in errors
        assert "tracing" not in errors
    chosen = ["--drafter", f"{drafter},{case.options}"]
    if "eagle2" in case.others:  # two methods use one drafter in one bundle
        chosen += ["--drafter", f"eagle2={drafter},method=eagle2,precision=fp32"]
    built = run(*build, *chosen)["drafters"]
    assert built[case.method]["method"] == case.method
    assert built[case.method]["summary"].endswith(case.summary)
    check_texts(engines, run, case.method, *case.others)


def check_texts(engines: Path, run: Run, *methods: str) -> None:
    """Compare texts by every method, and on another device by the first one, with plain decoding's."""
    for temperature in (0, 1):
        sampled = ("--temperature", temperature, "--seed", 3, "--max-new-tokens", 24, "--ignore-eos", "--threads", "1")
        command = ("generate", "--engines", engines, "--prompt", "abc", "--no-verify", *sampled, "--method")
        texts = [run(*command, method) for method in (*methods, "none")]
        texts.append(run(*command, methods[0], "--device", "cpu", "--budget", "nodes=6,depth=3,width=2"))
        assert len({str(text["token_ids"]) for text in texts}) == 1
        assert texts[0]["metrics"]["num_spec_steps"] > 0
        fewest = 0 if methods[0] == "steered" else 20  # a steered student's drafts end early
        assert texts[-1]["metrics"]["num_draft_tokens"] > fewest


def test_a_steered_drafter_from_training_to_text(
    checkpoint: Path, run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It begins with a student that was trained on plain text, which has no steering of its own."""
    layers = "\n[drafter]\nlayers = [0, 1]\n"
    plain = f"{layers}kl = 0.0\nhard = 1.0\n{STEERING.format(sampled=0.0, text=1.0)}"
    student = trained_drafter("student", checkpoint, run, tmp_path / "plain", f'method = "draft_model"\n{plain}')
    steering = f'method = "steered"\n{layers}{STEERING.format(sampled=1.0, text=0.0)}'
    start = ("--start", tmp_path / "plain" / "run")
    drafter, engines = trained_drafter("steered", checkpoint, run, tmp_path / "it", steering, *start), tmp_path / "out"
    build = ("build", checkpoint, "-o", engines, "--skip-check", "--eval-text", "none", "--drafter")
    assert main.run([*map(str, build), f"{student},method=steered"]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert "is a drafter of draft_model: it has no steering; train it on with `redraft train steered" in line
    built = run(*build, f"{drafter},steps=4")["drafters"]
    assert built["steered"]["summary"] == "2 layers, 4 steps, steering by hidden states 1, 0"
    check_texts(engines, run, "steered", "ngram+steered")


def test_drafters_that_do_not_fit(checkpoint: Path, refused: Refused, tmp_path: Path) -> None:
    def line(drafter: str, status: int = 1) -> str:
        return refused("build", checkpoint, "-o", tmp_path / "out", "--drafter", drafter, status=status)

    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "config.json").write_text('{"model_type": "llama"}')
    save_file({"block.weight": torch.ones(2)}, tmp_path / "unknown" / "model.safetensors")
    assert "unknown has an unknown layout: no known layout has block.weight; " in line(f"eagle3={tmp_path / 'unknown'}")
    assert "width must be a number from 1 to 10, not 11" in line("e=random,method=griffin,width=11", 2)
    assert "a tree of 10 levels of 10 nodes computes 90 rows" in line("e=random,method=hass,width=10,steps=10", 2)
    assert "nodes must be a positive number, not 0" in line("e=random,method=fspad,nodes=0", 2)


@pytest.mark.parametrize("fault", ["token", "tokenizer"])
def test_a_draft_model_with_other_tokens(checkpoint: Path, refused: Refused, tmp_path: Path, fault: str) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "draft"))
    tokenizer = folder / "tokenizer.json"
    if fault == "token":
        values = json.loads(tokenizer.read_text(encoding="utf-8"))
        words = values["model"]["vocab"]
        words["ä"] = words.pop("a")
        tokenizer.write_text(json.dumps(values), encoding="utf-8")
    else:
        tokenizer.unlink()
    line = refused("build", checkpoint, "-o", tmp_path / "out", "--drafter", f"d={folder}", status=1)
    expected = {
        "token": "1 of 29 tokens differ, first token 3, 'ä' instead of 'a'",
        "tokenizer": "draft has no tokenizer.json and no other file with a vocabulary",
    }
    assert expected[fault] in line
