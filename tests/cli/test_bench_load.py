"""`redraft bench --batch`: the JSON and the page of load measurements, and options that it refuses."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.conftest import Refused, Run
from tests.little import Redraft

from redraft.bench import load, long_prompts
from redraft.engines.manifest import Manifest
from redraft.runtime.loop.decode_loop import DecodeLoop

SHORT = ("--max-new-tokens", "6", "--ignore-eos", "--threads", "1")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Three prompts, one of two turns."""
    rows = [["abc abc"], ["def def", "and"], ["the cat"]]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in rows))
    return file


@pytest.fixture
def long(tmp_path: Path) -> Path:
    """Four prompts."""
    file = tmp_path / "long.jsonl"
    rows = [" ".join(f"{letter}{number}" for number in range(6)) for letter in "abcd"]
    file.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in rows))
    return file


def test_json_has_figures_by_batch_and_method(run: Run, bundle: Path, prompts: Path) -> None:
    found = run("bench", "--engines", bundle, "--prompts", prompts, *SHORT, "--batch", "1,3")
    assert (found["prompts"], found["turns_left_out"], found["rate"]) == (3, 1, None)
    assert found["environment"]["threads"] == 1
    assert {batch: list(methods) for batch, methods in found["batches"].items()} == {
        "1": ["none", "ngram"], "3": ["none", "ngram"],
    }  # fmt: skip
    for batch, methods in found["batches"].items():
        for each in methods.values():
            requests = load.BLOCKS * load.TURNS * int(batch)
            tokens = sum(load.spread(6, 3)) * requests // 3
            assert (each["outputs"], each["tokens"], each["identical_to_plain"]) == (requests, tokens, True)
            assert 0 < each["overhead_fraction"] < 1
            assert each["time_to_first_token_ms"]["p50"] <= each["time_to_first_token_ms"]["p99"]
            assert len(each["speedup_interval"]) == 2
            assert "queue_ms" not in each


def test_a_rate_adds_the_queue(run: Run, redraft: Redraft, bundle: Path, prompts: Path) -> None:
    given = ("bench", "--engines", bundle, "--prompts", prompts, *SHORT, "--methods", "ngram", "--batch", "2")
    found = run(*given, "--rate", "500", "--chat")
    assert found["rate"] == 500
    assert found["batches"]["2"]["ngram"]["queue_ms"]["p99"] >= 0
    assert found["batches"]["2"]["ngram"]["identical_to_plain"] is True
    shown = redraft(*given, "--rate", "500").stdout
    assert "queue, ms" in shown
    assert "turns left out, since each prompt has its first turn only: 1" in shown
    assert "batch 2: plain outputs that loop (the last 64 tokens repeat a period of at most 16): 0 of 36" in shown


