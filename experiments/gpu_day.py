"""A quarter of an hour on a bare machine with a GPU: packed here, run there, one step a line.

    python -m experiments.gpu_day pack --out build/gpu-day [--onnxruntime WHEEL] [--bundle DIR ...]
    python3 LOAD/gpu_day.py run --out OUT [--work DIR] [--dry-run] [STEP ...]

The machine has nvcc, CMake, PyTorch, NumPy, onnx and tokenizers; it has no network and no TensorRT, and takes 64 MiB at
once. `pack` writes folders of at most that size (--mib): load-0 with this file and redraft's sources, and as many more
as an onnxruntime-gpu wheel and bundles need, cut in pieces. Such a wheel has machine code for many GPUs: that of others
than --architecture becomes zeros, which take no room. `run` keeps pieces in --work until it has them all, so loads may
arrive one by one. Steps, the most valuable first:

    build      the kernels, for this machine's GPU
    sanitize   every kernel against fp64 over fixed and random shapes, under compute-sanitizer's memcheck
    tests      tests/plugins, those marked gpu
    time       every size of experiments.kernels.speed against the device's copy and PyTorch
    bundles    each bundle on ONNX Runtime's CUDA provider: tokens against the host's, and speed (redraft.bench.gpu)

Each is a process with a limit of its own and prints one line; none stops a later one. OUT gets their JSON and output,
and gpu_day.json, what became of each step. This file needs the standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

RESERVED_BYTES = 1 << 20
"""Bytes of each load for names and blocks."""
ROOT = Path(__file__).resolve().parents[1]
SOURCES = (
    "assembly", "bench", "cli", "engines", "experiments", "export", "plugins", "redraft", "runtime", "tests", "train",
    "assets/tiny/heldout", "assets/tiny/prompts", "pyproject.toml",
)  # fmt: skip
SOURCE, CARGO, CONTENTS = "source.tar.xz", "cargo", "cargo.json"
FAT_BINARY = struct.pack("<IHH", 0xBA55ED50, 1, 16)
"""Magic number, version and header size of CUDA's fat binaries."""


class Step(NamedTuple):
    """One step: its command, its seconds at most, and the file that must be there for it."""

    name: str
    command: list[str]
    seconds: int
    needs: Path | None = None


def main() -> None:
    """Pack, or run."""
    options = _arguments()
    if options.action == "pack":
        pack(options.out, options.onnxruntime, options.bundle, options.architecture, options.mib << 20)
    elif run(Path(__file__).resolve().parent, options.out, options.work, options.steps, options.dry_run):
        sys.exit(1)


def pack(out: Path, onnxruntime: Path | None, bundles: list[Path], architecture: int, load_bytes: int) -> None:
    """Write loads into `out`: what load-0 has room for, then whole loads. Raises FileExistsError."""
    load = out / "load-0"
    load.mkdir(parents=True)
    listed = subprocess.run(["git", "ls-files", "-z", *SOURCES], cwd=ROOT, check=True, capture_output=True, text=True)
    with tarfile.open(load / SOURCE, "w:xz") as archive:
        for name in listed.stdout.split("\0")[:-1]:
            archive.add(ROOT / name, name)
    cargo = io.BytesIO()
    with tarfile.open(fileobj=cargo, mode="w:xz") as archive:
        with zipfile.ZipFile(onnxruntime) if onnxruntime else nullcontext() as wheel:
            for name in (entry.filename for entry in wheel.infolist() if not entry.is_dir()) if wheel else ():
                data = wheel.read(name)
                data = without_other_code(data, architecture) if name.endswith("providers_cuda.so") else data
                entry = tarfile.TarInfo(f"site/{name}")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
        for bundle in bundles:
            archive.add(bundle.resolve(), f"bundles/{bundle.name}")
    data, whole = cargo.getvalue(), load_bytes - RESERVED_BYTES
    ends = range(whole - (load / SOURCE).stat().st_size, len(data) + whole, whole)
    for number, end in enumerate(ends):
        load = out / f"load-{number}"
        load.mkdir(exist_ok=True)
        shutil.copy(__file__, load)
        (load / f"{CARGO}.{number}").write_bytes(data[max(0, end - whole) if number else 0 : end])
        print(load)
    contents = {
        "pieces": [f"{CARGO}.{number}" for number in range(len(ends))],
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    (out / "load-0" / CONTENTS).write_text(json.dumps(contents) + "\n")


def without_other_code(data: bytes, architecture: int) -> bytes:
    """Return a library with zeros in place of the machine code for other architectures, such as 90 for 9.0.

    A fat binary's entries are read only if their header names the device's architecture.
    """
    found, place = bytearray(data), 0
    while (place := found.find(FAT_BINARY, place)) >= 0:
        (size,) = struct.unpack_from("<Q", found, place + 8)
        entry, end = place + 16, min(place + 16 + size, len(found))
        while entry + 32 <= end:
            header, length = struct.unpack_from("<IQ", found, entry + 4)
            (of,) = struct.unpack_from("<I", found, entry + 28)
            if of != architecture:
                found[entry + header : entry + header + length] = bytes(length)
            entry += header + length
        place = end
    return bytes(found)


def run(load: Path, out: Path, work: Path, names: list[str], dry: bool) -> int:
    """Unpack, then run the named steps, or all. Returns how many failed. `dry`: only print the commands."""
    out.mkdir(parents=True, exist_ok=True)
    missing = [] if dry else unpack(load, work)
    if missing:
        print(f"unpacked, without {len(missing)} pieces that are in later loads")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(work / "source"), str(work / "site")]),
        "REDRAFT_KERNELS": str(work / "kernels/libredraft_kernels.so"),
        "PYTHONUNBUFFERED": "1",
    }
    results = []
    for step in steps(work, out):
        if names and step.name.partition(" ")[0] not in names:
            continue
        if dry:
            print(f"{step.name} (at most {step.seconds} s): {' '.join(step.command)}")
            continue
        result = _run_step(step, environment, work / "source", out)
        print(f"{step.name}: {result['outcome']}, {result['seconds']} s", flush=True)
        results.append({"step": step.name, **result})
        (out / "gpu_day.json").write_text(json.dumps(results, indent=1) + "\n")
    return sum(result["outcome"].startswith("failed") for result in results)


