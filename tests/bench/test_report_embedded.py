"""Figures of other commands in a report: what is kept of them, their tables, and files of something else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.bench import test_controllers as controllers
from tests.bench import test_peers as peers

from redraft.bench.controllers import figures
from redraft.bench.report_embedded import read_controllers, read_latency, read_peers
from redraft.bench.report_latency import TOGETHER, tables
from redraft.bench.report_page import _peer_tables
from redraft.errors import UsageError


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
    ours = found["decoders"]["fp32"]["redraft"]
    ours["settings"] = {"bundle": "/home/me/bundle"}
    path.write_text(json.dumps({"environment": {}, "chat": True, "max_new_tokens": 9, **found}))
    kept = read_peers(path)
    assert "/home" not in json.dumps(kept)
    (_, speeds), (_, ratios) = _peer_tables(kept)
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
    logits, turns, *_, computed = tables(latency()).values()
    assert logits[1] == ["1", "one pass", "2.0000", "2.0000", "2.0000", "2.0000", "1.0000"]
    assert turns[2] == ["draft", "2.0000", "1.0000", "0.200", "0.111"]
    assert computed[1] == ["lyanna", "2.5000", "0.250"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"controllers": {"fixed": {}}}', '{"decoders": {"fp32": {}}}'])
@pytest.mark.parametrize("read", [read_controllers, read_peers, read_latency])
def test_files_of_something_else(read: Callable[[Path], dict[str, Any]], text: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"is no JSON|has no"):
        read(path)
    with pytest.raises(UsageError, match="cannot read"):
        read(tmp_path / "nowhere.json")
