"""A report's figures worked by hand, and a page that needs no other file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.bench.test_report_embedded import latency

from redraft.bench import report
from redraft.bench.compare import Run, Settings
from redraft.bench.prompts import Prompt
from redraft.bench.report_embedded import read_latency
from redraft.bench.report_page import write_page
from redraft.bench.report_plots import draw
from redraft.bench.report_runs import against, pairs, speeds, stages, tokens_a_step
from redraft.bench.report_trained import over_seeds, trained
from redraft.errors import UsageError
from redraft.runtime import Generation, SamplingParams
from redraft.runtime.metrics import Metrics

TOKENS = tuple(range(13))
LOOP = (1, 2) * 40


def generation(accepted: int, rate: float, tokens: tuple[int, ...] = TOKENS) -> Generation:
    """Twelve tokens after the first, in six steps."""
    stage_ms = {"draft": 1.0, "resample": 0.0, "verify": 1.0, "host": 0.0}
    metrics = Metrics(6, 6, 12, accepted, 1.0, 0.0, (), rate, 1.0, 0.1, stage_ms)
    return Generation("", tokens, "length", 3, metrics)


def run(number: int, first: Generation, second: Generation, tokens: tuple[int, ...] = TOKENS) -> Run:
    plain = generation(0, 100, tokens)
    return Run(Prompt(str(number), "a", ""), [1], {"none": plain, "first": first, "second": second})


def test_differences_are_of_the_same_prompts() -> None:
    """τ is 1 + 12 / 6 and 1 + 6 / 6; prompts differ much, the two methods always by one token a step."""
    runs = [run(n, generation(6 + n, 100 + n), generation(12 + n, 200 + 2 * n)) for n in range(8)]
    (pair,) = pairs(runs, ["first", "second"])
    assert (pair["method"], pair["than"]) == ("second", "first")
    assert pair["tau"] == pytest.approx(1)
    assert pair["tau_interval"] == pytest.approx((1, 1))
    assert (pair["speed"], pair["separate"]) == (pytest.approx(2), True)


@pytest.mark.parametrize("with_chains", [False, True])
def test_figures_by_depth_are_of_the_chains(monkeypatch: pytest.MonkeyPatch, with_chains: bool) -> None:
    """Speeds are of the measured engines, depths of the engines for chains; a drafter that these lack has none."""
    engines: Any = SimpleNamespace(methods=("none", "first", "second"))
    chains: Any = SimpleNamespace(methods=("none", "second"))
    used: dict[str, Any] = {}

    def compared(runtime: Any, *given: Any) -> list[Run]:
        return used.setdefault("speed", runtime) and [run(1, generation(6, 150), generation(6, 150))]

    def depths(runtime: Any, runs: Any, names: Any, *given: Any) -> dict[str, Any]:
        return used.setdefault("depth", runtime) and {name: {} for name in names}

    monkeypatch.setattr(report, "compare", compared)
    monkeypatch.setattr(report, "depths", depths)
    monkeypatch.setattr(report, "traced", lambda *given: {})
    monkeypatch.setattr(report, "costs", lambda *given: {})
    bundle: Any = SimpleNamespace(manifest=SimpleNamespace(drafters={}))
    found = report.measure(
        engines, bundle, [], ["none", "first", "second"], Settings(SamplingParams()), lambda settings: None,
        lambda text: None, chains if with_chains else None,
    )  # fmt: skip
    assert used == {"speed": engines, "depth": chains if with_chains else engines}
    assert list(found["depths"]) == (["second"] if with_chains else ["first", "second"])


def test_methods_that_win_by_turns_are_not_separate() -> None:
    high, low = generation(12, 200), generation(6, 100)
    runs = [run(n, *((high, low) if n % 2 else (low, high))) for n in range(8)]
    (pair,) = pairs(runs, ["first", "second"])
    assert pair["tau"] == pytest.approx(0)
    assert pair["separate"] is False


def test_speed_is_of_the_time_of_a_token() -> None:
    """Of twelve timed tokens and of twice as many, at one and a half times plain decoding's rate."""
    longer = generation(6, 150, (*TOKENS, *range(20, 32)))
    runs = [run(n, generation(6, 150), longer) for n in range(8)]
    assert speeds(runs, "first")["all"] == {"speed": pytest.approx(1.5), "interval": (1.5, 1.5), "prompts": 8}
    assert speeds(runs, "second")["a"]["speed"] == pytest.approx(1.5)
    assert pairs(runs, ["first", "second"])[0]["speed"] == pytest.approx(1)