def steps(work: Path, out: Path) -> Iterator[Step]:
    """Yield the steps in order."""
    python, kernels = sys.executable, work / "kernels/libredraft_kernels.so"
    cmake = f"cmake -G Ninja -S {work}/source/plugins -B {work}/cmake -DREDRAFT_CPU=OFF -DREDRAFT_OUTPUT={work}/kernels"
    speed = [python, "-m", "experiments.kernels.speed"]
    yield Step("build", ["sh", "-c", f"{cmake} && cmake --build {work}/cmake"], 150)
    sanitizer = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "3"]
    yield Step("sanitize", [*sanitizer, *speed, "--check", "--out", str(out / "checks.json")], 120, kernels)
    yield Step("tests", [python, "-m", "pytest", "-q", "-m", "gpu", "tests/plugins"], 150, kernels)
    yield Step("time", [*speed, "--out", str(out / "kernels.json")], 180, kernels)
    prompts = [str(path) for path in sorted((work / "source/assets/tiny/prompts").glob("*.jsonl"))]
    for bundle in sorted((work / "bundles").glob("*")):
        measured = ["--engines", str(bundle), "--prompts", *prompts, "--limit", "3", "--go-on"]
        command = [python, "-m", "redraft.bench.gpu", *measured, "--out", str(out / f"{bundle.name}.json")]
        yield Step(f"bundles {bundle.name}", command, 100, work / "site/onnxruntime")


def unpack(load: Path, work: Path) -> list[str]:
    """Unpack a load. Returns the names of pieces that have not arrived. Raises SystemExit for damaged ones."""
    pieces = work / "pieces"
    pieces.mkdir(parents=True, exist_ok=True)
    if (load / SOURCE).exists():
        with tarfile.open(load / SOURCE) as archive:
            archive.extractall(work / "source", filter="data")
        source = work / "source"
        project = tomllib.loads((source / "pyproject.toml").read_text())
        for package, folder in sorted(project["tool"]["scikit-build"]["wheel"]["packages"].items()):
            if package != folder:  # to the place of its name
                shutil.copytree(source / folder, source / package, dirs_exist_ok=True)
    for path in (*load.glob(f"{CARGO}.*"), *load.glob(CONTENTS)):
        shutil.copy(path, pieces)
    if not (pieces / CONTENTS).exists():
        return ["all"]
    contents = json.loads((pieces / CONTENTS).read_text())
    missing = [name for name in contents["pieces"] if not (pieces / name).exists()]
    if missing:
        return missing
    joined = b"".join((pieces / name).read_bytes() for name in contents["pieces"])
    if hashlib.sha256(joined).hexdigest() != contents["sha256"]:
        raise SystemExit("the pieces do not make what was packed: pack and carry them again")
    with tarfile.open(fileobj=io.BytesIO(joined)) as archive:
        archive.extractall(work, filter="data")
    return []


def _run_step(step: Step, environment: dict[str, str], folder: Path, out: Path) -> dict[str, str | float]:
    if step.needs and not step.needs.exists():
        return {"outcome": f"skipped: no {step.needs}", "seconds": 0}
    start, log = time.monotonic(), out / f"{step.name.replace(' ', '-')}.log"
    with log.open("w") as printed:
        try:
            done = subprocess.run(
                step.command, cwd=folder, env=environment, stdout=printed, stderr=subprocess.STDOUT,
                timeout=step.seconds, check=False,
            )  # fmt: skip
            outcome = "failed" if done.returncode else "ok"
        except subprocess.TimeoutExpired:
            outcome = f"failed: not done after {step.seconds} s"
        except OSError as error:
            outcome = f"failed: {error}"
    lines = log.read_text(errors="replace").strip().splitlines()
    if outcome == "failed" and lines:
        outcome = f"failed: {lines[-1]}"
    return {"outcome": outcome, "seconds": round(time.monotonic() - start, 1)}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    packing = actions.add_parser("pack", help="write the loads")
    packing.add_argument("--out", type=Path, required=True, help="a folder that is not there yet")
    packing.add_argument("--onnxruntime", type=Path, help="a wheel of onnxruntime-gpu for the machine's Python")
    packing.add_argument("--bundle", type=Path, nargs="*", default=[], help="bundles of the backend onnxruntime")
    packing.add_argument("--architecture", type=int, default=90, help="of the GPU: 90 for compute capability 9.0")
    packing.add_argument("--mib", type=int, default=64, help="most MiB of a load")
    running = actions.add_parser("run", help="run the steps on the machine with the GPU")
    running.add_argument("steps", nargs="*", help="names of steps; all if none is given")
    running.add_argument("--out", type=Path, required=True, help="folder for the results")
    running.add_argument("--work", type=Path, default=Path("/tmp/redraft-gpu-day"))
    running.add_argument("--dry-run", action="store_true", help="print what would run")
    return parser.parse_args()


if __name__ == "__main__":
    main()
