"""`redraft bench`: the JSON it prints, and prompt files it refuses by line."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from tests.cli.conftest import Refused, Run
from tests.little import Redraft

from redraft.bench import compare
from redraft.bench.prompts import BenchPrompt
from redraft.bench.summary import margin_finder
from redraft.cli.bench import warnings
from redraft.cli.bench_report import check_same_model
from redraft.engines.manifest import load_manifest
from redraft.errors import UsageError
from redraft.runtime import Generation, Runtime, SamplingParams
from redraft.runtime.observe.metrics import Metrics

FIGURES = {"tokens_per_second", "speedup", "mean_acceptance_length", "identical_to_plain", "prompts", "tokens",
           "overhead_fraction"}  # fmt: skip


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Three prompts of two kinds."""
    rows = [("1", "code", "abc abc"), ("2", "code", "def def"), ("3", "prose", "the cat")]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"id": i, "category": k, "turns": [t]}) + "\n" for i, k, t in rows))
    return file


SHORT = ("--max-new-tokens", "8", "--ignore-eos")


def test_json_gives_environment_and_figures_by_method(redraft: Redraft, bundle: Path, prompts: Path) -> None:
    result = redraft("bench", "--engines", bundle, "--prompts", prompts, *SHORT, "--threads", "1", "--json")
    measured = json.loads(result.stdout)
    assert result.stderr == ""
    assert measured["environment"]["threads"] == 1
    assert measured["environment"]["libraries"]["onnxruntime"]
    assert measured["environment"]["model"]["weights_sha256"]
    assert set(measured["methods"]) == {"none", "inexact", "ngram"}
    assert set(measured["methods"]["ngram"]) >= FIGURES
    assert measured["methods"]["none"]["speedup"] == 1
    assert measured["methods"]["ngram"]["identical_to_plain"] is True
    assert {kind: part["prompts"] for kind, part in measured["methods"]["ngram"]["kinds"].items()} == {
        "code": 2, "prose": 1,
    }  # fmt: skip


