"""Reading prompts: order, limits, forms. Refusals are tested through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from redraft.bench.prompts import load_prompts
from redraft.errors import DataError, UsageError


def write(path: Path, *rows: dict[str, object]) -> Path:
    """A file of JSON lines."""
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_kinds_take_turns_and_limit_counts_by_kind(tmp_path: Path) -> None:
    code = write(tmp_path / "c.jsonl", *({"id": f"c{i}", "category": "code", "turns": [f"x{i}"]} for i in range(4)))
    prose = write(tmp_path / "p.jsonl", *({"id": f"p{i}", "category": "prose", "turns": ["y"]} for i in range(2)))
    assert [p.id for p in load_prompts([code, prose])] == ["c0", "p0", "c1", "p1", "c2", "c3"]
    assert [p.id for p in load_prompts([code, prose], limit=1)] == ["c0", "p0"]


def test_a_limit_leaves_prompts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a limit of 0 leaves no prompt"):
        load_prompts([write(tmp_path / "c.jsonl", {"turns": ["x"]})], 0)


@pytest.mark.parametrize(("name", "row"), [("all", {}), ("c", {"category": "all"})])
def test_no_kind_has_the_name_of_all_kinds(tmp_path: Path, name: str, row: dict[str, object]) -> None:
    file = write(tmp_path / f"{name}.jsonl", {"turns": ["x"], **row})
    with pytest.raises(DataError, match=r"l, line 1: the kind 'all' stands for all kinds together; rename"):
        load_prompts([file])


def test_first_turn_is_the_text_and_the_file_names_the_kind(tmp_path: Path) -> None:
    file = write(tmp_path / "essay.jsonl", {"turns": ["one\u2028still one", "two"]})
    (prompt,) = load_prompts([file])
    assert (prompt.kind, prompt.text) == ("essay", "one\u2028still one")
    assert prompt.turns == ("one\u2028still one", "two")
