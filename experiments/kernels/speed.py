"""The attention kernels on a GPU against PyTorch and the device's own copy.

    python -m experiments.kernels.speed [--quick | --check] [--out build/gpu/attention.json]

Every time is of a call inside a CUDA graph over caches outside the device's L2, in turns with its competitors.
`share_of_copy` is the least bytes of the call a second (experiments.kernels.floors) over the speed of the device's
copy. PyTorch's rows are in its cache already; our call writes ours. Answers are compared with float32 before they are
timed. Writes one JSON object to --out after every size. Without a device or a library it gives the reason. A wrong
answer or a failed launch ends with an error after the earlier results.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.plugins.checks import checks
from tests.plugins.devices import Captured, capture, missing_device

from experiments.kernels.floors import AttentionSizes, attention_bytes, attention_flops, compaction_bytes
from experiments.kernels.problems import AttentionProblem, Call, CompactionProblem, Way
from redraft.bench.command import Sections, reason_of, run
from redraft.bench.environment import environment, nvidia_smi
from redraft.bench.statistics import CONFIDENCE, FEWEST_VALUES, RESAMPLES
from redraft.errors import KernelError
from redraft.plugins.library import Kernels, missing_kernels, open_kernels

LARGEST_ERROR = {"float16": 4e-3, "bfloat16": 3e-2}
"""The allowed error of a timed problem, relative to the largest value."""
HEADS = ((32, 32), (32, 8))
BATCHES = (1, 4, 16)
LENGTHS = (1024, 4096, 16384, 32768)
NODES = (1, 16, 64)
QUICK = ((1, 4), (1024, 16384), (1, 64))
LAYERS = 32
COMPACTIONS = ((32, 4), (32, 8), (8, 4))
"""Key heads and length of the path. One sequence is the important case: its target is under 10 µs."""
MOST_PROBLEMS = 64
MEMORY_SHARE = 0.4
"""Share of the device's free memory for problems of one size."""
COPY_BYTES = 256 << 20
"""Size of a block. On an H200 a CUDA graph copies blocks of 1 GiB at two thirds of its speed (2716 of 4250 GB/s)."""
REPLAYS, WARM_UPS = 30, 3
SLEEP_CYCLES = 2_000_000
"""About a millisecond of the device, in which the host sends it the events and the graph: a launch is not timed."""


def main() -> dict[str, Any]:
    """Measure and return everything; without a device or a library return the reason and measure nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the corners of the grid only")
    parser.add_argument("--check", action="store_true", help="small calls against the reference, nothing timed")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    return Sections(options.out).fill(lambda report: measure(options, report))


def measure(options: argparse.Namespace, report: Sections) -> None:
    """Measure all sections of the report. Raises KernelError for a library that fails or gives a wrong answer."""
    if reason := missing_device() or missing_kernels():
        report.put("skipped", reason)
        return
    kernels = open_kernels()
    if kernels.on_cpu:
        raise KernelError("expected a library of kernels for the GPU, found the CPU build")
    report.put("environment", device_environment())
    for entry in checks(kernels):
        report.add("checks", entry)
    if options.check:
        return
    copy = copy_bytes_per_second()
    report.put("copy_gb_per_second", copy / 1e9)
    batches, lengths, nodes = QUICK if options.quick else (BATCHES, LENGTHS, NODES)
    for dtype, heads, batch, kv_len, t in product(("float16", "bfloat16"), HEADS, batches, lengths, nodes):
        sizes = AttentionSizes(dtype, batch, kv_len, t, *heads, 128)
        report.add("attention", unless_out_of_memory(vars(sizes), partial(timed, kernels, sizes, copy)))
    for batch, (kv_heads, path) in product((1, 16), COMPACTIONS):
        compaction = {"layers": LAYERS, "batch": batch, "kv_heads": kv_heads, "path": path}
        report.add("compaction", unless_out_of_memory(compaction, partial(compacted, kernels, compaction, copy)))


def device_environment() -> dict[str, Any]:
    """Return the machine, and the device with its driver, clocks, memory and caches: a JSON object."""
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


def unless_out_of_memory(sizes: dict[str, Any], measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return `sizes` with its measurements, or the reason if the device's memory is too small."""
    try:
        return {**sizes, **measured()}
    except torch.OutOfMemoryError as error:
        return {**sizes, "skipped": reason_of(error)}
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def timed(kernels: Kernels, sizes: AttentionSizes, copy: float) -> dict[str, Any]:
    """Return times of one problem by every way to solve it."""
    least = attention_bytes(sizes)
    problems = [AttentionProblem(sizes, seed) for seed in range(problems_for(least))]
    graphs = {"ours": capture([problem.ours(kernels) for problem in problems])}
    error = problems[0].error(problems[0].out)
    if not error < LARGEST_ERROR[sizes.dtype]:
        raise KernelError(f"{sizes}: error {error}, expected less than {LARGEST_ERROR[sizes.dtype]}")
    skipped = {}
    for name in problems[0].pytorchs_ways():
        try:
            graphs[name] = capture(_right_calls(problems, [one.pytorchs_ways()[name]() for one in problems]))
        except Exception as failure:  # noqa: BLE001 any error of another library
            skipped[name] = reason_of(failure)
    times = paired_us(graphs)
    ours = float(np.median(times["ours"]))
    us = {name: float(np.median(values)) for name, values in times.items()}
    others = [name for name in us if name != "ours"]
    return {
        "problems": len(problems),
        "error": error,
        "us": us,
        "best": {"sdpa": min(others, key=us.__getitem__, default=None)},
        "speedup": {name: _ratio(times[name], times["ours"]) for name in others},
        "skipped": skipped,
        "gb_per_second": least / ours / 1e3,
        "share_of_copy": least / (ours * 1e-6) / copy,
        "tflops": attention_flops(sizes) / ours / 1e6,
    }


