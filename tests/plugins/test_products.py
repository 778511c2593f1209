"""The products with quantized weights equal their definition to the bit, on every instruction set."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from redraft.plugins.library import BUILD
from tests.conftest import Once

from . import products as checks
from .products import BLOCKS, ISAS, BlockMatrix, Products, check_equal, reference

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "plugins" / "cpu" / "products"
COMMON = ("entries.cpp", "pack.cpp", "scalar.cpp")
EVERY_COUNT = (*range(1, 41), 256)
STRICT = ("-std=c++17", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")
EMULATED = {"avx_vnni": ("-mavx2", "-mfma"), "avx512_vnni": ("-ffp-contract=off",)}
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")


@pytest.fixture(scope="module")
def products() -> Products:
    """The library of `make kernels-cpu`. Skips only if no C++ compiler can build it."""
    path = BUILD / "libredraft_operators.so"
    if not path.exists() and not _compiler():
        pytest.skip("no C++ compiler here to build the products")
    return Products(path)


@pytest.fixture(params=ISAS)
def used(request: pytest.FixtureRequest, products: Products) -> Iterator[Products]:
    """The library with one instruction set in use, then again with the best."""
    best = products.isa
    if not products.use(request.param):
        pytest.skip(f"this CPU has no {request.param}")
    yield products
    products.use(best)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_is_the_same_in_every_batch(used: Products, bits: int, block: int) -> None:
    checks.check_rows(used, bits, block, EVERY_COUNT)


@pytest.mark.parametrize("bits", [4, 8])
def test_parts_of_rows_and_tiles_are_independent(used: Products, bits: int) -> None:
    checks.check_splits(used, bits)


@pytest.mark.parametrize("bits", [4, 8])
def test_extreme_values(used: Products, bits: int) -> None:
    checks.check_extremes(used, bits)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 15), (17, 33), (3, 1000)])
def test_odd_sizes(used: Products, n: int, k: int) -> None:
    """Fewer inputs than a block, fewer outputs than a tile."""
    rng = np.random.default_rng(n)
    for bits in (4, 8):
        matrix = BlockMatrix.random(rng, n, k, bits, 32)
        x, bias = rng.standard_normal((5, k), np.float32), rng.standard_normal(n, np.float32)
        packed = used.pack(matrix)
        assert packed is not None
        check_equal(packed.product(x, bias), reference(matrix, x, bias))


def test_rows_over_several_panels_of_activations(used: Products) -> None:
    rng = np.random.default_rng(0)
    matrix = BlockMatrix.random(rng, 33, 9000, 8, 128)
    x = rng.standard_normal((80, 9000), np.float32)
    packed = used.pack(matrix)
    assert packed is not None
    check_equal(packed.product(x), reference(matrix, x))


@pytest.mark.parametrize(
    ("bits", "block", "n", "k"),
    [(3, 32, 4, 32), (2, 32, 4, 32), (8, 8, 4, 32), (8, 48, 4, 48), (4, 512, 4, 512), (8, 32, 0, 32), (8, 32, 4, 0)],
)
def test_other_matrices_are_refused(products: Products, bits: int, block: int, n: int, k: int) -> None:
    blocks = max(1, k // block)
    codes, scales = np.zeros((n, blocks, block), np.uint8), np.zeros((n, blocks), np.float32)
    assert products.pack(BlockMatrix(k, bits, codes, scales, None)) is None


def test_unknown_instruction_sets_are_refused(products: Products) -> None:
    before = products.isa
    assert before in ISAS
    assert not products.use("sse9")
    assert products.isa == before


@pytest.mark.parametrize("isa", EMULATED)
def test_kernels_of_other_cpus(once: Once, isa: str) -> None:
    """Their own source with the instructions emulated, so that indexing is proved, not the instructions."""
    if platform.machine() != "x86_64" or not _compiler():
        pytest.skip("needs a C++ compiler for x86-64")
    emulated = Products(once(_build, isa=isa, flags=EMULATED[isa], emulated=True) / "products.so")
    assert emulated.isa == isa
    checks.check_all(emulated, (*range(1, 14), 25))


def test_kernels_of_arm(tmp_path: Path) -> None:
    """Under an emulator of the processor, against plain C++."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if not (compiler and emulator):
        pytest.skip("needs g++-aarch64-linux-gnu and qemu-user")
    common: list[str | Path] = [compiler, *STRICT, "-O1", "-DREDRAFT_NEON_DOT"]
    own: list[str | Path] = ["-march=armv8.2-a+dotprod", "-c", SOURCES / "neon_dot.cpp", "-o", tmp_path / "isa.o"]
    subprocess.run([*common, *own], check=True)
    sources = [ROOT / "tests/plugins/products_test.cpp", *(SOURCES / name for name in COMMON)]
    subprocess.run([*common, "-static", *sources, tmp_path / "isa.o", "-o", tmp_path / "test"], check=True)
    done = subprocess.run([emulator, tmp_path / "test"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["neon_dot"]), done.stdout + done.stderr


@pytest.mark.slow
def test_sanitizers_find_nothing(once: Once) -> None:
    """Addresses and undefined behavior of every kernel; arrays of NumPy have the sanitizer's red zones too."""
    if platform.machine() != "x86_64" or not _compiler():
        pytest.skip("needs a C++ compiler for x86-64")
    library = once(_build, isa="avx2", flags=("-mavx2", "-mfma", *SANITIZERS), emulated=False) / "products.so"
    runtime = subprocess.run([_compiler(), "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    environment = {"LD_PRELOAD": runtime.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}
    command: list[str | Path] = [sys.executable, "-m", "tests.plugins.products", library]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "scalar" in done.stdout.split()


def _compiler() -> str:
    return shutil.which("c++") or shutil.which("g++") or ""


def _build(folder: Path, isa: str, flags: tuple[str, ...], emulated: bool) -> None:
    """Build the library with one instruction set besides `scalar`, warnings as errors."""
    defined = [f"-DREDRAFT_{isa.upper()}", "-fvisibility=hidden", *(["-DREDRAFT_EMULATED"] if emulated else [])]
    sanitized = [flag for flag in flags if flag in SANITIZERS]
    common: list[str | Path] = [_compiler(), *STRICT, *defined, *sanitized, f"-I{ROOT / 'tests' / 'plugins'}"]
    own: list[str | Path] = ["-c", SOURCES / f"{isa}.cpp", "-O1", *flags, "-o", folder / "isa.o"]
    subprocess.run([*common, *own], check=True)
    others = [SOURCES / name for name in COMMON]
    subprocess.run([*common, "-O1", "-shared", *others, folder / "isa.o", "-o", folder / "products.so"], check=True)
