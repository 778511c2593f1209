"""Weights that do not fit in the host's memory are refused before they are loaded. Large pages keep their content."""

from __future__ import annotations

import itertools
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from redraft import names
from redraft.engines import host_memory, open_calls
from redraft.engines.bundle import Bundle, open_bundle
from redraft.engines.host_device import aligned_zeros
from redraft.engines.host_memory import (
    LARGE_PAGE_BYTES,
    _added,
    _anonymous,
    available_bytes,
    give_back,
    huge_pages,
    use_small_pages,
)
from redraft.errors import BackendError


@pytest.fixture
def bundle(lyanna_bundle: Path) -> Bundle:
    return open_bundle(lyanna_bundle, verify=False)


def has(patch: pytest.MonkeyPatch, folder: Path, size: int) -> None:
    """Set the number of available bytes."""
    file = folder / "meminfo"
    file.write_text(f"MemTotal:  99999999 kB\nMemAvailable:   {size // 1024} kB\nBuffers: 1 kB\n")
    patch.setattr(host_memory, "MEMINFO", file)


def test_a_graphs_weights_are_those_that_it_names(bundle: Bundle) -> None:
    path = bundle.path / bundle.graph(names.VERIFIER).file
    lengths = [
        int(entry.value)
        for tensor in onnx.load(path, load_external_data=False).graph.initializer
        for entry in tensor.external_data
        if entry.key == "length"
    ]
    assert len(lengths) > 5
    assert bundle.graph_bytes(names.VERIFIER) == path.stat().st_size + sum(lengths)


@pytest.mark.parametrize(("precision", "copies"), [("fp32", 1), ("fp16", 2)])
def test_more_than_there_is_is_refused_in_one_line(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, copies: int
) -> None:
    needed = copies * bundle.graph_bytes(names.VERIFIER)
    bundle = Bundle(bundle.path, replace(bundle.manifest, precision=precision))  # type: ignore[arg-type]
    has(monkeypatch, tmp_path, needed + 1024)
    open_calls(bundle, threads=1)
    has(monkeypatch, tmp_path, needed - 1024)
    with pytest.raises(BackendError, match=r"the weights of verifier take .* are free; build with") as error:
        open_calls(bundle, threads=1)
    assert "\n" not in str(error.value)
    assert (", 0.0 in fp16" in str(error.value)) == (precision == "fp16")


def test_without_known_memory_nothing_is_refused(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in (None, "MemTotal: 1 kB\n"):
        if text:
            (tmp_path / "none").write_text(text)
        monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "none")
        monkeypatch.setattr(host_memory, "ROOT", tmp_path)
        assert available_bytes() is None
        open_calls(bundle, threads=1)


def test_control_groups_and_the_address_space_limit_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inactive pages of files count as used, but can be given up."""
    has(monkeypatch, tmp_path, 10 << 30)
    monkeypatch.setattr(host_memory, "ROOT", tmp_path)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/a\n")
    (tmp_path / "proc/self/mountinfo").write_text("30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    group = tmp_path / "sys/fs/cgroup/a"
    group.mkdir(parents=True)
    for name, text in {"max": "max", "current": "5", "stat": "anon 1\ninactive_file 4096\n"}.items():
        (group / f"memory.{name}").write_text(text)
    assert available_bytes() == 10 << 30
    (group / "memory.max").write_text("1000000\n")
    assert available_bytes() == 1000000 - 5 + 4096
    (tmp_path / "proc/self/statm").write_text("10 9 8\n")
    monkeypatch.setattr(host_memory.resource, "getrlimit", lambda kind: (100_000, -1))
    assert available_bytes() == 100_000 - 10 * host_memory.resource.getpagesize()


def test_this_machine_reports_its_memory() -> None:
    if not host_memory.MEMINFO.exists():
        pytest.skip("no /proc/meminfo here")
    assert (available_bytes() or 0) > 1 << 20


def spans(pages: set[int]) -> list[tuple[int, int]]:
    """Ranges that cover exactly these pages."""
    starts = sorted(page for page in pages if page - 1 not in pages)
    return [(s, next(e for e in itertools.count(s) if e not in pages)) for s in starts]


def test_added_is_the_set_difference() -> None:
    generator = np.random.default_rng(0)
    for _ in range(20):
        before, after = ({int(p) for p in np.flatnonzero(generator.random(24) < 0.6)} for _ in range(2))
        found = [page for begin, end in _added(spans(after), spans(before)) for page in range(begin, end)]
        assert found == sorted(after - before)


def test_memory_of_this_process_is_listed_in_order() -> None:
    listed = _anonymous()
    array = np.ones(1 << 22, np.uint8)
    assert any(low <= array.ctypes.data < high for low, high in _anonymous())
    assert listed == sorted(listed)


def test_content_survives() -> None:
    expected = np.random.default_rng(0).integers(0, 255, 9 << 20, np.uint8)
    with huge_pages():
        array = aligned_zeros(expected.shape, expected.dtype, LARGE_PAGE_BYTES)
        assert array.ctypes.data % LARGE_PAGE_BYTES == 0
        assert not array.any()
        array[:] = expected
    np.testing.assert_array_equal(array, expected)


MEGABYTE = 1 << 20


def resident() -> int:
    """Return the bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_an_array_in_small_pages_takes_what_is_written() -> None:
    """A byte in every two megabytes. NumPy asks for large pages, which some systems give."""
    array = np.zeros(256 * MEGABYTE, np.uint8)
    use_small_pages(array)
    before = resident()
    array[:: 2 * MEGABYTE] = 1
    assert resident() - before < 8 * MEGABYTE


def test_memory_that_is_given_back_is_free_and_reads_as_zeros() -> None:
    array = np.zeros(64 * MEGABYTE, np.uint8)
    array[:] = 7
    before = resident()
    give_back(array[MEGABYTE:])
    assert before - resident() > 48 * MEGABYTE
    assert array[0] == 7
    assert array[2 * MEGABYTE : -MEGABYTE].max() == 0
