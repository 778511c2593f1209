"""The ranges of a run as Nsight Systems sees them: runs this command again as its child and reads its report.

Reads `nvtx_pushpop_trace` and not its sum, since percentiles and nesting need every range. Its columns are those of
NVIDIA's Analysis Guide; the CSV names them with units, and ranges as `domain:name`.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from redraft.errors import RedraftError, UsageError
from redraft.runtime.observe.profiling import NVTX_DOMAIN, Recorded

SUFFIX = ".nsys-rep"
CAPTURED = "decode"
"""The collected range. The report leaves out loading and warming up, which come before it."""
REPORT = "nvtx_pushpop_trace"
_INSTALL = "install Nsight Systems (https://developer.nvidia.com/nsight-systems) and have `nsys` on the PATH"
_ERROR = "redraft: error: "


def recorded_by_nsys(arguments: Sequence[str], report: Path) -> list[Recorded]:
    """Run `redraft` with `arguments`, which must emit NVTX ranges, under nsys, and read the ranges in its report.

    Raises RedraftError, as one line, if nsys or the nvtx package is missing or anything fails.
    """
    nsys = shutil.which("nsys")
    if nsys is None:
        raise RedraftError("--nsys needs NVIDIA's `nsys`, which is not on the PATH", _INSTALL)
    if find_spec("nvtx") is None:
        raise RedraftError("--nsys needs the nvtx package, which is not installed", "pip install 'redraft[profile]'")
    program = [sys.executable, "-c", "from redraft.cli.main import main; main()", *arguments]
    _run([nsys, *profile_options(report), *program])
    text = _run([nsys, *stats_options(report)])
    ranges = list(parse(text))
    if not ranges:
        raise RedraftError(f"nsys wrote no range of {NVTX_DOMAIN} to {report}", "see `nsys stats` on it")
    return ranges


def profile_options(report: Path) -> list[str]:
    """Return the `nsys` command that collects the ranges; the command to run follows it."""
    return [
        "profile", "--trace=cuda,nvtx", "--cuda-graph-trace=node", "--sample=none", "--cpuctxsw=none",
        "--capture-range=nvtx",
        f"--nvtx-capture={CAPTURED}@{NVTX_DOMAIN}", "--capture-range-end=stop",
        "--env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0", "--force-overwrite=true",
        f"--output={report.with_suffix('')}",
    ]  # fmt: skip


def stats_options(report: Path) -> list[str]:
    """Return the `nsys` command that prints every range of a report as CSV."""
    return ["stats", f"--report={REPORT}", "--format=csv", "--output=-", "--force-export=true", str(report)]


def parse(text: str) -> Iterator[Recorded]:
    """Yield the ranges of our domain in the CSV, without the captured one. nsys prints messages before its header."""
    lines = text.splitlines()
    start = next((place for place, line in enumerate(lines) if line.startswith("Start (ns),")), len(lines))
    rows = [row for row in csv.DictReader(lines[start:]) if (row["Name"] or "").startswith(f"{NVTX_DOMAIN}:")]
    rows = [row for row in rows if row["Name"] != f"{NVTX_DOMAIN}:{CAPTURED}"]
    outermost = min((int(row["Lvl"]) for row in rows), default=0)
    for row in rows:
        name = row["Name"].removeprefix(f"{NVTX_DOMAIN}:")
        yield Recorded(name, int(row["Start (ns)"]) / 1e9, int(row["End (ns)"]) / 1e9, int(row["Lvl"]) - outermost)


def _run(command: list[str]) -> str:
    """Return the standard output of a command. An error of ours is raised again, any other as its last line."""
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    if done.returncode == 0:
        return done.stdout
    lines = [line.strip() for line in (done.stdout + "\n" + done.stderr).splitlines() if line.strip()]
    ours = next((line.removeprefix(_ERROR) for line in lines if line.startswith(_ERROR)), None)
    if ours is not None:
        raise (UsageError if done.returncode == UsageError.exit_status else RedraftError)(ours)
    raise RedraftError(
        f"`nsys {command[1]}` left with {done.returncode}: {lines[-1] if lines else 'it printed nothing'}"
    )
