"""The compiler's figures of each attention kernel, for machines without a GPU to time it.

    make plugins && python -m experiments.kernels.compiled

Registers and spills are those that ptxas reported when the library was built (build/plugins/ptxas). They and the shared
memory of a block limit the blocks that a processor holds at once. These give the bytes of K and V in flight, which hide
the memory's latency. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from redraft.bench.command import run
from redraft.errors import UsageError
from redraft.plugins.library import BUILD, CPU_LIBRARY, DTYPES, AttentionArgs, Kernels
from redraft.plugins.traffic import ELEMENT_BYTES

REPORTS = BUILD / "ptxas"
REGISTERS = 65536
"""Limits of a processor, on every architecture that the kernels are built for."""
SHARED_BYTES = {"sm_80": 164, "sm_86": 100, "sm_89": 100, "sm_90": 228, "sm_100": 228, "sm_120": 100}
"""KiB of shared memory of a processor (CUDA C++ programming guide, compute capabilities)."""
RESERVED_BYTES = 1024
"""Shared memory that the driver keeps of every block."""
WARPS = 4
_KIND = {"Half": "float16", "Bfloat16": "bfloat16", "float": "float32"}
_ENTRY = re.compile(
    r"entry function '\S*?6attendINS_14AttentionShapeI(?:NS_\d+(\w+?)E|(f))Li(\d+)ELi(\d+)ELi(\d+)\S*' for '(sm_\d+)'"
)
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


def main() -> dict[str, Any]:
    """Return one entry for each kernel and architecture. Raises UsageError if nothing was built."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reports", type=Path, default=REPORTS, help="folder that `make plugins` wrote")
    options = parser.parse_args()
    paths = sorted(options.reports.glob("attend_*.txt"), key=lambda path: path.stat().st_mtime_ns)
    if not paths:
        raise UsageError(f"no compiler reports in {options.reports}", "build the kernels with `make plugins`")
    kernels = Kernels(BUILD / CPU_LIBRARY)
    return {"kernels": [described(kernels, found) for found in newest(path.read_text() for path in paths)]}


def newest(reports: Iterable[str]) -> list[dict[str, Any]]:
    """Return each kernel and architecture once, from the last of `reports`: an earlier build may have left files."""
    keys = ("dtype", "head_dim", "rows", "architecture")
    entries = {tuple(found[key] for key in keys): found for report in reports for found in parse(report)}
    return [entries[key] for key in sorted(entries)]


def parse(report: str) -> Iterator[dict[str, Any]]:
    """Yield type, head size, query rows, architecture, registers and spilled bytes of each attention kernel."""
    lines = iter(report.splitlines())
    for line in lines:
        if entry := _ENTRY.search(line):
            kind, single, head_dim, row_warps, row_tiles, architecture = entry.groups()
            spills = next(found for found in map(_SPILLS.search, lines) if found)
            registers = next(found for found in map(_REGISTERS.search, lines) if found)
            yield {
                "dtype": _KIND["float" if single else kind],
                "head_dim": int(head_dim),
                "rows": 16 * int(row_warps) * int(row_tiles),
                "architecture": architecture,
                "registers": int(registers[1]),
                "spilled_bytes": int(spills[1]) + int(spills[2]),
            }


def described(kernels: Kernels, found: dict[str, Any]) -> dict[str, Any]:
    """Return a parsed entry with the tile's sizes and the blocks that a processor holds at once."""
    args = AttentionArgs(
        dtype=DTYPES[found["dtype"]], batch=1, nodes=found["rows"], q_heads=1, kv_heads=1, head_dim=found["head_dim"],
        capacity=4096, scale=1.0,
    )  # fmt: skip
    plan = kernels.plan(args)
    blocks = resident_blocks(found["registers"], plan.shared_bytes, found["architecture"])
    tile_bytes = 2 * plan.tile * found["head_dim"] * ELEMENT_BYTES[found["dtype"]]
    sizes = {"tile": plan.tile, "shared_bytes": plan.shared_bytes}
    return {**found, **sizes, "blocks": blocks, "bytes_under_way": blocks * tile_bytes}


def resident_blocks(registers: int, shared_bytes: int, architecture: str) -> int:
    """Return the blocks that a processor holds at once. Registers are allocated in units of 256 a warp."""
    by_registers = REGISTERS // (WARPS * -(-registers * 32 // 256) * 256)
    by_memory = SHARED_BYTES[architecture] * 1024 // (shared_bytes + RESERVED_BYTES)
    return min(by_registers, by_memory)


if __name__ == "__main__":
    run(main)
