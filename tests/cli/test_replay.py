"""`redraft replay`: its counts for a trace, and the traces that it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.conftest import Refused, Run
from tests.little import Redraft

BEGUN = {"request": 0, "prompt": [5, 6, 7], "table_ms": [0, 1, 1.4, 1.9, 2.2]}
STEP = {"request": 0, "position": 2, "source": "fresh", "tokens": [7, 8, 9, 4], "parents": [-1, 0, 0, 1],
        "log_probs": [0, -1, -2, -3], "said": [8, 3, 1, 2], "path": [1], "committed": [8, 3]}  # fmt: skip
CHOICE = {"rate": 1.0, "gains": {"lookup": 0.1, "resample": 0.2, "fresh": 0.4}, "tried": False,
          "log_probs": [0, -0.1, -0.2, -0.3], "looked_up": [1, 3]}  # fmt: skip
PLAIN = {"request": 0, "position": 4, "source": "none", "tokens": [3], "parents": [-1], "log_probs": [0], "said": [6],
         "path": [], "committed": [6]}  # fmt: skip


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_counts_by_source_and_tokens_by_request(run: Run, redraft: Redraft, tmp_path: Path) -> None:
    trace = write(tmp_path / "trace", BEGUN, STEP, {**BEGUN, "request": 1}, PLAIN)
    assert run("replay", trace) == {
        "sources": {
            "fresh": {"steps": 1, "nodes": 3, "accepted": 1, "conditional_acceptance": [1.0, 0.0], "calibration": None},
            "none": {"steps": 1, "nodes": 0, "accepted": 0, "conditional_acceptance": [], "calibration": None},
        },
        "tokens_per_step": None,
        "requests": {"0": 6, "1": 3},
    }
    assert redraft("replay", trace).stdout.splitlines() == [
        "fresh      1 steps, 3 nodes, 1 accepted; accepted at each depth, given all depths before: 100 %, 0 %",
        "none       1 steps, 0 nodes, 0 accepted",
        "request 0: 6 tokens, prompt included",
        "request 1: 3 tokens, prompt included",
    ]


def test_nodes_that_the_lookup_had_are_its_own(run: Run, tmp_path: Path) -> None:
    trace = write(tmp_path / "trace", BEGUN, {**STEP, "choice": CHOICE})
    sources = run("replay", trace)["sources"]
    for source, counts in (("fresh", (1, 1, 0, [1.0, 0.0])), ("lookup", (0, 2, 1, []))):
        found = sources[source]
        assert (found["steps"], found["nodes"], found["accepted"], found["conditional_acceptance"]) == counts


def test_estimates_are_compared_with_what_was_accepted(run: Run, redraft: Redraft, tmp_path: Path) -> None:
    """The lookup's nodes promised e^-1 + e^-3, of which one was accepted, the drafter's e^-2. The second step's choice
    cut a tree on a device by its shares: 0.75 for its one node, which was accepted. The last step chose nothing.
    """
    by_rank = {"request": 0, "position": 4, "source": "fresh", "tokens": [3, 6], "parents": [-1, 0],
               "log_probs": [0, -5], "said": [6, 8], "path": [1], "committed": [6, 8],
               "choice": {**CHOICE, "shares": [0.75, 0.5], "looked_up": []}}  # fmt: skip
    last = {**PLAIN, "position": 6, "tokens": [8]}
    trace = write(tmp_path / "trace", BEGUN, {**STEP, "choice": CHOICE}, by_rank, last)
    summary = run("replay", trace)
    lookup, fresh = (summary["sources"][name]["calibration"] for name in ("lookup", "fresh"))
    assert lookup == {
        "expected": pytest.approx(0.41767, abs=1e-5),
        "brought": 1,
        "error": pytest.approx(-0.58233, abs=1e-5),
    }
    assert fresh == {
        "expected": pytest.approx(0.88534, abs=1e-5),
        "brought": 1,
        "error": pytest.approx(-0.11466, abs=1e-5),
    }
    assert summary["sources"]["none"]["calibration"] is None
    assert summary["tokens_per_step"] == {
        "expected": pytest.approx(1.6515, abs=1e-4), "brought": 2.0, "error": pytest.approx(-0.17425, abs=1e-4),
    }  # fmt: skip
    lines = redraft("replay", trace).stdout.splitlines()
    assert lines[1].endswith("; expected 0.4, brought 1.0 (-58.2%)")
    assert lines[3] == "tokens a step: expected 1.652, brought 2.000 (-17.4%)"


def chosen(**changes: object) -> dict[str, object]:
    return {**STEP, "choice": {**CHOICE, **changes}}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([BEGUN, BEGUN], "line 2 of the trace: ValueError: request 0 begins a second time"),
        (
            [BEGUN, chosen(gains={"lookup": 0.5, "fresh": 0.4})],
            "the largest gain is that of lookup, the trace has a tree from fr",
        ),
        (
            [BEGUN, {**chosen(tried=True), "source": "lookup"}],
            "gain is that of fresh, the trace has a tree from lookup",
        ),
        ([BEGUN, chosen(rate=2.5)], "0 nodes were worth verifying, the trace has 3"),
        ([BEGUN, chosen(log_probs=[0, -0.1, -0.2, -9])], "2 nodes were worth verifying, the trace has 3"),
        ([BEGUN, STEP, {**PLAIN, "position": 5}], "line 3 of the trace: ValueError: the tree begins at 5"),
    ],
)
def test_a_trace_that_does_not_hold(refused: Refused, tmp_path: Path, lines: list[object], message: str) -> None:
    line = refused("replay", write(tmp_path / "trace", *lines), "--json", status=1)
    assert f"{tmp_path / 'trace'}: line " in line
    assert message in line


def test_a_trace_without_a_step(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("")
    assert "found no step" in refused("replay", tmp_path / "trace", status=1)


def test_a_file_that_is_no_text(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "trace").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in refused("replay", tmp_path / "trace", status=1)


def test_a_missing_file(refused: Refused, tmp_path: Path) -> None:
    assert f"cannot read {tmp_path / 'absent'}" in refused("replay", tmp_path / "absent", status=2)
    assert f"cannot read {tmp_path}" in refused("replay", tmp_path, status=2)
    assert "FILE" in refused("replay", status=2)