def test_long_prompts_have_a_table_of_their_own(
    run: Run, redraft: Redraft, bundle: Path, long: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps sleep for a moment: else requests may fill the context before this thread hears of their outputs."""
    step = DecodeLoop.step
    monkeypatch.setattr(DecodeLoop, "step", lambda loop: (time.sleep(0.002), step(loop))[1])
    given = ("bench", "--engines", bundle, "--prompts", long, *SHORT, "--methods", "none", "--batch", "1,2",
             "--long-prompts", "32")  # fmt: skip
    found = run(*given, "--report", tmp_path / "page")
    assert found["long_prompts"]["tokens"] == 32
    batches = found["long_prompts"]["batches"]
    assert {batch: list(methods) for batch, methods in batches.items()} == {"1": ["none"], "2": ["none"]}
    one, two = (batches[batch]["none"] for batch in ("1", "2"))
    assert "gap_ratio" not in one
    for each in (one, two):
        assert (each["cached_tokens"], each["differing_hits"], each["repeats"]) == (16, 0, 6)
        assert each["steady_tokens_per_second"] > 0
        assert len(each["hit_ratio_interval"]) == 2
    assert two["quiet_ms"]["p50"] < two["beside_prompt_ms"]["p99"]
    assert two["prompt_beside_ms"] > 0
    page = (tmp_path / "page/report.html").read_text("utf-8")
    assert "Prompts of 32 tokens arrive one after another" in page
    assert page.count("<h3>") == 2
    shown = redraft(*given).stdout
    assert "prompts of 32 tokens, and requests that run" in shown
    assert "p99 over quiet p50" in shown


def test_a_missed_prefix_is_named(redraft: Redraft, bundle: Path, long: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_prompts, "measure", lambda *given: {"none": [
        long_prompts.Repeat(1.0, 1.0, 1.0, 16, 32, False, 1.0, [1.0], None)
    ]})  # fmt: skip
    shown = redraft("bench", "--engines", bundle, "--prompts", long, *SHORT, "--methods", "none", "--batch", "1",
                    "--long-prompts", "32").stdout  # fmt: skip
    assert "batch 1, none: a hit found 16 of 32 shared tokens" in shown
    assert "DIFFERENT: batch 1, none: 1 of 1 hits" in shown


def test_a_long_prompt_needs_prompts_and_context(refused: Refused, bundle: Path, prompts: Path) -> None:
    given = ("bench", "--engines", bundle, "--prompts", prompts, "--batch", "2", "--long-prompts")
    assert "--long-prompts needs 40 tokens, and the prompts have" in refused(*given, "40", status=2)
    assert "with 16 tokens more, is longer than the context of" in refused(*given, "5000", status=2)


def test_differing_texts_are_named(
    redraft: Redraft, bundle: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*given: object) -> dict[str, object]:
        found = summarise(*given)
        found["ngram"]["differing_outputs"] = 5
        return found

    summarise = load.summarise
    monkeypatch.setattr(load, "summarise", wrong)
    shown = redraft("bench", "--engines", bundle, "--prompts", prompts, *SHORT, "--batch", "2").stdout
    assert "DIFFERENT: batch 2, ngram: 5 of 36 outputs" in shown
    assert "NO, 5 differ" in shown


def test_the_page_has_bars_and_latencies(run: Run, bundle: Path, prompts: Path, tmp_path: Path) -> None:
    found = run("bench", "--engines", bundle, "--prompts", prompts, *SHORT, "--batch", "1,2", "--report",
                tmp_path / "page", "--methods", "all")  # fmt: skip
    assert list(found["batches"]["2"]) == ["none", "ngram", "suffix", "lookahead"]
    assert {Path(file).name for file in found["files"]} == {"report.html", "report.json", "load.png", "load.svg"}
    page = (tmp_path / "page/report.html").read_text("utf-8")
    assert page.count("<svg") == 1
    assert "<tr><td>2<td>lookahead<td>" in page
    assert "A new request begins when one has ended." in page
    assert str(tmp_path) not in page
    assert json.loads((tmp_path / "page/report.json").read_text())["batches"] == found["batches"]


def test_too_few_prompts_for_the_largest_batch(refused: Refused, bundle: Path, prompts: Path) -> None:
    shown = refused("bench", "--engines", bundle, "--prompts", prompts, "--batch", "1,4", status=2)
    assert "--batch 4 needs 4 prompts, found 3" in shown


def test_engines_for_smaller_batches_are_refused_before_any_runs(
    redraft: Redraft, bundle: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Manifest, "largest_call", (2, 8))
    done = redraft("bench", "--engines", bundle, "--prompts", prompts, "--batch", "1,3")
    assert done.returncode == 2
    assert "3 sequences at once are more than the 2" in done.stderr
    assert "warming up" not in done.stderr


def test_an_unknown_method_is_refused_before_any_runs(redraft: Redraft, bundle: Path, prompts: Path) -> None:
    done = redraft("bench", "--engines", bundle, "--prompts", prompts, "--batch", "1", "--methods", "ngram,magic")
    assert done.returncode == 2
    assert "this bundle has no drafter 'magic'" in done.stderr
    assert "warming up" not in done.stderr


def test_a_prompt_without_a_template_is_refused(
    refused: Refused, with_template: Callable[[str | None], Path], prompts: Path
) -> None:
    engines = with_template(None)
    assert "no chat template" in refused("bench", "--engines", engines, "--prompts", prompts, "--chat", "--batch", "2",
                                         status=2)  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--batch", "1,x"], "--batch '1,x': expected whole numbers from 1"),
        (["--batch", "0"], "--batch '0'"),
        (["--batch", ""], "--batch ''"),
        (["--batch", "2", "--rate", "0"], "--rate 0: expected requests a second, above 0"),
        (["--batch", "2", "--rate", "-1.5"], "--rate -1.5"),
        (["--batch", "2", "--rate", "inf"], "--rate inf"),
        (["--rate", "2"], "--rate belongs to --batch"),
        (["--long-prompts", "100"], "--long-prompts belongs to --batch"),
        (["--batch", "2", "--long-prompts", "31"], "--long-prompts 31: expected 32 tokens or more"),
        (["--batch", "2", "--controllers", "fixed"], "--batch takes no --controllers"),
        (["--batch", "2", "--synthetic-acceptance", "1"], "--batch takes no --synthetic-acceptance"),
        (["--batch", "2", "--methods", "ngram,inexact"], "--batch takes no method `inexact`"),
        (["--batch", "2", "--plots", "plots"], "belong to --controllers"),
        (["--batch", "2", "--baseline", "ngram"], "--baseline belongs to a report without --batch"),
        (["--batch", "2", "--report", "page", "--peers", "f"], "--peers belongs to a report without --batch"),
        (["--batch", "2", "--report", "/dev/null/page"], "cannot write to /dev/null/page"),
    ],
)
def test_bad_options(refused: Refused, bundle: Path, prompts: Path, arguments: list[str], word: str) -> None:
    assert word in refused("bench", "--engines", bundle, "--prompts", prompts, *arguments, status=2)
