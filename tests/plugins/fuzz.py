"""Fuzzes the operators for some minutes, half of them with their C entries and half with sessions of ONNX Runtime.

python -m tests.plugins.fuzz --minutes 10

The C entries are built with sanitizers, and for libFuzzer if a clang++ with it is here. It keeps its inputs in
build/fuzz, and an input that fails. Sessions run the examples of `test_fuzz.py`; hypothesis prints one that fails.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import time
from pathlib import Path

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from .builds import AVX2, CPU, ROOT, SANITIZERS, build_kernels, find_clang, find_compiler

PROGRAM = ROOT / "tests/plugins/operators_fuzz.cpp"
EMULATED = ("-DREDRAFT_EMULATED", "-fno-inline")
SOURCES = [CPU / part / name for part in ("products", "attention") for name in ("entries.cpp", "scalar.cpp")]
SOURCES += [PROGRAM, CPU / "products/pack.cpp", CPU / "attention/plan.cpp"]
ISAS = {
    CPU / "products/amx.cpp": EMULATED,
    CPU / "products/avx512_vnni.cpp": EMULATED,
    CPU / "products/avx_vnni.cpp": [*EMULATED, "-Wno-psabi", *AVX2],
    CPU / "products/avx2.cpp": AVX2,
    CPU / "attention/avx512.cpp": [*EMULATED, "-Wno-psabi", *AVX2],
    CPU / "attention/avx2.cpp": AVX2,
}


def build_program(folder: Path, compiler: str, *flags: str) -> Path:
    """Build the program of the C entries with sanitizers."""
    build_kernels(
        folder / "fuzz", compiler, SOURCES, ISAS if platform.machine() == "x86_64" else {}, flags=[*SANITIZERS, *flags]
    )
    return folder / "fuzz"


def fuzz_entries(seconds: int, folder: Path) -> None:
    """Raise CalledProcessError if a call fails."""
    inputs = folder / "inputs"
    inputs.mkdir(parents=True, exist_ok=True)
    if clang := find_clang(folder):
        program = build_program(folder, clang, "-fsanitize=fuzzer", "-DREDRAFT_LIBFUZZER")
        options = [
            "-max_len=512",
            "-len_control=0",
            f"-artifact_prefix={folder}/",
            "-print_final_stats=1",
            f"-max_total_time={seconds}",
        ]
        subprocess.run([program, *options, inputs], check=True)
        return
    program, first = build_program(folder, find_compiler()), 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        subprocess.run([program, "100", str(first)], check=True)
        first += 100


def fuzz_sessions(seconds: int) -> None:
    """Raise the error of an example that fails."""
    from . import test_fuzz

    end, number = time.monotonic() + seconds, 0
    options = settings(max_examples=500, deadline=None, database=None, suppress_health_check=[*HealthCheck])
    while time.monotonic() < end:
        for check in (test_fuzz.check_product, test_fuzz.check_attention, test_fuzz.check_gate):
            seed(number)(options(given(st.data())(check)))()
            number += 1
    print(f"{500 * number} examples of sessions")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="the default is 10")
    seconds = int(30 * parser.parse_args().minutes)
    fuzz_sessions(seconds)
    fuzz_entries(seconds, ROOT / "build/fuzz")


if __name__ == "__main__":
    main()
