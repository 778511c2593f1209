"""Builds of the CPU kernels for tests: with sanitizers, with emulated instructions, and for emulated processors."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from redraft.plugins.library import BUILD

ROOT = Path(__file__).parents[2]
CPU = ROOT / "plugins" / "cpu"
STRICT = ("-std=c++17", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g1", "-D_GLIBCXX_ASSERTIONS")


def find_compiler() -> str:
    """Return the C++ compiler, or ""."""
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), "")


def find_clang(folder: Path) -> str:
    """Return a clang++ with libFuzzer, or "". Prints which ones lack it. folder: for a file."""
    for version in ("", *(f"-{number}" for number in range(21, 13, -1))):
        if found := shutil.which(f"clang++{version}"):
            entry = 'extern "C" int LLVMFuzzerTestOneInput(const char *, unsigned long) { return 0; }'
            command = [found, "-fsanitize=fuzzer", *SANITIZERS, "-x", "c++", "-", "-o", folder / "empty"]
            if subprocess.run(command, input=entry, text=True, capture_output=True, check=False).returncode == 0:
                return found
            print(f"{found} has no libFuzzer (libclang-rt-dev): calls are drawn at random", flush=True)
    return ""


def cpp_compiler() -> str:
    """Return the C++ compiler; skips without one."""
    return find_compiler() or pytest.skip("needs a C++ compiler")


def built(library: str) -> Path:
    """Return a library of `make kernels-cpu`. Skips only if no C++ compiler can build it."""
    path = BUILD / library
    if not path.exists():
        cpp_compiler()
    return path


def x86_compiler() -> str:
    """Return the C++ compiler; skips without one, and on other processors."""
    if platform.machine() != "x86_64":
        pytest.skip("needs an x86-64 processor")
    return cpp_compiler()


def arm_tools() -> tuple[str, str]:
    """Return the compiler for ARM and the emulator; skips without them."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if not (compiler and emulator):
        pytest.skip("needs g++-aarch64-linux-gnu and qemu-user")
    return compiler, emulator


def build_kernels(
    to: Path, compiler: str, sources: Sequence[Path], isas: Mapping[Path, Sequence[str]], *,
    flags: Sequence[str] = (), link: Sequence[str] = (),
) -> None:  # fmt: skip
    """Build a program or library of sources and instruction sets, warnings as errors.

    isas: their files, with flags of their own.   flags: of all files.   link: of the linker.
    """
    defined = [f"-DREDRAFT_{file.stem.upper()}" for file in isas]
    common = [compiler, *STRICT, "-O1", "-fvisibility=hidden", f"-I{Path(__file__).parent}", *defined, *flags]
    objects = [to.with_name(f"{file.parent.name}.{file.stem}.o") for file in isas]
    for (file, own), compiled in zip(isas.items(), objects, strict=True):
        subprocess.run([*common, *own, "-c", file, "-o", compiled], check=True)
    subprocess.run([*common, *link, *sources, *objects, "-o", to], check=True)
