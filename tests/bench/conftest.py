"""Fixtures of the tests of the GPU measurement of engines: a bundle, a prompt, a stand-in for a GPU, and the
command.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from redraft.bench import gpu as gpu_bench
from redraft.bench import gpu_speed
from redraft.engines.gpu import Gpu

OPTIONS = ("--max-new-tokens", "12", "--budget", "nodes=6,depth=2,width=3")


@pytest.fixture
def bundle(lyanna_bundle: Path) -> Path:
    return lyanna_bundle


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"id": "p1", "category": "letters", "turns": ["abcd"]}) + "\n")
    return path


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a GPU, with 8 GiB of free memory."""
    monkeypatch.setattr(gpu_bench, "find_gpu", lambda: Gpu("Small GPU", (9, 0), 8 << 30, 9 << 30))


@pytest.fixture
def measure(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """The command on one short prompt, given its other options."""

    monkeypatch.setattr(gpu_speed, "CURVE_SECONDS", 0.1)

    def run(*options: str | Path) -> dict[str, Any]:
        given = ("--prompts", prompts, *options, *OPTIONS)
        monkeypatch.setattr(sys, "argv", ["gpu", *map(str, given)])
        return gpu_bench.main()

    return run
