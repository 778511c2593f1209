"""Medusa's heads by the command line: trained, published, built and used; and trees that they do not cover."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from tests.cli.conftest import Run, trained_drafter

from redraft.cli import main


def test_heads_from_training_to_text(
    checkpoint: Path, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter keeps the measured accuracies. Texts are the verifier's, on the host and over step graphs."""
    drafter, engines = trained_drafter("medusa", checkpoint, run, tmp_path), tmp_path / "engines"
    measured = json.loads((tmp_path / "run" / "progress.jsonl").read_text().splitlines()[-1])
    config = json.loads((drafter / "config.json").read_text())["config"]
    assert config["rank_accuracies"] == measured["rank_accuracies"]
    assert [len(shares) for shares in config["rank_accuracies"]] == [10] * 4

    build = ("build", checkpoint, "-o", engines, "--skip-check", "--drafter")
    with monkeypatch.context() as patch:
        patch.setattr("redraft.assembly.bundle._Build.stage", lambda *args: pytest.fail("refused after an export"))
        for option, line in (
            ("steps=5", "the drafter has 4 heads, which draft no tree of 5 levels; build it with at most steps=4"),
            ("width=11", "has accuracies of 10 candidates of a head, not of 11; build it with at most width=10"),
            ("width=3,draft_vocabulary=2", "a node cannot have 3 children of 2 tokens; lower width, or raise"),
        ):
            assert main.run([*map(str, build), f"{drafter},{option}"]) in (1, 2)
            assert line in capsys.readouterr().err
        other = Path(shutil.copytree(drafter, tmp_path / "other"))
        text = (drafter / "config.json").read_text()
        (other / "config.json").write_text(text.replace(json.loads(text)["verifier"]["weights"][0], "0" * 64))
        assert main.run([*map(str, build), str(other)]) == 1
        assert "was trained for another verifier: expected weights 000000000000" in capsys.readouterr().err
        os.truncate(other / "model.safetensors", 100)
        assert main.run([*map(str, build), str(other)]) == 1
        assert "model.safetensors is truncated" in capsys.readouterr().err
    built = run(*build, f"{drafter},draft_vocabulary=20,nodes=9")["drafters"]
    assert built["medusa"]["summary"].endswith("heads, static tree of 9 nodes, 20 of 32 tokens")

    for temperature, ways in ((0, ("medusa",)), (1, ("medusa", "ngram+medusa"))):
        sampled = ("--temperature", temperature, "--seed", 3, "--max-new-tokens", 24, "--ignore-eos", "--threads", "1")
        command = ("generate", "--engines", engines, "--prompt", "abc", "--no-verify", *sampled, "--method")
        found = [
            run(*command, "none"),
            *(run(*command, way) for way in ways),
            run(*command, "medusa", "--device", "cpu"),
        ]
        assert len({str(one["token_ids"]) for one in found}) == 1
        assert found[-1]["metrics"]["num_spec_steps"] > 0
