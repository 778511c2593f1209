"""The kernels on a GPU: the CPU build's problems again, and properties that only a device shows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from redraft.plugins.library import DTYPES, Kernels, missing_kernels, open_kernels

from .cases import (
    Case,
    attend,
    attention_args,
    compact,
    compacted,
    error_of,
    random_case,
    reference,
    same_bits,
    with_lengths,
)
from .checks import FEATURES, checks
from .devices import DeviceMemory, capture, current_stream, missing_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(missing_device() is not None, reason=missing_device() or "a device is here"),
]


@pytest.fixture(scope="module")
def device_kernels() -> Kernels:
    """The kernels for the GPU. Skips if none were built; a library that does not load is an error."""
    if reason := missing_kernels():
        pytest.skip(reason)
    return open_kernels()


def run(kernels: Kernels, case: Case, **options: Any) -> tuple[NDArray, NDArray, NDArray]:
    return attend(kernels, case, DeviceMemory(), **options)


def test_calls_of_every_kernel_agree_with_float64(device_kernels: Kernels) -> None:
    """Every type and head size, trees of all sizes, every feature, ragged batches, and compaction."""
    assert {each["what"] for each in checks(device_kernels, DeviceMemory)} == {
        "tree",
        "random",
        *FEATURES,
        "compaction",
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "build",
    [
        lambda dtype: random_case(3, dtype, 64, [0, 90], 300, (2, 1), causal=True),
        lambda dtype: random_case(5, dtype, 128, [1131, 0], 256, (1, 1)),
        lambda dtype: random_case(13, dtype, 64, [130], 6, magnitude=50.0, scale=1.0),
    ],
    ids=["a long chunk", "the largest tree", "large scores"],
)
def test_extreme_cases(device_kernels: Kernels, dtype: str, build: Callable[[str], Case]) -> None:
    case = build(dtype)
    assert error_of(case, run(device_kernels, case)[0], truncated=True) < 1


@pytest.mark.parametrize("nodes", [5, 45])
def test_a_mask_of_bits_is_the_same_as_a_mask_of_bytes(device_kernels: Kernels, nodes: int) -> None:
    case = random_case(15, "float16", 64, [20, 50], nodes)
    packed = run(device_kernels, case, bits=True)
    assert error_of(case, packed[0], truncated=True) < 1
    assert all(map(same_bits, packed, run(device_kernels, case, bits=False)))


@pytest.mark.parametrize("bits", [False, True])
def test_rows_that_are_in_the_cache_already(device_kernels: Kernels, bits: bool) -> None:
    case = random_case(16, "float16", 64, [20, 50], 9)
    written = run(device_kernels, case)
    assert error_of(case, written[0], truncated=True) < 1
    filled = replace(case, key_cache=written[1], value_cache=written[2])
    again = run(device_kernels, filled, bits=bits, write=False)
    assert all(map(same_bits, written, again))


@pytest.mark.parametrize("wrong", [-1, -(2**40), 10**6, 2**40, 98])
def test_a_length_outside_the_cache_harms_nothing(device_kernels: Kernels, wrong: int) -> None:
    case = random_case(17, "float16", 64, [60, 90, 31], 6)
    for cache in (case.key_cache, case.value_cache):
        cache[np.isnan(cache)] = 0
    capacity = case.key_cache.shape[2]
    out, keys, values = run(device_kernels, with_lengths(case, [60, wrong, 31]))
    nearest = min(max(wrong, 0), capacity)
    right = replace(case, counts=np.array([6, min(6, capacity - nearest), 6]))
    expected, expected_keys, expected_values = reference(with_lengths(right, [60, nearest, 31]))
    assert np.isfinite(out).all()
    assert same_bits(keys, expected_keys)
    assert same_bits(values, expected_values)
    for sequence in (0, 2):
        np.testing.assert_allclose(out[sequence], expected[sequence], atol=5e-3)


@pytest.mark.parametrize("ctas", [1, 7, 1000])
def test_any_number_of_blocks(device_kernels: Kernels, ctas: int) -> None:
    case = random_case(6, "float16", 128, [5000, 12, 700], 4, (8, 2))
    assert error_of(case, run(device_kernels, case, ctas=ctas)[0], truncated=True) < 1


def test_one_graph_serves_lengths_that_change(device_kernels: Kernels) -> None:
    case, memory = random_case(21, "float16", 128, [900, 900], 5, (4, 2)), DeviceMemory()
    for cache in (case.key_cache, case.value_cache):
        cache[np.isnan(cache)] = 1
    args = attention_args(case, memory)
    scratch = np.full(device_kernels.workspace_bytes(args), 255, dtype=np.uint8)
    address = memory.put(scratch)
    graph = capture([lambda: device_kernels.attend(args, address, scratch.nbytes, current_stream())])
    for kv_len in (900, 17, 0):
        lengths = np.array([kv_len, kv_len])
        memory.held[args.cache_len].copy_(memory.torch.from_numpy(lengths.view(np.uint8)))
        graph.replay()
        captured = memory.get(args.out, case.q)
        memory.held[args.out].zero_()
        device_kernels.attend(args, address, scratch.nbytes)
        assert same_bits(captured, memory.get(args.out, case.q))


@pytest.mark.parametrize("path", [[2, 7, 8], [1, 2], list(range(3, 40, 2))])
def test_compaction(device_kernels: Kernels, path: list[int]) -> None:
    rng = np.random.default_rng(1)
    caches = [rng.standard_normal((2, 3, 90, 128)).astype(np.float16) for _ in range(6)]
    given = caches, np.array([10, 40]), np.array([path, path]), np.array([len(path), 1])
    assert all(map(same_bits, compact(device_kernels, *given, DeviceMemory()), compacted(*given)))


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_compute_sanitizer_finds_nothing(device_kernels: Kernels, tool: str) -> None:
    """Allocations are the driver's, not PyTorch's pool, so that an access past an end is seen.

    Initcheck follows the writes of every kernel: without PyTorch's own, it would take their memory for unwritten.
    """
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
    ours_only = [] if tool == "initcheck" else ["--kernel-regex", "kns=redraft"]
    command = [sanitizer, "--tool", tool, *ours_only, "--report-api-errors", "no", "--error-exitcode", "9",
               sys.executable, "-m", "tests.plugins.checks"]  # fmt: skip
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert '"compaction"' in done.stdout
