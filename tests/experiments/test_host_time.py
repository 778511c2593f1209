"""The host's time of a step over idle stand-ins: the runtime's own steps, over a text that continues."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tests.standins.cuda import FakeCuda, Status

from experiments import host_time
from experiments.host_time import Script
from redraft.errors import UsageError


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"id": "p1", "category": "letters", "turns": ["abcd abcd abcd abcd"]}) + "\n")
    return path


def run(monkeypatch: pytest.MonkeyPatch, bundle: Path, prompts: Path, *options: str | Path) -> dict:
    arguments = ["--engines", bundle, "--prompts", prompts, "--max-new-tokens", "24", *options]
    monkeypatch.setattr(sys, "argv", ["host_time", *map(str, arguments)])
    return host_time.main()


def test_every_method_as_one_or_two_launches_a_step(
    lyanna_bundle: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "new" / "host.json"
    found = run(monkeypatch, lyanna_bundle, prompts, "--out", out, "--budget", "nodes=6,depth=2,width=3")
    assert json.loads(out.read_text()) == found
    alone, drafted = (
        ("none", "ngram fixed", "ngram adaptive"),
        ("lyanna fixed", "lyanna adaptive", "ngram+lyanna adaptive"),
    )
    assert [found[key]["launches"] for key in alone] == [1.0, 1.0, 1.0]
    assert all(1 < found[key]["launches"] <= 2 for key in drafted), "a step that ends the text needs no draft"
    for key in (*alone, *drafted):
        us = found[key]["us"]
        assert 0 < us["median"] <= us["ninth_tenth"]
        assert (found[key]["after_launch_us"] > 0) == ("lyanna" in key)
    assert found["none"]["steps"] > found["lyanna fixed"]["steps"], "drafted tokens are kept"


def test_the_time_of_cudas_calls_is_left_out(
    lyanna_bundle: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step waits 10 ms; the host's own time is a thousandth of it."""
    wait = FakeCuda.cudaStreamSynchronize

    def slow(self: FakeCuda, stream: int) -> tuple[Status]:
        time.sleep(0.01)
        return wait(self, stream)

    monkeypatch.setattr(FakeCuda, "cudaStreamSynchronize", slow)
    found = run(monkeypatch, lyanna_bundle, prompts, "--methods", "none")
    assert found["none"]["us"]["median"] < 10_000


def test_a_run_without_a_step_is_refused(lyanna_bundle: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no step was run"):
        run(monkeypatch, lyanna_bundle, prompts, "--methods", "none", "--max-new-tokens", "1")


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
def test_accepted_tokens_continue_the_text(width: int) -> None:
    script, text = Script(seed=width), [10, 11, 12, 13, 14]
    script.begin(text, at=3)
    tokens, kept = [], set()
    for _ in range(40):
        accepted = np.zeros(1 + 2 * width, np.int64)
        script.accept(accepted)
        path = accepted[1 : 1 + accepted[0]].tolist()
        assert path == list(range(len(path))), "the root, then nodes below each other"
        tokens += [accepted[1 + width + node] for node in path]
        kept.add(len(path))
    assert tokens == [text[(3 + place) % 5] for place in range(len(tokens))]
    assert kept == set(range(1, 1 + min(4, {1: 1, 2: 2, 4: 3}.get(width, 4))))