def test_sampled_texts_are_compared_too(run: Run, bundle: Path, prompts: Path) -> None:
    """With drafts of one token, no step brings more than two."""
    options = ("--temperature", "0.8", "--top-k", "9", "--seed", "4", "--sampling", "model", "--methods", "ngram",
               "--controller", "fixed,gamma=1")  # fmt: skip
    measured = run("bench", "--engines", bundle, "--prompts", prompts, *SHORT, *options)
    assert measured["methods"]["ngram"]["identical_to_plain"] is True
    assert measured["methods"]["ngram"]["mean_acceptance_length"] <= 2
    assert {name: measured["sampling"][name] for name in ("temperature", "top_k", "top_p", "seed")} == {
        "temperature": 0.8, "top_k": 9, "top_p": 1.0, "seed": 4,
    }  # fmt: skip


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Two conversations of two and of three turns."""
    rows = [("1", "code", ["abc", "def"]), ("2", "prose", ["the", "cat", "sat"])]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"id": i, "category": k, "turns": t}) + "\n" for i, k, t in rows))
    return file


def test_a_chat_is_measured_turn_by_turn(run: Run, redraft: Redraft, bundle: Path, chats: Path) -> None:
    arguments = ("bench", "--engines", bundle, "--prompts", chats, *SHORT, "--chat", "--system", "a")
    measured = run(*arguments)
    assert (measured["chat"], measured["system"]) == (True, "a")
    for figures in measured["methods"].values():
        assert (figures["outputs"], figures["prompts"], figures["tokens"]) == (5, 5, 40)
        assert {kind: part["outputs"] for kind, part in figures["kinds"].items()} == {"code": 2, "prose": 3}
        assert figures["identical_to_plain"] is True
        assert figures["looping_outputs"] == 0
        assert set(figures["not_looping"]) >= FIGURES
        assert figures["not_looping"]["outputs"] == 5
    shown = redraft(*arguments, "--limit", "1").stdout
    assert "all, not looping" in shown
    assert "plain outputs that loop (the last 64 tokens repeat a period of at most 16): 0 of 5" in shown


def test_without_chat_only_first_turns_are_measured(run: Run, bundle: Path, chats: Path) -> None:
    measured = run("bench", "--engines", bundle, "--prompts", chats, *SHORT)
    assert (measured["chat"], measured["system"]) == (False, None)
    assert measured["methods"]["ngram"]["outputs"] == 2
    assert measured["turns_left_out"] == 3
    assert "turns left out, which need --chat: 3" in warnings(measured)


def test_a_difference_names_its_turn_and_its_gap_is_that_of_its_turn() -> None:
    seen: list[Sequence[int]] = []

    class Again:
        """Decodes any prompt with the same gaps."""

        def generate(self, prompts: list[Sequence[int]], *_: object, **__: object) -> list[Generation]:
            seen.extend(prompts)
            return [
                Generation("", (5, 6), "length", 2, Metrics(1, 0, 0, 0, 1.0, 0.0, (), 1.0, 1.0, 0.0, {}), (1.0, 2.0))
            ]

    run = compare.Run(BenchPrompt("p", "k", "first", ("second",)), [7, 8, 9], {}, turn=2)
    margin_of = margin_finder(cast("Runtime", Again()), SamplingParams())
    assert (margin_of(run, 1), margin_of(run, 2)) == (2.0, None)
    assert seen == [[7, 8, 9], [7, 8, 9]]
    difference = {"prompt": "p", "turn": 2, "token": 1, "logit_margin": 2.0, "near_tie": False}
    plain = {"looping_outputs": 1, "outputs": 2}
    result = {"environment": {"model": {"caveats": []}}, "synthetic_acceptance": None, "chat": True,
              "turns_left_out": 3, "methods": {
                  "none": plain, "inexact": {"differences": [difference]}, "ngram": {"differences": [difference]},
              }}  # fmt: skip
    assert list(warnings(result)) == [
        "turns left out, since their conversations outgrow the context: 3",
        "DIFFERENT: prompt p, turn 2, token 1, gap 2",
        "plain outputs that loop (the last 64 tokens repeat a period of at most 16): 1 of 2",
    ]


@pytest.mark.parametrize(
    ("template", "word"),
    [
        (None, "this model has no chat template; give a plain prompt, without --chat"),
        ("{{ raise_exception('users only') }}", "prompt 1: the chat template refuses these messages: users only"),
        ("{% if messages[1:] %}{{ raise_exception('one turn') }}{% endif %}a", "prompt 1, turn 2: the chat template"),
        ("{{ messages[0].content * 30 }}", "prompt 1: the conversation has 90 tokens and the context holds 64"),
    ],
)
def test_chats_that_cannot_be_measured(
    refused: Refused, with_template: Callable[[str | None], Path], chats: Path, template: str | None, word: str
) -> None:
    engines = with_template(template)
    assert word in refused("bench", "--engines", engines, "--prompts", chats, "--max-new-tokens", "8", "--chat",
                           status=2)  # fmt: skip


def test_turns_that_no_longer_fit_are_counted(
    run: Run, with_template: Callable[[str | None], Path], chats: Path
) -> None:
    engines = with_template("{{ messages[0].content * (messages | length) ** 3 }}")
    measured = run("bench", "--engines", engines, "--prompts", chats, "--max-new-tokens", "8", "--chat")
    assert measured["turns_left_out"] == 3
    assert measured["methods"]["none"]["outputs"] == 2


def test_inexact_decoding_is_refused_if_it_is_the_same(refused: Refused, bundle: Path, prompts: Path) -> None:
    arguments = ("bench", "--engines", bundle, "--prompts", prompts, "--methods", "inexact")
    for option in (("--inexact",), ("--device", "cpu")):
        assert "these engines have no other, inexact decoding" in refused(*arguments, *option, status=2)
    assert "--budget would do nothing" in refused(*arguments, "--budget", "nodes=1,depth=1,width=1", status=2)


def test_forced_acceptance_is_labelled_and_reached(run: Run, redraft: Redraft, bundle: Path, prompts: Path) -> None:
    arguments = ("bench", "--engines", bundle, "--prompts", prompts, "--limit", "1", "--max-new-tokens", "30",
                 "--synthetic-acceptance", "1,1", "--budget", "nodes=2,depth=2,width=1")  # fmt: skip
    measured = run(*arguments)
    figures = measured["methods"]["ngram"]
    assert measured["synthetic_acceptance"] == [1, 1]
    assert figures["synthetic_acceptance"] is True
    assert figures["identical_to_plain"] is None
    assert figures["mean_acceptance_length"] == 3
    shown = redraft(*arguments).stdout
    assert "ngram (synthetic)" in shown
    assert "acceptance was forced" in shown


def test_controllers_are_compared_from_each_first_length(
    run: Run, redraft: Redraft, bundle: Path, prompts: Path, tmp_path: Path
) -> None:
    """The small model's texts are short, but each is decoded by all seven ways."""
    given = ("bench", "--engines", bundle, "--prompts", prompts, "--max-new-tokens", "24", "--ignore-eos", "--methods",
             "ngram", "--controllers", "adaptive,gammatune,delta=1,heuristic", "--initial-lengths", "1,3")  # fmt: skip
    found = run(*given)
    assert (found["method"], found["outputs"], found["differing_outputs"]) == ("ngram", 3, 0)
    assert list(found["controllers"]) == ["fixed", "adaptive", "gammatune,delta=1", "heuristic"]
    assert list(found["controllers"]["heuristic"]["lengths"]) == ["1", "3"]
    assert [row["gamma"] for row in found["equations"]] == [1, 3]
    shown = redraft(*given, "--plots", tmp_path / "plots").stdout
    assert "Table 2" in shown
    assert "Equations 1 to 6" in shown
    assert (tmp_path / "plots/throughput.png").stat().st_size > 1000


