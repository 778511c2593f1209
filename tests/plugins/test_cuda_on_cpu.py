"""The stand-in for a GPU in the kernels' tests: right for right kernels, and wrong for wrong ones."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from .builds import cpp_compiler

ROOT = Path(__file__).parents[2]
THREADS = 64
POISON = -1
"""Four bytes of 0xff, the content of shared memory before the first write."""

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    program = tmp_path_factory.mktemp("shim") / "shim_test"
    sources = [ROOT / "tests" / "plugins" / "shim_test.cpp", ROOT / "plugins" / "cpu" / "cuda_on_cpu.cpp"]
    subprocess.run([cpp_compiler(), "-std=c++17", "-O1", "-U_FORTIFY_SOURCE", *sources, "-o", program], check=True)

    def start(name: str, order: int = 0) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([program, name, str(order)], capture_output=True, check=False, timeout=60)

    return start


def numbers(done: subprocess.CompletedProcess[bytes]) -> list[int]:
    return list(map(int, done.stdout.split()))


@pytest.mark.parametrize("order", range(4))
def test_a_barrier_holds_in_any_order_and_a_missing_one_shows(run: Run, order: int) -> None:
    right = list(range(THREADS))[::-1]
    assert numbers(run("barrier", order))[:THREADS] == right
    found = numbers(run("no barrier", order))[:THREADS]
    assert found != right
    assert POISON in found


@pytest.mark.parametrize(
    ("name", "order", "found"),
    [("wait 0", 0, [6, 0]), ("wait 1", 0, [6, POISON]), ("no wait", 0, [POISON, POISON]), ("no wait", 1, [6, 0])],
)
def test_copies_arrive_when_they_are_waited_for_or_at_once(run: Run, name: str, order: int, found: list[int]) -> None:
    """A missing wait shows. A copy in progress may end before the wait: reads before it must not use its target."""
    assert numbers(run(name, order)) == found * THREADS


@pytest.mark.parametrize("order", [2, 3])
def test_warps_drift_apart(run: Run, order: int) -> None:
    """One warp runs rounds ahead of the other, unless they meet."""
    ahead = numbers(run("drift", order))[0]
    assert ahead > 3
    assert numbers(run("drift"))[0] <= 1


def test_threads_that_do_not_meet_end_the_process(run: Run) -> None:
    done = run("uneven")
    assert done.returncode != 0
    assert b"63 threads of block 0 wait for a thread that does not come" in done.stderr


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("copy to 8", "cp.async's target: expected an address at a multiple of 16 bytes"),
        ("copy from 4", "cp.async's source: expected an address at a multiple of 16 bytes"),
        (
            "copy to the end",
            "cp.async's target: expected 16 of the block's 2048 bytes of shared memory, found offset",
        ),
        ("copy to before the start", "found offset -16"),
        ("load from 8", "ldmatrix's row: expected an address at a multiple of 16 bytes"),
        ("load from the end", "ldmatrix's row: expected 16 of the block's 2048 bytes"),
        ("load transposed from 8", "ldmatrix's row: expected an address at a multiple of 16 bytes"),
        ("load transposed from the end", "ldmatrix's row: expected 16 of the block's 2048 bytes"),
    ],
)
def test_an_address_that_a_device_does_not_take_ends_the_process(run: Run, name: str, line: str) -> None:
    done = run(name)
    assert done.returncode != 0
    assert line in done.stderr.decode()


def test_limits_of_shared_memory_and_launches(run: Run) -> None:
    """Refused: shared memory past 48 KiB, past the limit set for this or another kernel; too large a grid or block."""
    assert run("last bytes").returncode == 0
    assert numbers(run("launches")) == [0, 2, 2, 0, 2, 0, 2, 2, 2]


def test_truncated_sums(run: Run) -> None:
    """Digits below the largest term's last place are lost, and the total is cut towards zero."""
    last = 2.0**-23
    found = [float.fromhex(line) for line in run("truncated").stdout.decode().split()]
    assert found == [1.0, -1.0, 2 + 2 * last, 2.5, 0.0, float("inf")]
