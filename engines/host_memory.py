"""Estimate the host memory of a graph's weights, and refuse a graph that does not fit."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator

from redraft.cgroups import ROOT, group_folders, read_text
from redraft.engines.bundle import Bundle
from redraft.errors import BackendError

MEMINFO = ROOT / "proc/meminfo"
_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Limit, use, and the entry of memory.stat for inactive pages of files, of versions 2 and 1."""
_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB$", re.MULTILINE)
_ENTRY = re.compile(rb"\x0a.(location|offset|length)\x12(.)([\w./-]+)", re.DOTALL)
"""Protobuf's form of an entry of a tensor's `external_data`: field 1, the key; field 2, its size, a name or digits."""
_WIDENED = {"fp16": 2}
"""ONNX Runtime's CPU kernels compute in fp32, so it holds fp32 copies of other floating-point weights."""
_GIB = 1 << 30


def graph_bytes(bundle: Bundle, graph: str) -> int:
    """Return the bytes of a graph's file and of its external weights, those of two tensors over the same bytes once."""
    data = (bundle.path / bundle.graph(graph).file).read_bytes()
    tensors: list[dict[bytes, bytes]] = []
    for key, size, value in _ENTRY.findall(data):
        if key == b"location":
            tensors.append({})
        tensors[-1][key] = value[: ord(size)]
    places = {tuple(sorted(entry.items())) for entry in tensors}
    return len(data) + sum(int(dict(place)[b"length"]) for place in places)


def check_host_memory(bundle: Bundle, graph: str) -> None:
    """Raise BackendError if the graph's weights need more memory than the host has, which would end the process."""
    available = available_bytes()
    stored = graph_bytes(bundle, graph)
    needed = stored * _WIDENED.get(bundle.manifest.precision, 1)
    if available is not None and needed > available:
        widened = f", {stored / _GIB:.1f} in {bundle.manifest.precision}" if needed != stored else ""
        raise BackendError(
            f"the weights of {graph} take {needed / _GIB:.1f} GiB of memory{widened}; {available / _GIB:.1f} are free",
            "build with --precision int8 or int4, or free memory",
        )


def available_bytes() -> int | None:
    """Return the bytes that this process can get without swapping, or None if the system does not report them.

    The least of free memory, of what control groups leave, and of the address space that `ulimit -v` leaves.
    """
    return min((*_free(), *_left_in_groups(), *_left_of_address_space()), default=None)


def _free() -> Iterator[int]:
    if found := _AVAILABLE.search(read_text(MEMINFO)):
        yield int(found[1]) * 1024


def _left_in_groups() -> Iterator[int]:
    """Yield what each control group leaves. Pages of files count as used there, but inactive ones are given up."""
    for folder in group_folders("memory", ROOT):
        for limit, used, inactive in _GROUP_FILES:
            most, now = read_text(folder / limit), read_text(folder / used)
            if most.isdecimal() and now.isdecimal():
                pages = re.search(rf"^{inactive} (\d+)$", read_text(folder / "memory.stat"), re.MULTILINE)
                yield max(0, int(most) - int(now) + (int(pages[1]) if pages else 0))


def _left_of_address_space() -> Iterator[int]:
    limit, size = resource.getrlimit(resource.RLIMIT_AS)[0], read_text(ROOT / "proc/self/statm").split()
    if limit != resource.RLIM_INFINITY and size:
        yield max(0, limit - int(size[0]) * resource.getpagesize())