def test_a_report_of_all_methods(run: Run, bundle: Path, prompts: Path, tmp_path: Path) -> None:
    common = ("bench", "--engines", bundle, "--prompts", prompts, "--max-new-tokens", "16", "--ignore-eos")
    compared = run(*common, "--controllers", "heuristic", "--initial-lengths", "1,3")
    (tmp_path / "controllers.json").write_text(json.dumps(compared))
    found = run(*common, "--report", tmp_path / "page", "--chains", bundle, "--baseline", "ngram",
                "--controllers-json", tmp_path / "controllers.json")  # fmt: skip
    assert found["methods"] == ["ngram", "suffix", "lookahead"]
    assert list(found["temperatures"]) == ["0", "1"]
    for temperature in found["temperatures"].values():
        for method in found["methods"]:
            assert temperature["methods"][method]["identical_to_plain"] is True
    assert str(tmp_path) not in found["command"]
    assert {Path(file).suffix for file in found["files"]} == {".html", ".json", ".png", ".svg"}
    assert all(Path(file).stat().st_size for file in found["files"])
    assert json.loads((tmp_path / "page/report.json").read_text())["depths"].keys() == set(found["methods"])
    assert found["baseline"] == "ngram"
    assert all(each["against"]["ngram"]["all"]["speed"] == 1 for each in found["temperatures"].values())
    assert sum(each["blocks"] for each in found["positions"]["ngram"]) > 0
    assert "Controllers of one drafter, ngram" in (tmp_path / "page/report.html").read_text("utf-8")


