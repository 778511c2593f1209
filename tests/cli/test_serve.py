"""`redraft serve`: it tells its address, answers, and ends with status 0 when it is told to stop."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx2 as httpx
import pytest
from tests.little import Redraft

from redraft.runtime import Runtime, SamplingParams

COMMAND = "import sys; from redraft.cli.main import run; sys.exit(run(sys.argv[1:]))"
WAIT = 120


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_server_answers_until_it_is_told_to_stop(bundle: Path, tmp_path: Path, stop: signal.Signals) -> None:
    (tmp_path / "keys").write_text("secret\n")
    options = ("--port", "0", "--name", "toy", "--api-key-file", str(tmp_path / "keys"), "--threads", "1")
    arguments = [sys.executable, "-c", COMMAND, "serve", "--engines", str(bundle), *options]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().removeprefix("listening on ").strip()
            shown = [process.stdout.readline() for _ in range(3)]
            with httpx.Client(base_url=url, headers={"Authorization": "Bearer secret"}, timeout=WAIT) as client:
                asked = {"model": "toy", "prompt": "the cat", "max_tokens": 5}
                answer = client.post("/v1/completions", json=asked).json()
                assert client.get("/ready").status_code == 200
            process.send_signal(stop)
            assert process.wait(WAIT) == 0, process.stderr and process.stderr.read()
        finally:
            process.kill()
    assert "model toy" in shown[0]
    assert answer["system_fingerprint"] in shown[0]
    assert "ngram by default" in shown[1]
    assert "MB" in shown[2]
    with Runtime.open(bundle, threads=1, verify=False, max_num_seqs=8) as runtime:
        (expected,) = runtime.generate(["the cat"], SamplingParams(max_tokens=5))
        assert (answer["choices"][0]["text"], answer["system_fingerprint"]) == (expected.text, runtime.fingerprint)


def test_a_port_in_use_is_refused_before_the_bundle_is_opened(redraft: Redraft, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = redraft("serve", "--engines", tmp_path / "none", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert "cannot listen on 127.0.0.1" in done.stderr
