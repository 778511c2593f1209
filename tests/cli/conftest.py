"""Helpers of tests of the command line: bundles with another chat template, and commands that must fail."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.little import Redraft, write_tokenizer

from redraft import names
from redraft.engines.manifest import signed

__all__ = ["write_tokenizer"]  # tests.runtime imports it from here


@pytest.fixture
def with_template(bundle: Path, tmp_path: Path) -> Callable[[str | None], Path]:
    """Copy the bundle with another chat template, or with none."""

    return lambda template: copy_with_template(bundle, tmp_path / "templated", template)


def copy_with_template(bundle: Path, target: Path, template: str | None) -> Path:
    """Copy a bundle with another chat template, or with none."""
    folder = Path(shutil.copytree(bundle, target))
    manifest = json.loads((folder / "manifest.json").read_text())
    file = folder / names.CHAT_TEMPLATE_FILE
    if template is None:
        file.unlink()
        del manifest["files"][file.name]
    else:
        file.write_text(template)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        manifest["files"][file.name] = {"size": file.stat().st_size, "sha256": digest}
    (folder / "manifest.json").write_text(json.dumps(signed(manifest)))
    return folder


@pytest.fixture
def refused(redraft: Redraft) -> Callable[..., str]:
    """Run a command that must fail like a user's mistake: one line, no traceback. Returns the line."""

    def run(*arguments: object, status: int, **options: object) -> str:
        result = redraft(*arguments, **options)
        lines = [line for line in result.stderr.splitlines() if not line.startswith("[")]
        assert result.returncode == status, result.stderr
        assert len(lines) == 1, result.stderr
        assert lines[0].startswith("redraft: error: ")
        assert result.stdout == ""
        return lines[0]

    return run
