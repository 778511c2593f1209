"""The table of docs/benchmarks.md is what the committed reports give, and the command replaces nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from redraft.bench import readme
from redraft.bench.readme import BEGIN, END, placed, table
from redraft.errors import DataError, UsageError

REPORT, SECOND = "docs/reports/smollm2/report.json", "docs/reports/smollm2-int8/report.json"


TEXT_SPEED, ONE_BOUND = (
    json.dumps({"methods": ["one"], "temperatures": {"0": {"tokens_a_step": {}, "speeds": {"one": {"all": cell}}}}})
    for cell in ({"speed": "fast", "interval": None}, {"speed": 1.5, "interval": [1.0]})
)


def figures(speed: float, interval: list[float] | None) -> dict[str, Any]:
    cell = {"all": {"speed": speed, "interval": interval}}
    temperature = {"speeds": {"one": cell}, "tokens_a_step": {"one": {"all": {"tau": 1.754}}}}
    later: dict[str, Any] = {"speeds": {"one": {}}, "tokens_a_step": {"one": {}}}
    model = {"model": {"precision": "int8"}}
    return {"methods": ["one"], "temperatures": {"0": temperature, "1": later}, "environment": model}


def test_the_readme_has_the_table_of_the_reports(root: Path) -> None:
    reports = [json.loads((root / name).read_text("utf-8")) for name in (REPORT, SECOND) if (root / name).exists()]
    page = (root / "docs/benchmarks.md").read_text("utf-8")
    assert page == placed(page, table(*reports))


def test_a_table_worked_by_hand() -> None:
    """Also of a second report that lacks the method."""
    second = figures(0.9, None)
    found = table(figures(1.254, [1.1, 1.346]), second).splitlines()
    assert found[0] == "| method | speed, T = 0 | τ | speed, T = 1 | int8: speed, T = 0 |"
    assert found[2] == "| `one` | 1.25 (1.10 to 1.35) | 1.75 | - | 0.90 |"
    second["temperatures"]["0"]["speeds"] = {}
    assert table(figures(1.0, None), second).splitlines()[2].endswith("| - | - |")


def test_the_command_replaces_what_is_between_the_markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, page = tmp_path / "report.json", tmp_path / "page.md"
    report.write_text(json.dumps(figures(1.25, None)))
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    monkeypatch.setattr(sys, "argv", ["readme", str(report), "--write", str(page)])
    readme.main()
    assert page.read_text() == f"before\n{BEGIN}\n{table(figures(1.25, None))}\n{END}\nafter\n"
    page.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"page\.md is not UTF-8"):
        readme.main()


def test_a_page_without_markers_and_files_that_are_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for page in ("", BEGIN, f"{END}{BEGIN}"):
        with pytest.raises(UsageError, match="no place for the table"):
            placed(page, "")
    path = tmp_path / "report.json"
    monkeypatch.setattr(sys, "argv", ["readme", str(path)])
    for text in ("", "[]", "{}", '{"methods": ["one"]}', TEXT_SPEED, ONE_BOUND):
        path.write_text(text)
        with pytest.raises(UsageError, match=r"is no JSON|has no figures of a report"):
            readme.main()