def test_looping_outputs_take_no_part() -> None:
    looping = run(0, generation(60, 900, LOOP), generation(0, 1, LOOP), LOOP)
    runs = [looping, *(run(n, generation(6, 100), generation(6, 100)) for n in range(1, 7))]
    assert pairs(runs, ["first", "second"])[0]["tau"] == pytest.approx(0)
    assert tokens_a_step(runs, "first")["all"] == {"tau": 2.0, "interval": (2.0, 2.0), "prompts": 6}


def test_intervals_over_seeds_are_students() -> None:
    """The mean of 1, 2 and 3 has a standard error of 0.577, and t is 4.303 at two degrees of freedom."""
    found = over_seeds([1.0, 2.0, 3.0])
    assert found["interval"] == pytest.approx((2 - 4.3027 * 0.57735, 2 + 4.3027 * 0.57735), abs=1e-3)
    assert over_seeds([1.0])["interval"] is None


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    """Two runs, one of them with two seeds; a table names a third, which has not run."""
    folder = tmp_path / "comparison"
    folder.mkdir()

    def result(name: str, seed: int, tau: float) -> dict[str, Any]:
        return {"name": name, "seed": seed, "method": "m", "parameters": 7, "tokens": 8, "seconds": 9.0,
                "acceptance": {"a": [0.5, 0.25], "b": [0.7, 0.35]}, "wide": {"a": [0.9]},
                "chain_tokens": {"a": tau, "b": tau + 1}}  # fmt: skip

    table = {"runs": ["one", "two", "three"], "curve": True, "progress": True}
    about = {"verifier": "model", "schedule": "s", "tables": {"A table": table}}
    (folder / "compare.json").write_text(json.dumps(about))
    results = [result("one", 0, 2.0), result("one", 1, 2.2), result("two", 0, 2.5)]
    (folder / "results.json").write_text(json.dumps(results))
    return folder


def test_a_comparisons_table_has_its_finished_runs(comparison: Path) -> None:
    (found,) = trained([comparison])
    assert (found["verifier"], found["schedule"]) == ("model", "s")
    first, second = found["tables"][0]["rows"]
    assert (first["run"], first["tau"]["all"]["mean"], first["tau"]["all"]["seeds"]) == ("one", pytest.approx(2.6), 2)
    assert (second["run"], second["difference"]["mean"]) == ("two", pytest.approx(0.5))  # of the seed that both have


def test_no_kind_of_a_comparison_has_the_name_of_all_kinds(comparison: Path) -> None:
    results = json.loads((comparison / "results.json").read_text())
    results[0]["chain_tokens"]["all"] = 2.0
    (comparison / "results.json").write_text(json.dumps(results))
    with pytest.raises(UsageError, match=r"has no comparison \(the kind 'all' stands for all kinds together\)"):
        trained([comparison])


