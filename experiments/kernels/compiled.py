"""The compiler's figures of each attention kernel, for machines without a GPU to time it.

    make plugins && python -m experiments.kernels.compiled

Registers and spills are those that ptxas reported when the library was built (build/plugins/ptxas). They and the shared
memory of a block limit the blocks that a processor holds at once. These give the bytes of K and V in flight, which hide
the memory's latency. Where cuobjdump and nvdisasm are found (nvcc's folder; packages nvidia-cuda-cuobjdump and
nvidia-cuda-nvdisasm), `instructions` counts the machine code's accesses of memory by width, and its products.
`sources` is a digest of the kernels' sources, so that an old report is noticed. Prints one JSON object.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from tests.plugins.cmake import sources_digest

from experiments.kernels.floors import ELEMENT_BYTES
from redraft.bench.command import run
from redraft.errors import UsageError
from redraft.plugins.library import BUILD, CPU_LIBRARY, CUDA_LIBRARY, DTYPES, AttentionArgs, Kernels

REGISTERS = 65536
"""Limits of a processor, on every architecture that the kernels are built for."""
SHARED_BYTES = {"sm_80": 164, "sm_86": 100, "sm_89": 100, "sm_90": 228, "sm_100": 228, "sm_120": 100}
"""KiB of shared memory of a processor (CUDA C++ programming guide, compute capabilities)."""
RESERVED_BYTES = 1024
"""Shared memory that the driver keeps of every block."""
WARPS = 4
_KIND = {"Half": "float16", "Bfloat16": "bfloat16", None: "float32"}
_NAME = r"\S*?6attendINS_14AttentionShapeI(?:NS_\d+(\w+?)E|f)Li(\d+)ELi(\d+)"
_ENTRY = re.compile(
    rf"entry function '{_NAME}\S*' for '(sm_\d+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?"
    r"Used (\d+) registers",
    re.DOTALL,
)
_FUNCTION = re.compile(rf"Function : (?:{_NAME}\S*|\S+)")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+ )?(LDGSTS|LDG|STG|LDL|STL|LDSM|HMMA)\.?([\w.]*)")
_WIDTH = re.compile(r"(?:^|\.)[US]?(8|16|64|128)$")

Key = tuple[str, int, int, str]
"""Element type, head size, query rows, architecture."""


def main() -> dict[str, Any]:
    """Return one entry for each kernel and architecture. Raises UsageError if nothing was built."""
    folder = BUILD / "ptxas"
    paths = sorted(folder.glob("attend_*.txt"), key=lambda path: path.stat().st_mtime_ns)
    if not paths:
        raise UsageError(f"no compiler reports in {folder}", "build the kernels with `make plugins`")
    kernels = Kernels(BUILD / CPU_LIBRARY)
    compiled = {key: figures for path in paths for key, figures in parse(path.read_text())}  # the newest report counts
    code = instructions(_disassembled({key[3] for key in compiled}))
    entries = [
        {**described(kernels, key, figures), "instructions": code.get(key)} for key, figures in sorted(compiled.items())
    ]
    return {"sources": sources_digest(BUILD.parents[1]), "kernels": entries}


def _key(kind: str | None, head_dim: str, row_warps: str, architecture: str) -> Key:
    return _KIND[kind], int(head_dim), 16 * int(row_warps), architecture


def parse(report: str) -> Iterator[tuple[Key, tuple[int, int]]]:
    """Yield registers and spilled bytes of each attention kernel in a report of ptxas."""
    for *identity, stored, loaded, registers in _ENTRY.findall(report):
        yield _key(identity[0] or None, *identity[1:]), (int(registers), int(stored) + int(loaded))


def _disassembled(architectures: Iterable[str]) -> str:
    """Return the library's machine code of the architectures as text, or nothing without the tools."""
    if not (shutil.which("cuobjdump") and shutil.which("nvdisasm")):
        return ""
    command = ["cuobjdump", "-sass", "-arch"]
    return "".join(
        subprocess.run([*command, each, str(BUILD / CUDA_LIBRARY)], check=True, capture_output=True, text=True).stdout
        for each in sorted(architectures)
    )


def instructions(text: str) -> dict[Key, dict[str, int]]:
    """Return counts by instruction and width in bytes for each attention kernel in cuobjdump's text."""
    counts: dict[Key, Counter[str]] = {}
    architecture, found = "", Counter[str]()
    for line in text.splitlines():
        if "code for sm_" in line:
            architecture = line.split()[-1]
        elif entry := _FUNCTION.search(line):
            found = Counter()
            if entry[2]:
                counts[_key(*entry.groups(), architecture)] = found
        elif entry := _INSTRUCTION.search(line):
            width = _WIDTH.search(entry[2])
            found[entry[1] if entry[1] in ("HMMA", "LDSM") else f"{entry[1]} {int(width[1]) // 8 if width else 4}"] += 1
    return {key: dict(sorted(found.items())) for key, found in counts.items()}


def described(kernels: Kernels, key: Key, figures: tuple[int, int]) -> dict[str, Any]:
    """Return an entry with the tile's sizes and the blocks that a processor holds at once."""
    (dtype, head_dim, rows, architecture), (registers, spilled) = key, figures
    args = AttentionArgs(
        dtype=DTYPES[dtype], batch=1, nodes=rows, q_heads=1, kv_heads=1, head_dim=head_dim, capacity=4096, scale=1.0
    )
    plan = kernels.plan(args)
    by_registers = REGISTERS // (WARPS * -(-registers * 32 // 256) * 256)  # in units of 256 a warp
    by_memory = SHARED_BYTES[architecture] * 1024 // (plan.shared_bytes + RESERVED_BYTES)
    blocks = min(by_registers, by_memory)
    tile_bytes = 2 * plan.tile * head_dim * ELEMENT_BYTES[dtype]
    return {
        "dtype": dtype, "head_dim": head_dim, "rows": rows, "architecture": architecture, "registers": registers,
        "spilled_bytes": spilled, "tile": plan.tile, "shared_bytes": plan.shared_bytes, "blocks": blocks,
        "bytes_under_way": blocks * tile_bytes,
    }  # fmt: skip


if __name__ == "__main__":
    run(main)
