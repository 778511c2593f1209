"""A CUDA device by PyTorch: its description, its copy speed, and times of captured calls."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from redraft.bench.environment import environment, nvidia_smi
from redraft.errors import UsageError

COPY_BYTES = 256 << 20
"""Of one block. On an H200 a CUDA graph copies blocks of 1 GiB at two thirds of its speed (2716 of 4250 GB/s)."""
REPLAYS = 30
WARM_UPS = 3
SLEEP_CYCLES = 2_000_000
"""About a millisecond of the device, in which the host sends it the events and the graph: a launch is not timed."""


@dataclass(frozen=True)
class Captured:
    """A CUDA graph of `calls`, each over its own memory, so that none finds its data in the cache.

    It holds the calls: a graph has their memory's addresses, and PyTorch gives memory that nothing holds to others.
    """

    replay: Callable[[], None]
    calls: Sequence[Callable[[], object]]


def missing_device() -> str | None:
    """Return the reason why no kernel can run here, or None."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return "PyTorch is not installed; it brings the device memory and the reference"
    if not torch.version.cuda:
        return f"PyTorch {torch.__version__} was built without CUDA"
    if not torch.cuda.is_available():
        return "no CUDA device: the driver is absent or lists none"
    return None


def require_device() -> Any:
    """Return the torch module, with a CUDA device. Raises UsageError."""
    if reason := missing_device():
        raise UsageError(reason)
    return importlib.import_module("torch")


def device_environment() -> dict[str, Any]:
    """Return the machine, and the device with its driver, clocks, memory and caches: a JSON object."""
    torch = require_device()
    device = torch.cuda.get_device_properties(0)
    return {
        **environment(),
        "device": device.name,
        "compute_capability": f"{device.major}.{device.minor}",
        "processors": device.multi_processor_count,
        "memory_bytes": device.total_memory,
        "l2_bytes": device.L2_cache_size,
        "cuda": torch.version.cuda,
        "driver_and_clocks": nvidia_smi(),
    }


def capture(calls: Sequence[Callable[[], object]]) -> Captured:
    """Capture one CUDA graph of all `calls`, in order, after one run of each outside the current stream."""
    torch = require_device()
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for call in calls:
            call()
    current.wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return Captured(graph.replay, calls)


def paired_us(graphs: Mapping[str, Captured], replays: int = REPLAYS) -> dict[str, list[float]]:
    """Return microseconds of one call by name, of every replay. Names take turns: pairs share the device's state."""
    torch = require_device()
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(WARM_UPS + replays):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(SLEEP_CYCLES)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= WARM_UPS:
                times[name].append(start.elapsed_time(end) * 1e3 / len(graph.calls))
    return times


def copy_bytes_per_second() -> float:
    """Return bytes read and written a second by the device's own copy, median."""
    torch = require_device()
    size = min(COPY_BYTES, torch.cuda.mem_get_info()[0] // 4)
    source, target = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    times = paired_us({"copy": capture([lambda: target.copy_(source)])})["copy"]
    return float(2 * size / (np.median(times) * 1e-6))