def test_runs_of_different_depths_keep_their_columns(comparison: Path, tmp_path: Path) -> None:
    results = json.loads((comparison / "results.json").read_text())
    for one in results[:2]:
        one["acceptance"] = {"a": [0.375]}
    results[2]["wide"] = {"a": [0.9375, 0.8125]}
    (comparison / "results.json").write_text(json.dumps(results))
    found = figures(comparison)
    text = write_page(found, draw(found, "a title", tmp_path), tmp_path).read_text(encoding="utf-8")
    (table,) = re.findall(r"<table><tr><th>run<th>acceptance 1.*?</table>", text, re.DOTALL)
    header, *rows = [re.split("<t[hd]>", row)[1:] for row in table.split("<tr>")[1:]]
    assert [cell.strip() for cell in header] == ["run", "acceptance 1", "acceptance 2", "among four 1", "among four 2"]
    figures_of = {row[0].strip(): [cell.strip()[:5] for cell in row[1:]] for row in rows}
    assert figures_of["one"][:2] == ["0.375", ""]
    assert figures_of["two"][2:] == ["0.938", "0.812"]


def test_a_table_without_its_first_run_compares_with_no_other(comparison: Path) -> None:
    """A run keeps its place, so that a curve over passes has it at its number."""
    about = json.loads((comparison / "compare.json").read_text())
    about["tables"]["A table"]["runs"] = ["three", "one", "two"]
    (comparison / "compare.json").write_text(json.dumps(about))
    rows = trained([comparison])[0]["tables"][0]["rows"]
    assert [(row["run"], row["place"], row["difference"]) for row in rows] == [("one", 2, None), ("two", 3, None)]


def test_shares_by_depth_are_means_over_kinds_then_seeds(comparison: Path) -> None:
    run = trained([comparison])[0]["runs"]["one"]
    assert [share["mean"] for share in run["depths"]] == pytest.approx([0.6, 0.3])
    assert [share["seeds"] for share in run["wide"]] == [2]


@pytest.mark.parametrize("damage", ["[]", "{}"])
def test_a_comparison_without_its_facts(comparison: Path, damage: str) -> None:
    (comparison / "compare.json").write_text(damage)
    with pytest.raises(UsageError, match="has no comparison"):
        trained([comparison])


@pytest.mark.parametrize("damage", ["", "[]", '[{"name": "one"}]'])
def test_a_folder_without_results(comparison: Path, damage: str) -> None:
    (comparison / "results.json").write_text(damage)
    with pytest.raises(UsageError, match="has no comparison"):
        trained([comparison])


def test_speed_and_tokens_over_a_baseline() -> None:
    """τ is 1 + 6 / 6 and 1 + 12 / 6; the second is twice as fast as the first at every prompt."""
    runs = [run(n, generation(6, 100 + n), generation(12, 200 + 2 * n)) for n in range(8)]
    found = against(runs, ["first", "second"], "first")
    assert found["first"]["all"]["speed"] == 1
    assert found["second"]["a"] == {
        "tau": 3.0, "interval": (3.0, 3.0), "speed": pytest.approx(2), "speed_interval": pytest.approx((2, 2)),
    }  # fmt: skip


def test_a_baseline_is_one_of_the_methods() -> None:
    engines: Any = SimpleNamespace(methods=("none", "first"))
    with pytest.raises(UsageError, match="'other' is not among the methods"):
        report.measure(
            engines, engines, [], ["none", "first"], Settings(SamplingParams()), lambda settings: None,
            lambda text: None, baseline="other",
        )  # fmt: skip


def test_stages_are_means_over_steps() -> None:
    """A millisecond of drafting and one of verification in six steps."""
    found = stages([run(n, generation(6, 100), generation(6, 100)) for n in range(3)], ["first"])
    assert list(found) == ["none", "first"]
    assert found["first"] == pytest.approx({"draft": 1 / 6, "resample": 0, "verify": 1 / 6, "host": 0})


def test_welch_tests_of_a_table_are_scipys(comparison: Path) -> None:
    """Of 2.0, 2.2 and 2.9, 3.0: t is 0.85 over √(0.02 / 2 + 0.005 / 2). A single seed has no test."""
    results = json.loads((comparison / "results.json").read_text())
    for seed, tokens in enumerate((2.9, 3.0)):
        results.append({**results[0], "name": "three", "seed": seed, "chain_tokens": {"a": tokens, "b": tokens}})
    (comparison / "results.json").write_text(json.dumps(results))
    one, two, three = trained([comparison])[0]["tables"][0]["rows"]
    assert (one["welch"], two["welch"]) == ({}, {})
    assert three["welch"]["a"]["t"] == pytest.approx(0.85 / 0.0125**0.5)
    assert 0 < three["welch"]["a"]["p"] < 0.05


