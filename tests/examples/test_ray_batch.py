"""The batch job on Ray Data: it goes on after the answers that are there, which are those of one request at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from redraft.runtime import Runtime
from tests.conftest import ROOT
from tests.examples.test_batch import LINES, alone, texts, write

WAIT = 180


@pytest.mark.slow
def test_a_job_on_ray_data_goes_on_after_its_answers(bundle: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="the extra `ray-data` is not installed")
    pytest.importorskip("ray.data", reason="the extra `ray-data` is not installed")
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("a replica and Ray Data need two cores")
    prompts, out = write(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    command = [sys.executable, str(ROOT / "examples/ray_batch.py"), str(bundle), str(prompts), str(out)]
    subprocess.run(command, check=True, timeout=WAIT)
    whole = out.read_bytes().splitlines(keepends=True)
    half = b"".join(whole[: len(LINES) // 2])
    out.write_bytes(half + whole[-1][:9])  # killed while it wrote
    subprocess.run(command, check=True, timeout=WAIT)
    assert out.read_bytes().startswith(half)
    found = texts(out)
    with Runtime.open(bundle, threads=1, verify=False) as runtime:
        assert found == {line["id"]: alone(runtime, line) for line in LINES}
