"""The host's memory: the bytes that are available, and large pages for an engine's weights.

A step of one token reads every weight once, so memory bounds its speed. With pages of 4 KiB, the processor looks up a
page for every 64 cache lines. Linux (6.1 and newer) collapses memory that is already filled into pages of 2 MiB on
request (madvise(2), MADV_COLLAPSE). On other systems, or if the kernel declines, nothing changes.
"""

from __future__ import annotations

import ctypes
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from redraft.cgroups import ROOT, group_folders, read_text

LARGE_PAGE_BYTES = 2 << 20
_MADV_DONTNEED, _MADV_HUGEPAGE, _MADV_NOHUGEPAGE, _MADV_COLLAPSE = 4, 14, 15, 25
_SMALLEST_REQUEST = 8 * LARGE_PAGE_BYTES
_MAPS = Path("/proc/self/maps")
_ANONYMOUS = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ 00:00 0 *(?:\[heap\])?$", re.MULTILINE)

Span = tuple[int, int]


@contextmanager
def huge_pages() -> Iterator[None]:
    """Give large pages to private memory that is allocated and filled within the context."""
    before = _anonymous()
    yield
    for span in _added(_anonymous(), before):
        _collapse(span)


def give_back(array: NDArray[Any]) -> None:
    """Give the memory of an array's whole pages back to the machine. Its elements are then zero, or as before.

    The array is C-contiguous, in private memory.
    """
    _advise(array, _MADV_DONTNEED)


def use_small_pages(array: NDArray[Any]) -> None:
    """Let an array that nobody has written yet take memory in small pages, so that it takes what is used."""
    _advise(array, _MADV_NOHUGEPAGE)


def _advise(array: NDArray[Any], advice: int) -> None:
    page, first = resource.getpagesize(), int(array.ctypes.data)
    begin, end = -(-first // page) * page, (first + array.nbytes) // page * page
    if sys.platform.startswith("linux") and begin < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)


def _anonymous() -> list[Span]:
    """Return this process's private writable memory as sorted address ranges, empty if the system lists none."""
    if not sys.platform.startswith("linux") or not _MAPS.exists():
        return []
    return [(int(low, 16), int(high, 16)) for low, high in _ANONYMOUS.findall(_MAPS.read_text())]


def _added(after: list[Span], before: list[Span]) -> Iterator[Span]:
    """Return the parts of `after` that are not in `before`, both sorted and without overlaps."""
    old = iter([*before, (sys.maxsize, sys.maxsize)])
    low, high = next(old)
    for begin, end in after:
        while begin < end:
            while high <= begin:
                low, high = next(old)
            if begin < low:
                yield begin, min(end, low)
            begin = min(end, high)


def _collapse(span: Span) -> None:
    begin, end = -(-span[0] // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES, span[1] // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES
    if begin >= end:
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise(begin, end - begin, _MADV_HUGEPAGE)
    # Each request interrupts all processors. A page that declines ends the rest of its request, so these are halved.
    waiting = [(begin, end)]
    while waiting:
        begin, end = waiting.pop()
        if madvise(begin, end - begin, _MADV_COLLAPSE) and end - begin > _SMALLEST_REQUEST:
            middle = begin + (end - begin) // 2 // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES
            waiting += [(middle, end), (begin, middle)]


MEMINFO = ROOT / "proc/meminfo"
_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Limit, use, and the entry of memory.stat for inactive pages of files, of versions 2 and 1."""
_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB$", re.MULTILINE)


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
