"""Properties of the kernels that only a GPU shows. The CPU build's problems are run on it by the other files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from redraft.plugins.library import Kernels

from .cases import attention_args, random_case, same_bits
from .devices import DeviceMemory, capture, current_stream

pytestmark = pytest.mark.gpu


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