def test_progress_is_over_kinds_then_seeds_of_the_steps_that_all_have(comparison: Path) -> None:
    results = json.loads((comparison / "results.json").read_text())
    for number, result in enumerate(results[:2]):
        result["progress"] = [
            {"step": step, "chain_tokens": {"a": 1.0 + step, "b": 3.0 + number}, "accuracy": {"a": 0.5, "b": 0.75}}
            for step in ((1, 2), (2, 3))[number]
        ]
    (comparison / "results.json").write_text(json.dumps(results))
    found = trained([comparison])[0]
    assert found["runs"]["one"]["progress"] == [{"step": 2, "chain_tokens": 3.25, "accuracy": 0.625, "loss": None}]
    assert found["runs"]["two"]["progress"] == []  # results of an older version have none


def test_losses_are_means_over_seeds_if_all_have_them(comparison: Path) -> None:
    results = json.loads((comparison / "results.json").read_text())
    for result, losses in zip(results, ({1: 3.0, 2: 2.0}, {1: 2.0}, {1: 4.0}), strict=True):
        line = {"chain_tokens": {"a": 2.0}, "accuracy": {"a": 0.5}}
        result["progress"] = [
            {"step": step, **line, **({"loss": losses[step]} if step in losses else {})} for step in (1, 2)
        ]
    (comparison / "results.json").write_text(json.dumps(results))
    runs = trained([comparison])[0]["runs"]
    assert [each["loss"] for each in runs["one"]["progress"]] == [2.5, None]
    assert [each["loss"] for each in runs["two"]["progress"]] == [4.0, None]


def figures(comparison: Path) -> dict[str, Any]:
    own = {"kinds": {"a": {}}, "differing_outputs": 0, "outputs": 8, "lossless": True}
    tau = {"tau": 2.25, "interval": (2.0, 2.5), "prompts": 8}
    runs = [run(n, generation(6, 100), generation(12, 200)) for n in range(8)]
    temperature = {
        "methods": {"first": own, "second": own},
        "speeds": {name: speeds(runs, name) for name in ("first", "second")},
        "tokens_a_step": {name: {"a": tau, "all": tau} for name in ("first", "second")},
        "pairs": pairs(runs, ["first", "second"]),
        "against": against(runs, ["first", "second"], "first"), "stages": stages(runs, ["first", "second"]),
    }  # fmt: skip
    depths = {"conditional": [0.75, 0.5], "misaligned": [0.25, 0.625], "drafts": [4, 4, 0, 0, 0]}
    sizes = {"bytes": 2_500_000, "hidden_states": ["last"], "nodes": 12, "depth": 4, "products": {"draft": 7_100_000},
             "training": {"steps": 7, "tokens": None, "seconds": 9.0}}  # fmt: skip
    model = {"name": "<odd & name>", "precision": "fp32", "caveats": ["a caveat"]}
    libraries = {"redraft": "1", "onnxruntime": "2"}
    return {
        "environment": {"model": model, "cpu": "a CPU", "threads": 2, "device": "host", "libraries": libraries},
        "prompts": 8, "chat": True, "max_new_tokens": 16, "command": "redraft bench", "controller": "adaptive",
        "budget": None, "methods": ["first", "second"], "temperatures": {"0": temperature, "1": temperature},
        "depths": {"first": depths, "second": depths}, "baseline": "first",
        "positions": {"first": [{"position": 8, "accepted": 1.5, "blocks": 4}], "second": []},
        "estimates": {"first": {"predicted": 1.75, "measured": 2.0, "steps": 1}, "second": None},
        "costs": {"kv_len": 256, "verify_ms": {"1": 2.0, "4": 3.0}, "draft_ms": {"first": 0.5, "second": 0.25}},
        "sizes": {"first": sizes},
        "trained": trained([comparison]), "controllers": None, "peers": None, "latency": None,
    }  # fmt: skip


