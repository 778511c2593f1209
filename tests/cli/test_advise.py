"""`redraft advise`: its figures on a real bundle, and options that it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Refused, Run

from redraft.bench import advice_runs
from redraft.bench.advice import StepMs
from redraft.bench.compare import PLAIN
from redraft.cli.advise import show
from redraft.engines.manifest import Manifest

SHORT = ("--max-new-tokens", "16", "--threads", "1", "--limit", "1")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"turns": ["def add(a, b):\n"]}) + "\n")
    return file


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "ROUNDS": 1,
        "CHECK_ROUNDS": 1,
        "CURVE_SECONDS": 0.02,
        "_STEPS_SECONDS": 0.0,
        "DECODE_SECONDS": 0.0,
        "BATCH_SECONDS": 0.0,
        "CHOSEN_SECONDS": 0.1,
    }.items():
        monkeypatch.setattr(advice_runs, name, value)


def test_figures_table_and_picture(
    run: Run, tiny_bundle: Path, prompts: Path, tmp_path: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--engines", tiny_bundle, "--prompts", prompts, *SHORT, "--batch", "1,2")
    plot = tmp_path / "gain.svg"
    found = run("advise", *given, "--check", "--plot", plot)
    assert list(found["methods"]) == ["lyanna", "fast"]
    assert found["prompts"] == 1
    for name, method in found["methods"].items():
        assert list(method["batches"]) == ["1", "2"]
        assert all(0 <= share <= 1 for share in method["shares"])
        for batch in method["batches"].values():
            assert 1 <= batch["nodes"] <= len(method["shares"])
            assert batch["gain"] == pytest.approx(batch["tokens"] / batch["least_tokens"])
            assert batch["pays"] is (batch["tokens"] > batch["least_tokens"])
        assert list(found["check"][name]) == ["1", "2"]
        for batch, checked in found["check"][name].items():
            one = method["batches"][batch]
            assert (checked["nodes"], checked["predicted"]) == (one["nodes"], one["gain"])
            assert checked["difference"] == pytest.approx(one["gain"] / checked["measured"] - 1)
            assert 1 <= checked["tokens_measured"] <= 1 + one["nodes"]
    assert "lyanna, break-even" in plot.read_text("utf-8")
    assert not plot.with_suffix(".png").exists()
    found["methods"]["fast"]["batches"]["2"]["least_tokens"] = 0.9
    show(found)
    shown = capsys.readouterr()
    assert "beware: fast, batch 2: a plain step took longer than a speculative one" in shown.err
    lines = [line.split()[:2] for line in shown.out.splitlines()]
    assert lines[1:6] == [["method", "batch"], ["lyanna", "1"], ["lyanna", "2"], ["fast", "1"], ["fast", "2"]]
    assert lines[8:] == lines[1:6]


@pytest.mark.parametrize("batch", [1, 2])
def test_the_best_size_is_predicted_by_its_own_steps(
    run: Run, tiny_bundle: Path, prompts: Path, quick: None, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """Not by the steps that it was chosen by, whose times may have been lucky."""
    timed, decoded, one_step = advice_runs._batch_steps, advice_runs.repeated, advice_runs._step_ms
    decodings: list[int] = []

    def slower(found: StepMs) -> StepMs:
        return found._replace(verify_ms=100 * found.verify_ms)

    def steps(*given: Any) -> dict[str, StepMs]:
        found, at_last = timed(*given), given[4] == advice_runs.CHOSEN_SECONDS
        return {way: slower(each) if at_last and way != PLAIN else each for way, each in found.items()}

    def decode(*given: Any) -> Any:
        decodings.append(1)
        return decoded(*given)

    def step_ms(totals: Any) -> StepMs:
        return slower(one_step(totals)) if len(decodings) > 1 and totals.drafted else one_step(totals)

    for name, function in {"_batch_steps": steps, "repeated": decode, "_step_ms": step_ms}.items():
        monkeypatch.setattr(advice_runs, name, function)
    found = run("advise", "--engines", tiny_bundle, "--prompts", prompts, *SHORT, "--batch", str(batch))
    assert all(method["batches"][str(batch)]["gain"] < 0.2 for method in found["methods"].values())


def test_refused(
    refused: Refused, bundle: Path, tiny_bundle: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = ("advise", "--engines", tiny_bundle, *SHORT)
    assert "Missing option '--prompts'" in refused(*tiny, status=2)
    given = (*tiny, "--prompts", prompts)
    assert "expected a name that ends with .svg or .png" in refused(*given, "--plot", tmp_path / "gain.gif", status=2)
    assert "cannot be written" in refused(*given, "--plot", tmp_path / "none/gain.png", status=2)
    assert "--batch '0': expected whole numbers from 1" in refused(*given, "--batch", "0", status=2)
    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "largest_call", (2, 8))
        assert "3 sequences at once are more than the 2" in refused(*given, "--batch", "1,3", status=2)
    without = refused("advise", "--engines", bundle, "--prompts", prompts, status=2)
    assert "this bundle has no drafter to advise on" in without
    assert "no text is longer than the" in refused(*given, "--batch", "1", "--max-new-tokens", "3", status=2)
