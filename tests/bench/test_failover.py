"""Failover: a replica of a real server is killed, and nobody notices but by a pause."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from redraft.bench import failover

SLEEPER = "import sys, subprocess, time; subprocess.Popen(sys.argv[1:]); time.sleep(60)"


def test_replicas_are_those_that_a_server_started() -> None:
    named = ["bash", "-c", "exec -a ray::ServeReplica:x:y sleep 60"]
    other = subprocess.Popen(named)
    server = subprocess.Popen([sys.executable, "-c", SLEEPER, *named])
    try:
        end = time.monotonic() + 20
        while not (found := failover.replicas_of(server.pid)) and time.monotonic() < end:
            time.sleep(0.05)
        (replica,) = found
        assert replica != other.pid
        assert other.pid in failover.replicas_of(os.getpid())
        assert failover.replicas_of(server.pid, "x:y") == [replica]
        assert not failover.replicas_of(server.pid, "z")
    finally:
        for pid in failover.replicas_of(os.getpid()):
            os.kill(pid, 9)
        server.kill()
        server.wait()
        other.wait()


@pytest.mark.slow
def test_a_killed_replica_changes_no_text_of_a_real_server(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray.serve", reason="the extra `ray` is not installed")
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two replicas need two cores")
    options = ["--engines", str(tiny_bundle), "--kills", "1", "--requests", "20"]
    monkeypatch.setattr(sys, "argv", ["failover", *options])
    with pytest.raises(SystemExit) as ended:
        failover.main()
    found = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0, found["reasons"]
    assert found["kills"] == 1
    assert found["calls_lost"] >= 1
