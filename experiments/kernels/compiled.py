"""The compiler's figures of each attention kernel, for machines without a GPU to time it.

    make plugins && python -m experiments.kernels.compiled

Registers and spills are those that ptxas reported when the library was built (build/plugins/ptxas). They and the shared
memory of a block limit the blocks that a processor holds at once. These give the bytes of K and V in flight, which hide
the memory's latency. Where cuobjdump and nvdisasm are found (nvcc's folder; packages nvidia-cuda-cuobjdump and
nvidia-cuda-nvdisasm), `instructions` counts the machine code's accesses of memory by width, and its products.
`sources` is a digest of the kernels' sources, so that an old report is noticed. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from redraft.bench.command import run
from redraft.errors import UsageError
from redraft.plugins.library import BUILD, CPU_LIBRARY, CUDA_LIBRARY, DTYPES, AttentionArgs, Kernels
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
_NAME = r"\S*?6attendINS_14AttentionShapeI(?:NS_\d+(\w+?)E|(f))Li(\d+)ELi(\d+)"
_ENTRY = re.compile(rf"entry function '{_NAME}\S*' for '(sm_\d+)'")
_FUNCTION = re.compile(rf"Function : (?:{_NAME}\S*|\S+)")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+ )?(LDGSTS|LDG|STG|LDL|STL|LDSM|HMMA)\.?([\w.]*)")
_WIDTH = re.compile(r"(?:^|\.)[US]?(8|16|64|128)$")
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
    found = newest(path.read_text() for path in paths)
    code = instructions(_disassembled({entry["architecture"] for entry in found}))
    entries = [described(kernels, entry) for entry in found]
    return {
        "sources": sources_digest(),
        "kernels": [{**entry, "instructions": code.get(_key(entry))} for entry in entries],
    }


def sources_digest() -> str:
    """Return a digest of the sources that the kernels are compiled from."""
    files = sorted((BUILD.parents[1] / "plugins/tree_attention").glob("*.cu*"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _key(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(entry[name] for name in ("dtype", "head_dim", "rows", "architecture"))


def _identity(groups: Iterable[str | None]) -> dict[str, Any]:
    """Return what a mangled name's groups say."""
    kind, single, head_dim, row_warps = groups
    return {
        "dtype": _KIND["float" if single else str(kind)],
        "head_dim": int(head_dim or 0),
        "rows": 16 * int(row_warps or 0),
    }


def _disassembled(architectures: Iterable[str]) -> str:
    """Return the library's machine code of the architectures as text, or nothing without the tools."""
    if not (shutil.which("cuobjdump") and shutil.which("nvdisasm")):
        return ""
    command = ["cuobjdump", "-sass", "-arch"]
    return "".join(
        subprocess.run([*command, each, str(BUILD / CUDA_LIBRARY)], check=True, capture_output=True, text=True).stdout
        for each in sorted(architectures)
    )


def instructions(text: str) -> dict[tuple[Any, ...], dict[str, int]]:
    """Return counts by instruction and width in bytes for each attention kernel in cuobjdump's text."""
    counts: dict[tuple[Any, ...], dict[str, int]] = {}
    architecture, found = "", Counter[str]()
    for line in text.splitlines():
        if "code for sm_" in line:
            architecture = line.split()[-1]
        elif entry := _FUNCTION.search(line):
            found = Counter()
            if entry[3]:
                counts[_key({**_identity(entry.groups()), "architecture": architecture})] = found
        elif entry := _INSTRUCTION.search(line):
            width = _WIDTH.search(entry[2])
            found[entry[1] if entry[1] in ("HMMA", "LDSM") else f"{entry[1]} {int(width[1]) // 8 if width else 4}"] += 1
    return {key: dict(sorted(found.items())) for key, found in counts.items()}


def newest(reports: Iterable[str]) -> list[dict[str, Any]]:
    """Return each kernel and architecture once, from the last of `reports`: an earlier build may have left files."""
    entries = {_key(found): found for report in reports for found in parse(report)}
    return [entries[key] for key in sorted(entries)]


def parse(report: str) -> Iterator[dict[str, Any]]:
    """Yield type, head size, query rows, architecture, registers and spilled bytes of each attention kernel."""
    lines = iter(report.splitlines())
    for line in lines:
        if entry := _ENTRY.search(line):
            *identity, architecture = entry.groups()
            spills = next(found for found in map(_SPILLS.search, lines) if found)
            registers = next(found for found in map(_REGISTERS.search, lines) if found)
            yield {
                **_identity(identity),
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
