"""The products with quantized weights equal their definition to the bit, on every instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from redraft.plugins.operators import OPERATORS_LIBRARY
from tests.conftest import Once

from . import products as checks
from .builds import AVX2, CPU, ROOT, SANITIZERS, arm_tools, build_kernels, built, x86_compiler
from .products import BLOCKS, ISAS, BlockMatrix, Products, check_equal, reference

SOURCES = CPU / "products"
COMMON = [SOURCES / name for name in ("entries.cpp", "pack.cpp", "scalar.cpp")]
EVERY_COUNT = (*range(1, 41), 256)
EMULATED = {
    ("avx_vnni",): ("-DREDRAFT_EMULATED", "-Wno-psabi", *AVX2),
    ("amx", "avx512_vnni"): ("-DREDRAFT_EMULATED", "-fno-inline"),  # which compiles ten times as fast
}
ARM = {"i8mm": "i8mm", "dot": "dotprod"}


@pytest.fixture(scope="module")
def products() -> Products:
    """The library of `make operators`."""
    return Products(built(OPERATORS_LIBRARY))


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


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_over_several_panels_and_turns(used: Products, bits: int) -> None:
    rng = np.random.default_rng(0)
    matrix = BlockMatrix.random(rng, 75, 600, bits, 32)
    x = rng.standard_normal((140, 600), np.float32)
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


@pytest.mark.parametrize("isas", EMULATED)
def test_kernels_of_other_cpus(once: Once, isas: tuple[str, ...]) -> None:
    """Their own source with the instructions emulated, so that indexing is proved, not the instructions."""
    emulated = Products(once(_build, x86_compiler(), isas, EMULATED[isas]) / "products.so")
    assert emulated.isas() == [*isas, "scalar"]
    for isa in isas:
        emulated.use(isa)
        checks.check_all(emulated, (32, 33, 47) if isa == "amx" else (*range(1, 14), 25))


def test_kernels_of_arm(tmp_path: Path) -> None:
    """Under an emulator of the processor, against plain C++."""
    compiler, emulator = arm_tools()
    sources = [ROOT / "tests/plugins/products_test.cpp", *COMMON]
    isas = {SOURCES / f"neon_{name}.cpp": [f"-march=armv8.2-a+{flag}"] for name, flag in ARM.items()}
    build_kernels(tmp_path / "test", compiler, sources, isas, link=["-static"])
    done = subprocess.run([emulator, tmp_path / "test"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["neon_i8mm", "neon_dot"]), done.stdout + done.stderr


@pytest.mark.slow
def test_sanitizers_find_nothing(once: Once) -> None:
    """Addresses and undefined behavior of every kernel; arrays of NumPy have the sanitizer's red zones too."""
    compiler = x86_compiler()
    library = once(_build, compiler, ("avx2",), AVX2, SANITIZERS) / "products.so"
    runtime = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    environment = {"LD_PRELOAD": runtime.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}
    command: list[str | Path] = [sys.executable, "-m", "tests.plugins.products", library]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "scalar" in done.stdout.split()


def _build(
    folder: Path, compiler: str, isas: tuple[str, ...], own: tuple[str, ...], flags: tuple[str, ...] = ()
) -> None:
    """Build the library with some instruction sets besides `scalar`, all with the flags `own`."""
    files = {SOURCES / f"{isa}.cpp": own for isa in isas}
    build_kernels(folder / "products.so", compiler, COMMON, files, flags=flags, link=["-shared"])
