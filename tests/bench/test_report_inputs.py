"""Figures of other commands in a report: training, controllers, peers and latency, and files of something else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.bench import test_controllers as controllers
from tests.bench import test_peers as peers

from redraft.bench.controllers import figures
from redraft.bench.report_inputs import (
    TOGETHER,
    latency_tables,
    over_seeds,
    peer_tables,
    read_controllers,
    read_latency,
    read_peers,
    trained,
)
from redraft.errors import UsageError


def make_result(name: str, seed: int, tau: float, **changes: Any) -> dict[str, Any]:
    """A run's result as `redraft train all` writes it."""
    return {"name": name, "seed": seed, "method": "m", "parameters": 7, "tokens": 8, "seconds": 9.0,
            "acceptance": {"a": [0.5, 0.25], "b": [0.7, 0.35]}, "wide": {"a": [0.9]},
            "chain_tokens": {"a": tau, "b": tau + 1}, **changes}  # fmt: skip


RESULTS = [make_result("one", 0, 2.0), make_result("one", 1, 2.2), make_result("two", 0, 2.5)]
"""Two runs, one of them with two seeds; the table names a third, which has not run."""
RUNS = ("one", "two", "three")


def write_comparison(folder: Path, results: Any, runs: tuple[str, ...] = RUNS, **tables: Any) -> Path:
    """A folder of `redraft train all` with one table of these runs, after others."""
    folder.mkdir(exist_ok=True)
    table = {"runs": runs, "curve": True, "progress": True}
    about = {"verifier": "model", "schedule": "s", "tables": {**tables, "A table": table}}
    (folder / "compare.json").write_text(json.dumps(about))
    (folder / "results.json").write_text(json.dumps(results))
    return folder


def read(tmp_path: Path, results: Any, runs: tuple[str, ...] = RUNS) -> dict[str, Any]:
    """The comparison, read back."""
    return trained([write_comparison(tmp_path, results, runs)])[0]


def test_intervals_over_seeds_are_students() -> None:
    """The mean of 1, 2 and 3 has a standard error of 0.577, and t is 4.303 at two degrees of freedom."""
    found = over_seeds([1.0, 2.0, 3.0])
    assert found["interval"] == pytest.approx((2 - 4.3027 * 0.57735, 2 + 4.3027 * 0.57735), abs=1e-3)
    assert over_seeds([1.0])["interval"] is None


def test_a_comparisons_table_has_its_finished_runs_and_welch_tests(tmp_path: Path) -> None:
    """Of 2.0, 2.2 and 2.9, 3.0: t is 0.85 over √(0.02 / 2 + 0.005 / 2). A single seed has no test."""
    three = [make_result("three", seed, tau, chain_tokens={"a": tau, "b": tau}) for seed, tau in enumerate((2.9, 3.0))]
    found = read(tmp_path, [*RESULTS, *three], (*RUNS, "four"))
    assert (found["verifier"], found["schedule"]) == ("model", "s")
    first, second, last = found["tables"][0]["rows"]
    assert (first["run"], first["tau"]["all"]["mean"], first["tau"]["all"]["seeds"]) == ("one", pytest.approx(2.6), 2)
    assert (second["run"], second["difference"]["mean"]) == ("two", pytest.approx(0.5))  # of the seed that both have
    assert [share["mean"] for share in found["runs"]["one"]["depths"]] == pytest.approx([0.6, 0.3])
    assert [share["seeds"] for share in found["runs"]["one"]["wide"]] == [2]
    assert (first["welch"], second["welch"]) == ({}, {})
    assert last["welch"]["a"]["t"] == pytest.approx(0.85 / 0.0125**0.5)
    assert 0 < last["welch"]["a"]["p"] < 0.05


def test_a_table_without_its_first_run_compares_with_no_other(tmp_path: Path) -> None:
    """A run keeps its place, so that a curve over passes has it at its number."""
    rows = read(tmp_path, RESULTS, ("three", "one", "two"))["tables"][0]["rows"]
    assert [(row["run"], row["place"], row["difference"]) for row in rows] == [("one", 2, None), ("two", 3, None)]


