"""`--reload-drafter`: who may reload, what the answer tells, and requests that run meanwhile."""

from __future__ import annotations

import logging
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from redraft.errors import BundleError
from redraft.runtime import Runtime
from tests.runtime.rebuilt import retrain
from tests.runtime.server.serving import WAIT, client_of, error_of, events, listening

RELOAD = "/v1/drafters/reload"


def test_nobody_reloads_unless_the_server_allows_it(runtime: Runtime) -> None:
    assert client_of(runtime).post(RELOAD, json={}).status_code == 404
    client = client_of(runtime, reload_drafter=True, api_keys=("secret",))
    assert error_of(client.post(RELOAD, json={}), 401)
    headers = {"Authorization": "Bearer secret"}
    # A page of another origin can send this without asking first.
    assert error_of(client.post(RELOAD, content="{}", headers={**headers, "Content-Type": "text/plain"}), 415)
    assert error_of(client.post(RELOAD, json={"path": "/tmp"}, headers=headers), 400)["param"] == "path"
    assert "no bundle" in error_of(client.post(RELOAD, json={}, headers=headers), 409)["message"]


def test_the_answer_and_the_log_tell_what_changed(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client = client_of(runtime, reload_drafter=True)
    monkeypatch.setattr(runtime, "reload_drafters", lambda: ("lyanna",))
    with caplog.at_level(logging.INFO, "redraft.server"):
        answer = client.post(RELOAD, json={})
    assert answer.json() == {"changed": ["lyanna"], "methods": [*runtime.methods]}
    assert "drafters read again; changed: lyanna" in caplog.messages


def test_a_reload_that_fails_tells_the_reason_without_paths(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> tuple[str, ...]:
        raise BundleError("/srv/engines/tiny: expected file weights, found none", "build it again")

    client = client_of(runtime, reload_drafter=True)
    monkeypatch.setattr(runtime, "reload_drafters", fail)
    error = error_of(client.post(RELOAD, json={}), 409)
    assert error["code"] == "reload_failed"
    assert "expected file weights, found none; build it again" in error["message"]
    assert "srv" not in error["message"]
    assert [text for text in caplog.messages if "the drafters stay as they are: /srv/engines/tiny" in text]
    assert client.post("/v1/completions", json={"model": "toy", "prompt": "abc"}).status_code == 200


def test_one_reload_runs_at_a_time(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have begun before the first one may end."""
    first, release, running, most = threading.Event(), threading.Event(), [0], [0]

    def slow() -> tuple[str, ...]:
        running[0] += 1
        most[0] = max(most[0], running[0])
        first.set()
        assert release.wait(WAIT)
        running[0] -= 1
        return ()

    monkeypatch.setattr(runtime, "reload_drafters", slow)
    with listening(runtime, reload_drafter=True) as (url, server), ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(httpx.post, url + RELOAD, json={}, timeout=WAIT) for _ in range(2)]
        assert first.wait(WAIT)
        while server.service.open_answers < 2:
            assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/ready").status_code == 200
        release.set()
        assert [one.result(WAIT).status_code for one in asked] == [200, 200]
    assert most == [1]


@pytest.mark.slow
def test_a_retrained_drafter_changes_drafts_and_no_text(tiny_bundle: Path, tmp_path: Path) -> None:
    """The requests that run when the drafters are read again end with theirs."""
    engines = shutil.copytree(tiny_bundle, tmp_path / "tiny")
    asked: dict[str, Any] = {
        "model": "toy", "prompt": "def add(first, second):\n", "max_tokens": 60, "temperature": 0,
        "speculative_config": {"method": "lyanna", "num_speculative_tokens": 4, "controller": "fixed"},
    }  # fmt: skip
    with (
        Runtime.open(engines, threads=1, max_num_seqs=2, verify=False) as runtime,
        listening(runtime, reload_drafter=True) as (url, _),
        httpx.Client(base_url=url, timeout=WAIT) as client,
    ):
        before = client.post("/v1/completions", json=asked).json()
        runtime.forget_prefixes()
        retrain(engines)
        with client.stream("POST", "/v1/completions", json={**asked, "stream": True}) as running:
            lines = running.iter_lines()
            seen = [next(lines)]
            assert httpx.post(url + RELOAD, json={}, timeout=WAIT).json()["changed"] == ["lyanna"]
            seen += lines
        kept = events(httpx.Response(200, text="\n".join(seen)))
        after = client.post("/v1/completions", json=asked).json()
    text = before["choices"][0]["text"]
    assert "".join(choice["text"] for chunk in kept for choice in chunk["choices"]) == text
    assert after["choices"][0]["text"] == text
    assert kept[-1]["redraft"]["accepted"] == before["redraft"]["accepted"] > 0
    assert after["redraft"]["accepted"] < before["redraft"]["accepted"]
