"""`redraft serve`: it opens or builds a bundle, answers, and ends with status 0 when it is told to stop."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx2 as httpx
import pytest
from tests.little import Redraft

from redraft.cli import serving
from redraft.runtime import Runtime, SamplingParams
from redraft.runtime.server import logs, process

COMMAND = "import sys; from redraft.cli.main import run; sys.exit(run(sys.argv[1:]))"
WAIT = 120


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_server_answers_until_it_is_told_to_stop(bundle: Path, tmp_path: Path, stop: signal.Signals) -> None:
    """It tells its stages, then what it serves, then a line for each request. SIGHUP reads the drafters again."""
    (tmp_path / "keys").write_text("secret\n")
    place = (str(bundle),) if stop is signal.SIGTERM else ("--engines", str(bundle))
    options = ("--port", "0", "--name", "toy", "--api-key-file", str(tmp_path / "keys"), "--threads", "1")
    logged = ("--log-format", "json", "--reload-drafter")
    arguments = [sys.executable, "-c", COMMAND, "serve", *place, *options, *logged]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        guard = threading.Timer(WAIT, server.kill)  # whoever waits for a line that does not come
        guard.start()
        try:
            assert server.stdout is not None
            assert server.stderr is not None
            url = server.stdout.readline().removeprefix("listening on ").strip()
            shown = [server.stdout.readline() for _ in range(4)]
            with httpx.Client(base_url=url, headers={"Authorization": "Bearer secret"}, timeout=WAIT) as client:
                asked = {"model": "toy", "prompt": "the cat", "max_tokens": 5}
                answer = client.post("/v1/completions", json=asked).json()
                assert client.get("/ready").status_code == 200
            server.send_signal(signal.SIGHUP)
            lines = [server.stderr.readline()]
            while lines[-1] and "drafters" not in lines[-1]:
                lines.append(server.stderr.readline())
            server.send_signal(stop)
            assert server.wait(WAIT) == 0, server.stderr.read()
        finally:
            guard.cancel()
            server.kill()
    stages = [line.partition("] ")[2] for line in lines if not line.startswith("{")]
    assert stages[0] == f"opening {bundle}: checking the bundle\n"
    assert stages[-1] == "warming ngram\n"
    log = [json.loads(line) for line in lines[len(stages) :]]
    assert [one["message"] for one in log if one["logger"] == "redraft.requests"] == ["request"]
    assert log[-1]["message"] == "drafters read again; changed: none"
    assert "model toy" in shown[0]
    assert answer["system_fingerprint"] in shown[0]
    assert "ngram by default" in shown[1]
    assert "limits 8 requests at once, 256 waiting, 63 tokens" in shown[3]
    with Runtime.open(bundle, threads=1, verify=False, max_num_seqs=8) as runtime:
        (expected,) = runtime.generate(["the cat"], SamplingParams(max_tokens=5))
        assert (answer["choices"][0]["text"], answer["system_fingerprint"]) == (expected.text, runtime.fingerprint)
        rows = sum(array.nbytes for array in runtime.verifier.steps.host_kv())
        assert f"KV of 16 full slots {rows / 1e6:.1f} MB" in shown[2]


def test_a_port_in_use_is_refused_before_the_bundle_is_opened(redraft: Redraft, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = redraft("serve", "--engines", tmp_path / "none", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert "cannot listen on 127.0.0.1" in done.stderr


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, bundle: Path, tmp_path: Path) -> list[tuple[str, ...]]:
    """The arguments of builds, each of which copies the bundle. A server ends at once."""
    calls: list[tuple[str, ...]] = []

    def build(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        calls.append(tuple(command[4:]))
        shutil.copytree(bundle, tmp_path / "build/engines/little")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(serving.subprocess, "run", build)
    monkeypatch.setattr(process.DrainingServer, "run", lambda self, sockets: self._started("http://toy"))
    monkeypatch.setattr(logs, "configure_logging", lambda form, level: None)
    return calls


def test_a_model_is_built_unless_its_bundle_is_there(
    redraft: Redraft, built: list[tuple[str, ...]], checkpoint: Path, tmp_path: Path
) -> None:
    for _ in range(2):
        done = redraft("serve", checkpoint, "--port", 0, "--threads", 1, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "model little, context 64" in done.stdout
    assert built == [("build", str(checkpoint))]
    other = shutil.copytree(checkpoint, tmp_path / "other" / checkpoint.name)
    done = redraft("serve", other, "--port", 0, "--threads", 1, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"is the bundle of {checkpoint}, not of {other}" in done.stderr


def test_a_build_that_fails_ends_the_command(
    redraft: Redraft, built: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It has printed its own line."""
    failed = subprocess.CompletedProcess([], 2)
    monkeypatch.setattr(serving.subprocess, "run", lambda command, **options: failed)
    done = redraft("serve", "tiny", "--port", 0, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_a_model_or_a_bundle_is_given(redraft: Redraft, tmp_path: Path) -> None:
    for words in ((), ("tiny", "--engines", tmp_path)):
        done = redraft("serve", *words)
        assert done.returncode == 2
        assert "give a model or a bundle" in done.stderr


@pytest.mark.slow
def test_a_server_builds_what_it_serves(checkpoint: Path, tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", COMMAND, "serve", str(checkpoint), "--port", "0", "--threads", "1"]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as server:  # fmt: skip
        try:
            assert server.stdout is not None
            url = server.stdout.readline().removeprefix("listening on ").strip()
            assert httpx.get(f"{url}/v1/models", timeout=WAIT).json()["data"][0]["id"] == "little"
            server.terminate()
            _, progress = server.communicate(timeout=WAIT)
        finally:
            server.kill()
    assert (tmp_path / "build/engines/little/manifest.json").is_file()
    assert "opening build/engines/little" in progress
    assert server.returncode == 0