def test_progress_is_over_kinds_then_seeds_of_the_steps_that_all_have(tmp_path: Path) -> None:
    """Losses are means over seeds if all have them. Results of an older version have no progress."""

    def lines(number: int, steps: tuple[int, ...], losses: dict[int, float]) -> list[dict[str, Any]]:
        return [
            {"step": step, "chain_tokens": {"a": 1.0 + step, "b": 3.0 + number}, "accuracy": {"a": 0.5, "b": 0.75},
             **({"loss": losses[step]} if step in losses else {})}
            for step in steps
        ]  # fmt: skip

    progress = lines(0, (1, 2, 4), {1: 9.0, 2: 3.0, 4: 1.0}), lines(1, (2, 3, 4), {2: 2.0})
    results = [{**result, "progress": each} for result, each in zip(RESULTS, progress, strict=False)]
    runs = read(tmp_path, [*results, RESULTS[2]])["runs"]
    assert runs["one"]["progress"] == [
        {"step": 2, "chain_tokens": 3.25, "accuracy": 0.625, "loss": 2.5},
        {"step": 4, "chain_tokens": 4.25, "accuracy": 0.625, "loss": None},
    ]
    assert runs["two"]["progress"] == []


def test_a_folder_without_a_comparison(tmp_path: Path) -> None:
    """No kind of a comparison has the name of all kinds."""
    named_all = json.dumps([make_result("one", 0, 2.0, chain_tokens={"all": 2.0})])
    for file, damage, reason in (
        ("compare.json", "[]", ""), ("compare.json", "{}", ""), ("results.json", "", ""),
        ("results.json", "[]", r" \(no run is finished\)"), ("results.json", '[{"name": "one"}]', ""),
        ("results.json", named_all, r" \(the kind 'all' stands for all kinds together\)"),
    ):  # fmt: skip
        (write_comparison(tmp_path, RESULTS) / file).write_text(damage)
        with pytest.raises(UsageError, match=f"has no comparison{reason}"):
            trained([tmp_path])


def test_controllers_are_kept_as_they_were_measured(tmp_path: Path) -> None:
    path = tmp_path / "controllers.json"
    found = figures([controllers.run()], controllers.WAYS)
    path.write_text(json.dumps({"method": "m", "environment": {}, "plots": ["/home/me/a.png"], **found}))
    kept = read_controllers(path)
    assert kept["controllers"]["heuristic"]["mean_rate"] == 1.4
    assert "plots" not in kept


def test_peers_are_kept_without_folders_of_their_machine(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    found = peers.measured()
    found["decoders"]["fp32"]["redraft"]["settings"] = {"bundle": "/home/me/bundle"}
    path.write_text(json.dumps({"environment": {}, "chat": True, "max_new_tokens": 9, **found}))
    kept = read_peers(path)
    assert "/home" not in json.dumps(kept)
    (_, speeds), (_, ratios) = peer_tables(kept)
    assert speeds[:3] == [["", "mode", "fp32", "8 bits"], ["redraft", "plain", "50.00", "not measured"],
                          ["redraft", "ngram", "100.0", "not measured"]]  # fmt: skip
    assert ratios[1] == ["peer", "plain", "2.17 (-) of ngram", "failed"]


def latency() -> dict[str, Any]:
    """Times of two steps, as `experiments.lyanna latency --json` prints them."""
    some = {"median": 2.0, "least": 1.0}
    stages = {stage: some for stage in ("head", "softmax", "top_k", TOGETHER)}
    return {
        "environment": {"cpu": "a CPU", "threads": 2}, "steps": 2,
        "logits_ms": {count: {"one_pass": stages, "iterative": stages} for count in ("1", "2")},
        "turns_ms": {"t(1)": {"median": 10.0, "least": 9.0}, "draft": some}, "parts_ms": {"layer": some, "draft": some},
        "profile_ms": {"layer": some, "call": some}, "computed_from_parts_ms": {"lyanna": 2.5, "eagle_like_chain": 3.0},
    }  # fmt: skip


def test_times_of_a_drafts_parts_are_of_the_command_and_its_tables(tmp_path: Path) -> None:
    path = tmp_path / "latency.json"
    path.write_text(json.dumps(latency()))
    assert read_latency(path) == latency()
    logits, turns, *_, computed = latency_tables(latency()).values()
    assert logits[1] == ["1", "one pass", "2.0000", "2.0000", "2.0000", "2.0000", "1.0000"]
    assert turns[2] == ["draft", "2.0000", "1.0000", "0.200", "0.111"]
    assert computed[1] == ["lyanna", "2.5000", "0.250"]


@pytest.mark.parametrize("reader", [read_controllers, read_peers, read_latency])
def test_files_of_something_else(reader: Callable[[Path], dict[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    for text in ("", "[]", "{}", '{"controllers": {"fixed": {}}}', '{"decoders": {"fp32": {}}}'):
        path.write_text(text)
        with pytest.raises(UsageError, match=r"is no JSON|has no"):
            reader(path)
    with pytest.raises(UsageError, match="cannot read"):
        reader(tmp_path / "nowhere.json")