def test_chains_of_another_model_or_precision_are_refused(bundle: Path) -> None:
    manifest = load_manifest(bundle)
    check_same_model(manifest, replace(manifest, name="other", drafters={}))
    other = replace(manifest.model, weights={"model.safetensors": "0" * 64})
    for changed in (replace(manifest, precision="int4"), replace(manifest, model=other)):
        with pytest.raises(UsageError, match="--chains has engines of another model or precision"):
            check_same_model(manifest, changed)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ('{"turns": ["a"]}\n{"turns"', "line 2: not JSON"),
        ('{"turns": ["a"]}\n\n{"text": "b"}\n', "line 3: no text in `turns`"),
        ("[1]\n", "line 1: no text in `turns`"),
        ('{"turns": []}\n', "line 1: no text in `turns`"),
        ('{"turns": "abc"}\n', "line 1: no text in `turns`"),
        ('{"turns": ["a", ""]}\n', "line 1: no text in `turns`, turn 2"),
        ("\n", "no prompts in"),
    ],
)
def test_invalid_prompt_files(refused: Refused, bundle: Path, tmp_path: Path, content: str, word: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    assert word in refused("bench", "--engines", bundle, "--prompts", file, status=1)


def test_an_unknown_method_is_refused_before_any_runs(redraft: Redraft, bundle: Path, prompts: Path) -> None:
    done = redraft("bench", "--engines", bundle, "--prompts", prompts, "--methods", "ngram,magic")
    assert done.returncode == 2
    assert "this bundle has no drafter 'magic'" in done.stderr
    assert "warming up" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--methods", "none,"], "--methods"),
        (["--limit", "-1"], "--limit"),
        (["--prompts", "/no/such.jsonl"], "cannot read"),
        (["--system", "b"], "--system needs --chat"),
        (["--synthetic-acceptance", "1.5"], "--synthetic-acceptance"),
        (["--synthetic-acceptance", "high"], "--synthetic-acceptance"),
        (["--methods", "none", "--budget", "nodes=4,depth=2,width=2"], "--budget would do nothing"),
        (["--methods", "none", "--synthetic-acceptance", "1"], "--synthetic-acceptance would do nothing"),
        (["--controller", "gamatune"], "unknown controller 'gamatune'"),
        (["--controllers", "gamatune"], "unknown controller 'gamatune'"),
        (["--controllers", "gammatune,eta=2"], "eta must be from 0 to 1"),
        (["--controllers", "fixed", "--initial-lengths", "0"], "--initial-lengths '0'"),
        (["--controllers", "fixed", "--controller", "adaptive"], "--controllers takes neither --controller nor"),
        (["--controllers", "fixed", "--methods", "ngram,none"], "--controllers compares one drafting method"),
        (["--plots", "plots"], "belong to --controllers"),
        (["--trained", "runs"], "--trained belongs to --report"),
        (["--chains", "engines"], "--chains belongs to --report"),
        (["--baseline", "ngram"], "--baseline belongs to --report"),
        (["--latency-json", "file"], "--latency-json belongs to --report"),
        (["--controllers-json", "file"], "--controllers-json belongs to --report"),
        (["--peers", "file"], "--peers belongs to --report"),
        (["--report", "page", "--baseline", "other"], "--baseline 'other' is not among the methods"),
        (["--report", "page", "--peers", "nowhere.json"], "cannot read nowhere.json"),
        (["--report", "page", "--temperature", "1"], "--report measures temperatures 0 and 1"),
        (["--report", "page", "--methods", "ngram,inexact"], "a report has no inexact decoding"),
        (["--report", "page", "--methods", "none"], "a report needs a drafting method"),
        (["--report", "page", "--trained", "nowhere"], "nowhere has no comparison"),
        (["--report", "/dev/null/page"], "cannot write to /dev/null/page"),
    ],
)
def test_bad_options(refused: Refused, bundle: Path, prompts: Path, arguments: list[str], word: str) -> None:
    assert word in refused("bench", "--engines", bundle, "--prompts", prompts, *arguments, status=2)
