"""A real pretrained checkpoint writes what its authors' own program writes from the bare BOS token."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Redraft = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def stories(shared: Path) -> Path:
    """The checkpoint's folder; skips where it is absent."""
    folder = shared / "data" / "checkpoints" / "stories260k"
    if not folder.is_dir():
        pytest.skip(f"no stories260k checkpoint at {folder}")
    return folder


@pytest.fixture(scope="module")
def engines(stories: Path, redraft: Redraft, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("engines") / "stories260k"
    result = redraft("build", stories, "-o", out, "--eval-text", "none")
    assert result.returncode == 0, result.stderr
    return out


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_golden_text(redraft: Redraft, stories: Path, engines: Path, method: str) -> None:
    result = redraft(
        "generate", "--engines", engines, "--prompt", "", "--max-new-tokens", "200", "--method", method, "--json"
    )
    written = json.loads(result.stdout)
    assert written["usage"]["completion_tokens"] == 200
    assert written["text"].strip() == (stories / "golden_greedy.txt").read_text(encoding="utf-8").strip()
