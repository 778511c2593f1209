"""Errors of `experiments.exact_texts`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [([], 1, "expected an engine bundle at"), (["--limit", "-1"], 2, "a limit of -1 leaves no prompt")],
)
def test_errors_are_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    status: int,
    message: str,
) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"turns": ["a"]}\n')
    given = ["--engines", str(tmp_path / "absent"), "--prompts", str(prompts), *options]
    monkeypatch.setattr(sys, "argv", ["exact_texts", *given])
    with pytest.raises(SystemExit) as left:
        runpy.run_module("experiments.exact_texts", run_name="__main__")
    assert left.value.code == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"redraft: error: {message}")
