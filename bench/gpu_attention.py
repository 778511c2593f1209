"""The attention kernels on a GPU against PyTorch, FlashInfer and the device's own copy.

    python -m redraft.bench.gpu_attention [--quick] [--out build/gpu/attention.json]

Every time is of a call inside a CUDA graph over caches that are not in the device's L2, in turns with what it is
compared with. `share_of_copy` is the least bytes of the call a second (redraft.plugins.traffic) over what the
device's copy moves. SDPA's rows are in its cache already; ours are written in the same call. One JSON object.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from redraft.bench.command import run
from redraft.bench.gpu_device import (
    copy_bytes_per_second,
    device_environment,
    paired_us,
    require_device,
)
from redraft.bench.gpu_problem import DeviceProblem
from redraft.bench.statistics import median_estimate
from redraft.errors import RedraftError
from redraft.plugins.library import DTYPES, HEAD_DIMS, CompactArgs, Kernels, open_kernels
from redraft.plugins.traffic import AttentionSizes, attention_bytes, attention_flops, compaction_bytes

HEADS = ((32, 32), (32, 8))
BATCHES = (1, 4, 16)
LENGTHS = (1024, 4096, 16384)
NODES = (1, 16, 64)
QUICK = ((1, 4), (1024, 16384), (1, 64))
LARGEST_ERROR = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-5}
LAYERS = 32


def main() -> dict[str, Any]:
    """Measure and return everything; without a device say why and measure nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the corners of the grid only")
    parser.add_argument("--check", action="store_true", help="small calls against the reference, nothing timed")
    parser.add_argument("--ctas", type=int, default=0, help="blocks of the attention kernel; 0 chooses")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    try:
        found = measure(options)
    except RedraftError as error:
        found = {"skipped": str(error)}
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=2) + "\n")
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All sections of the report. Raises RedraftError where there is no device or no library of kernels."""
    require_device()
    kernels = open_kernels()
    found: dict[str, Any] = {"environment": device_environment(), "checks": checks(kernels)}
    if options.check:
        return found
    copy = copy_bytes_per_second()
    batches, lengths, nodes = QUICK if options.quick else (BATCHES, LENGTHS, NODES)
    grid = product(("float16", "bfloat16"), HEADS, batches, lengths, nodes)
    sizes = [AttentionSizes(dtype, b, live, t, *heads, 128) for dtype, heads, b, live, t in grid]
    attention = [timed(kernels, each, copy, options.ctas) for each in sizes]
    return {**found, "copy_gb_per_second": copy / 1e9, "attention": attention, "compaction": compaction(kernels, copy)}


def checks(kernels: Kernels, device: str = "cuda", live: int = 517) -> list[dict[str, Any]]:
    """Largest error of small calls in every type and head size, poisoned rows behind them. Raises RedraftError."""
    found = []
    for dtype, head_dim, (nodes, heads) in product(DTYPES, HEAD_DIMS, ((1, (2, 2)), (13, (8, 2)), (64, (2, 2)))):
        problem = DeviceProblem(AttentionSizes(dtype, 3, live, nodes, *heads, head_dim), device=device)
        problem.ours(kernels)()
        expected = problem.reference()
        error = float((problem.out.float() - expected).abs().max() / expected.abs().max())
        if not error < LARGEST_ERROR[dtype]:
            raise RedraftError(f"{dtype}, head size {head_dim}, {nodes} nodes: error {error}, expected less")
        found.append({"dtype": dtype, "head_dim": head_dim, "nodes": nodes, "error": error})
    return found


def timed(kernels: Kernels, sizes: AttentionSizes, copy: float, ctas: int) -> dict[str, Any]:
    """Times of one problem by every way to solve it."""
    torch = require_device()
    torch.cuda.empty_cache()
    least = attention_bytes(sizes)
    count = max(1, -(-4 * torch.cuda.get_device_properties(0).L2_cache_size // least))
    problems = [DeviceProblem(sizes, seed) for seed in range(min(count, 64))]
    captures = {"ours": [p.ours(kernels, ctas) for p in problems], "sdpa": [p.sdpa() for p in problems]}
    skipped = {}
    try:
        captures["flashinfer"] = [p.flashinfer() for p in problems]
    except (ImportError, ValueError) as error:
        skipped["flashinfer"] = str(error)
    times = paired_us(captures)
    ours = float(np.median(times["ours"]))
    return {
        **vars(sizes),
        "us": {name: float(np.median(values)) for name, values in times.items()},
        "speedup": {name: _ratio(values, times["ours"]) for name, values in times.items() if name != "ours"},
        "skipped": skipped,
        "gb_per_second": least / ours / 1e3,
        "share_of_copy": least / (ours * 1e-6) / copy,
        "tflops": attention_flops(sizes) / ours / 1e6,
    }


def compaction(kernels: Kernels, copy: float) -> list[dict[str, Any]]:
    """Compaction of all layers of a 7B model in one launch, by the length of the path."""
    torch = require_device()
    found = []
    for batch, (kv_heads, path) in product((1, 16), ((32, 4), (32, 8), (8, 4))):
        caches = [torch.zeros(batch, kv_heads, 512, 128, dtype=torch.float16, device="cuda") for _ in range(2 * LAYERS)]
        pointers = torch.tensor([cache.data_ptr() for cache in caches], device="cuda")
        past_len = torch.full((batch,), 400, device="cuda")
        paths = (2 * torch.arange(1, path + 1, device="cuda")).repeat(batch, 1)
        lengths = torch.full((batch,), path, device="cuda")
        args = CompactArgs(
            dtype=0, cache_count=2 * LAYERS, batch=batch, kv_heads=kv_heads, head_dim=128, capacity=512, max_path=path,
            caches=pointers.data_ptr(), past_len=past_len.data_ptr(), paths=paths.data_ptr(),
            path_lengths=lengths.data_ptr(),
        )  # fmt: skip
        calls = [lambda args=args: kernels.compact(args, torch.cuda.current_stream().cuda_stream)] * 20
        us = float(np.median(paired_us({"compact": calls})["compact"]))
        least = compaction_bytes(2 * LAYERS, batch, kv_heads, 256, path)
        found.append({"layers": LAYERS, "batch": batch, "kv_heads": kv_heads, "path": path, "us": us,
                      "share_of_copy": least / (us * 1e-6) / copy})  # fmt: skip
    return found


def _ratio(theirs: list[float], ours: list[float]) -> dict[str, float]:
    estimate = median_estimate([a / b for a, b in zip(theirs, ours, strict=True)])
    return {"median": estimate.median, "low": estimate.low, "high": estimate.high}


if __name__ == "__main__":
    run(main)
