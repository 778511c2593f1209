"""Estimate the host memory of a graph's weights, and refuse a graph that does not fit."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from redraft.engines.bundle import Bundle
from redraft.errors import BackendError

MEMINFO = Path("/proc/meminfo")
_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB$", re.MULTILINE)
_LENGTH = re.compile(rb"\x0a\x06length\x12.([0-9]+)", re.DOTALL)
"""Protobuf's form of an entry of a tensor's `external_data`: field 1, the key; field 2, digits."""
_WIDENED = {"fp16": 2}
"""ONNX Runtime's CPU kernels compute in fp32, so it holds fp32 copies of other floating-point weights."""
_GIB = 1 << 30


def graph_bytes(bundle: Bundle, graph: str) -> int:
    """Return the bytes of a graph's file and of its external weights."""
    data = (bundle.path / bundle.graph(graph).file).read_bytes()
    return len(data) + sum(int(length) for length in _LENGTH.findall(data))


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
    """Return the bytes that Linux can give without swapping, or None if the system does not report them."""
    with contextlib.suppress(OSError):
        if found := _AVAILABLE.search(MEMINFO.read_text()):
            return int(found[1]) * 1024
    return None
