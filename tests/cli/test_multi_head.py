"""Heads on the trunk by the command line: trained, published, built and used; and drafters that do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.conftest import Run, trained_drafter

from redraft.cli import main


def test_heads_from_training_to_text(
    checkpoint: Path, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The drafter keeps the measured accuracies. Texts are the verifier's, on the host and over step graphs."""
    drafter, engines = trained_drafter("multi_head", checkpoint, run, tmp_path), tmp_path / "engines"
    measured = json.loads((tmp_path / "run" / "progress.jsonl").read_text().splitlines()[-1])
    config = json.loads((drafter / "config.json").read_text())["config"]
    assert config["rank_accuracies"] == measured["rank_accuracies"]
    assert [len(shares) for shares in config["rank_accuracies"]] == [10] * 3
    assert config["hidden_states"] == ["0"]  # of two layers

    build = ("build", checkpoint, "-o", engines, "--skip-check", "--drafter")
    for options, line in (
        ("steps=4", "the drafter has 3 heads, which draft no tree of 4 levels; build it with at most steps=3"),
        ("method=medusa", "is a drafter of multi_head: "),
    ):
        assert main.run([*map(str, build), f"{drafter},{options}"]) == 1
        assert line in capsys.readouterr().err
    built = run(*build, f"{drafter},draft_vocabulary=20,nodes=9")["drafters"]
    assert built["multi_head"]["summary"].endswith("3 heads, static tree of 9 nodes, 20 of 32 tokens")

    for temperature, ways in ((0, ("multi_head",)), (1, ("multi_head", "ngram+multi_head"))):
        sampled = ("--temperature", temperature, "--seed", 3, "--max-new-tokens", 24, "--ignore-eos", "--threads", "1")
        command = ("generate", "--engines", engines, "--prompt", "abc", "--no-verify", *sampled, "--method")
        found = [
            run(*command, "none"),
            *(run(*command, way) for way in ways),
            run(*command, "multi_head", "--device", "cpu"),
        ]
        assert len({str(one["token_ids"]) for one in found}) == 1
        assert found[-1]["metrics"]["num_spec_steps"] > 0
