"""`redraft bench` and `redraft demo`: the JSON they print, and prompt files they refuse by line."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Refused = Callable[..., str]
Redraft = Callable[..., subprocess.CompletedProcess[str]]
FIGURES = {"tokens_per_second", "speedup", "mean_acceptance_length", "identical_to_plain", "prompts", "tokens",
           "overhead_fraction"}  # fmt: skip


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Three prompts of two kinds."""
    rows = [("1", "code", "abc abc"), ("2", "code", "def def"), ("3", "prose", "the cat")]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"id": i, "category": k, "turns": [t]}) + "\n" for i, k, t in rows))
    return file


def test_json_gives_environment_and_figures_by_method(redraft: Redraft, bundle: Path, prompts: Path) -> None:
    result = redraft("bench", "--engines", bundle, "--prompts", prompts, "--max-new-tokens", "16", "--ignore-eos",
                     "--threads", "1", "--json")  # fmt: skip
    measured = json.loads(result.stdout)
    assert result.stderr == ""
    assert measured["environment"]["threads"] == 1
    assert measured["environment"]["libraries"]["onnxruntime"]
    assert measured["environment"]["model"]["weights_sha256"]
    assert set(measured["methods"]) == {"none", "ngram"}
    assert set(measured["methods"]["ngram"]) >= FIGURES
    assert measured["methods"]["none"]["speedup"] == 1
    assert measured["methods"]["ngram"]["identical_to_plain"] is True
    assert {kind: part["prompts"] for kind, part in measured["methods"]["ngram"]["kinds"].items()} == {
        "code": 2, "prose": 1,
    }  # fmt: skip


def test_forced_acceptance_is_labelled_and_reached(redraft: Redraft, bundle: Path, prompts: Path) -> None:
    arguments = ("bench", "--engines", bundle, "--prompts", prompts, "--limit", "1", "--max-new-tokens", "31",
                 "--synthetic-acceptance", "1,1", "--budget", "nodes=2,depth=2,width=1")  # fmt: skip
    measured = json.loads(redraft(*arguments, "--json").stdout)
    figures = measured["methods"]["ngram"]
    assert measured["synthetic_acceptance"] == [1, 1]
    assert figures["synthetic_acceptance"] is True
    assert figures["identical_to_plain"] is None
    assert figures["mean_acceptance_length"] == 3
    shown = redraft(*arguments).stdout
    assert "ngram (synthetic)" in shown
    assert "acceptance was forced" in shown


@pytest.mark.parametrize("options", [(), ("--device", "cpu")])
def test_demo_says_that_both_wrote_the_same(redraft: Redraft, bundle: Path, options: tuple[str, ...]) -> None:
    result = redraft("demo", "--engines", bundle, "--prompt", "abc abc", "--max-new-tokens", "16", *options)
    assert result.returncode == 0, result.stderr
    assert "lossless: both wrote the same tokens" in result.stdout
    assert "redraft bench" in result.stdout


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ('{"turns": ["a"]}\n{"turns"', "line 2: not JSON"),
        ('{"turns": ["a"]}\n\n{"text": "b"}\n', "line 3: no text in `turns`"),
        ("[1]\n", "line 1: no text in `turns`"),
        ("\n", "no prompts in"),
    ],
)
def test_invalid_prompt_files(refused: Refused, bundle: Path, tmp_path: Path, content: str, word: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    assert word in refused("bench", "--engines", bundle, "--prompts", file, status=1)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--methods", "none,"], "--methods"),
        (["--methods", "none,magic"], "unknown method 'magic'"),
        (["--limit", "-1"], "--limit"),
        (["--synthetic-acceptance", "1.5"], "--synthetic-acceptance"),
        (["--synthetic-acceptance", "high"], "--synthetic-acceptance"),
        (["--methods", "none", "--budget", "nodes=4,depth=2,width=2"], "--budget would do nothing"),
        (["--methods", "none", "--synthetic-acceptance", "1"], "--synthetic-acceptance would do nothing"),
    ],
)
def test_bad_options(refused: Refused, bundle: Path, prompts: Path, arguments: list[str], word: str) -> None:
    assert word in refused("bench", "--engines", bundle, "--prompts", prompts, *arguments, status=2)


def test_missing_prompt_file(refused: Refused, bundle: Path) -> None:
    assert "cannot read" in refused("bench", "--engines", bundle, "--prompts", "/no/such.jsonl", status=2)