def test_the_page_needs_no_other_file(tmp_path: Path, comparison: Path) -> None:
    found = figures(comparison)
    pictures = draw(found, "a title", tmp_path)
    text = write_page(found, pictures, tmp_path).read_text(encoding="utf-8")
    assert not re.search(r'(?:src|href)="(?!#)|url\((?!#)|<script|@import', text.replace("xlink:", ""))
    assert text.count("<svg") == len(pictures) == 8  # with the curve of the comparison's table
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    for shown in (
        "&lt;odd &amp; name&gt;",
        "1.50",
        "2.00 to 2.50",
        "2.5 MB",
        "a caveat",
        "A table",
        "2.100",
        "draft 7.1",
        "0.88",
    ):
        assert shown in text
    assert all(path.stat().st_size > 1000 for some in pictures.values() for path in some)


def test_the_page_says_the_largest_trees(tmp_path: Path, comparison: Path) -> None:
    found = {**figures(comparison), "controller": "fixed", "budget": {"nodes": 9, "depth": 3, "width": 2}}
    text = write_page(found, draw(found, "a title", tmp_path), tmp_path).read_text(encoding="utf-8")
    assert "fixed, at most 9 drafted nodes, 3 deep and 2 wide." in text.replace("\n", " ")


def test_the_page_has_tests_over_seeds_and_a_picture_of_progress(tmp_path: Path, comparison: Path) -> None:
    """The page takes a picture by the place of its table, of those with rows."""
    results = json.loads((comparison / "results.json").read_text())
    for seed, tokens in enumerate((9.0, 9.1)):
        results.append({**results[0], "name": "three", "seed": seed, "chain_tokens": {"a": tokens, "b": tokens}})
    progress = [{"step": n, "chain_tokens": {"a": 1.5 + n}, "accuracy": {"a": 0.5}} for n in (10, 20)]
    (comparison / "results.json").write_text(json.dumps([{**one, "progress": progress} for one in results]))
    about = json.loads((comparison / "compare.json").read_text())
    about["tables"] = {"Empty": {"runs": ["gone"], "progress": True}, **about["tables"]}
    (comparison / "compare.json").write_text(json.dumps(about))
    found = figures(comparison)
    pictures = draw(found, "a title", tmp_path)
    text = write_page(found, pictures, tmp_path).read_text(encoding="utf-8")
    assert "progress-0" in pictures
    assert text.count("<svg") == len(pictures) == 9
    (p,) = [row["welch"]["a"]["p"] for row in found["trained"][0]["tables"][1]["rows"] if row["welch"]]
    assert p < 0.05
    assert f"<b>{p:.3f}</b>" in text
    assert "Welch" in text


def test_the_page_has_frequencies_and_the_parts_of_a_draft(tmp_path: Path, comparison: Path) -> None:
    results = json.loads((comparison / "results.json").read_text())
    results[0]["frequencies"] = [(0.25, 0.9434), (1.0, 1.0)]
    (comparison / "results.json").write_text(json.dumps(results))
    (tmp_path / "latency.json").write_text(json.dumps(latency()))
    found = {**figures(comparison), "latency": read_latency(tmp_path / "latency.json")}
    pictures = draw(found, "a title", tmp_path)
    text = write_page(found, pictures, tmp_path).read_text(encoding="utf-8")
    assert {"frequencies", "logits"} <= set(pictures)
    assert text.count("<svg") == len(pictures) == 10
    assert "94.3 % are among the most frequent\n25.0 % of the vocabulary" in text
    assert "<td>eagle like chain<td>3.0000<td>0.300" in text
