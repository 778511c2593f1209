"""Helpers of tests of the command line: other chat templates, and commands that must work or fail."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.little import Redraft, write_tokenizer

from redraft import names
from redraft.engines.manifest import signed

__all__ = ["write_tokenizer"]  # tests.runtime imports it from here
Run = Callable[..., dict[str, Any]]
Refused = Callable[..., str]


@pytest.fixture
def with_template(bundle: Path, tmp_path: Path) -> Callable[[str | None], Path]:
    """Copy the bundle with another chat template, or with none."""

    return lambda template: copy_with_template(bundle, tmp_path / "templated", template)


def copy_with_template(bundle: Path, target: Path, template: str | None) -> Path:
    """Copy a bundle with another chat template, or with none."""
    return replace_file(shutil.copytree(bundle, target), names.CHAT_TEMPLATE_FILE, template)


def replace_file(bundle: Path, name: str, content: str | None) -> Path:
    """Replace a bundle's file, or remove it without content. Returns the bundle."""
    file, files = bundle / name, {}
    if content is None:
        file.unlink()
    else:
        file.write_text(content, encoding="utf-8")
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        files[name] = {"size": file.stat().st_size, "sha256": digest}

    def change(manifest: dict[str, Any]) -> None:
        del manifest["files"][name]
        manifest["files"] |= files

    return edit_manifest(bundle, change)


def edit_manifest(bundle: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Change a bundle's manifest and sign it again. Returns the bundle."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    change(manifest)
    (bundle / "manifest.json").write_text(json.dumps(signed(manifest)))
    return bundle


@pytest.fixture
def refused(redraft: Redraft, capfd: pytest.CaptureFixture[str]) -> Refused:
    """Run a command that must fail like a user's mistake: one line, no output. Returns the line."""

    def command(*words: object, status: int, text: str = "") -> str:
        capfd.readouterr()
        done = redraft(*words, input=text)
        assert done.returncode == status, done.stderr
        shown = done.stderr + capfd.readouterr().err  # C++ writes past `sys.stderr`
        lines = [line for line in shown.splitlines() if not line.startswith("[")]
        assert len(lines) == 1, shown
        assert lines[0].startswith("redraft: error: ")
        assert done.stdout == ""
        return lines[0]

    return command


@pytest.fixture(scope="session")
def run(redraft: Redraft) -> Run:
    """Run a command with --json in this process. Returns its object."""

    def command(*words: object) -> dict[str, Any]:
        done = redraft(*words, "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return command
