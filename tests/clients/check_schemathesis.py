"""Schemathesis against the server's OpenAPI document: all checks, with right and wrong data, the same each time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = 12
"""Of each endpoint, besides those that cover all fields and limits."""


def test_no_check_fails(url: str, tmp_path: Path) -> None:
    program, settings = Path(sys.executable).with_name("schemathesis"), Path(__file__).with_name("schemathesis.toml")
    key = os.environ["REDRAFT_KEY"]
    command = [
        program, "--config-file", settings, "run", f"{url}/openapi.json", "--checks", "all", "--mode", "all",
        "--max-examples", str(EXAMPLES), "--generation-deterministic", "--continue-on-failure", "--no-color",
        "--warnings", "off", "--request-timeout", "120", "--header", f"Authorization: Bearer {key}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=3600)
    print(done.stdout[-6000:])
    assert done.returncode == 0, done.stderr[-2000:]
    assert "No issues found" in done.stdout or " passed" in done.stdout