def _right_calls(problems: list[AttentionProblem], ways: list[Way]) -> list[Call]:
    call, answer = ways[0]
    error, most = problems[0].error(answer(call())), LARGEST_ERROR[problems[0].sizes.dtype]
    if not error < most:
        raise ValueError(f"its answer is off by {error}, expected less than {most}")
    return [call for call, _ in ways]


def problems_for(least: int) -> int:
    """Return the number of problems of `least` bytes that exceed the L2 four times but not the device's memory."""
    wanted = -(-4 * int(torch.cuda.get_device_properties(0).L2_cache_size) // least)
    return max(1, min(wanted, MOST_PROBLEMS, int(MEMORY_SHARE * int(torch.cuda.mem_get_info()[0])) // least))


def compacted(kernels: Kernels, sizes: dict[str, int], copy: float) -> dict[str, Any]:
    """Time compaction of all layers in one launch, over caches outside the L2 and over one set inside it."""
    caches = 2 * sizes["layers"]
    least = compaction_bytes(caches, sizes["batch"], sizes["kv_heads"], 256, sizes["path"])
    problem = partial(CompactionProblem, caches, sizes["batch"], sizes["kv_heads"], sizes["path"])
    first = problem()
    first.ours(kernels)()
    if not first.right():
        raise KernelError(f"compaction of {sizes}: expected the accepted rows in order, found others")
    held = sum(cache.nbytes for cache in first.caches)
    wanted = -(-2 * torch.cuda.get_device_properties(0).L2_cache_size // least)
    count = max(2, min(wanted, int(MEMORY_SHARE * torch.cuda.mem_get_info()[0]) // held))
    sets = [first, *(problem() for _ in range(count - 1))]
    cold = capture([each.ours(kernels) for each in sets])
    times = paired_us({"cold": cold, "warm": capture([first.ours(kernels)] * len(sets))})
    us = {name: float(np.median(values)) for name, values in times.items()}
    share = least / (us["cold"] * 1e-6) / copy
    return {"sets": count, "cold_beyond_l2": count >= wanted, "us": us, "share_of_copy": share}


def paired_us(graphs: Mapping[str, Captured], replays: int = REPLAYS) -> dict[str, list[float]]:
    """Return microseconds of one call by name, of every replay. Names take turns: pairs share the device's state."""
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
    size = min(COPY_BYTES, torch.cuda.mem_get_info()[0] // 4)
    source, target = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    times = paired_us({"copy": capture([lambda: target.copy_(source)])})["copy"]
    return float(2 * size / (np.median(times) * 1e-6))


def _ratio(theirs: list[float], ours: list[float]) -> dict[str, float | None]:
    """Return the median ratio with its percentile-bootstrap interval, which too few values do not have."""
    ratios = np.array(theirs) / np.array(ours)
    low, high = None, None
    if len(ratios) >= FEWEST_VALUES:
        drawn = np.random.default_rng(0).integers(0, len(ratios), (RESAMPLES, len(ratios)))
        tail = (1 - CONFIDENCE) / 2
        low, high = np.quantile(np.median(ratios[drawn], axis=1), (tail, 1 - tail)).tolist()
    return {"median": float(np.median(ratios)), "low": low, "high": high}


if __name__ == "__main__":
    run(main)
