"""Detection of new memory, and requests for large pages that keep its content."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from redraft.engines.host_device import aligned_zeros
from redraft.engines.host_memory import LARGE_PAGE_BYTES, _added, _anonymous, huge_pages


def spans(pages: set[int]) -> list[tuple[int, int]]:
    """Ranges that cover exactly these pages."""
    starts = sorted(page for page in pages if page - 1 not in pages)
    return [(s, next(e for e in itertools.count(s) if e not in pages)) for s in starts]


@pytest.mark.parametrize("seed", range(50))
def test_added_is_the_set_difference(seed):
    generator = np.random.default_rng(seed)
    before, after = ({int(p) for p in np.flatnonzero(generator.random(24) < 0.6)} for _ in range(2))
    found = [page for begin, end in _added(spans(after), spans(before)) for page in range(begin, end)]
    assert found == sorted(after - before)


def test_memory_of_this_process_is_listed_in_order():
    listed = _anonymous()
    array = np.ones(1 << 22, np.uint8)
    assert any(low <= array.ctypes.data < high for low, high in _anonymous())
    assert listed == sorted(listed)


def test_content_survives():
    expected = np.random.default_rng(0).integers(0, 255, 9 << 20, np.uint8)
    with huge_pages():
        array = aligned_zeros(expected.shape, expected.dtype, LARGE_PAGE_BYTES)
        assert array.ctypes.data % LARGE_PAGE_BYTES == 0
        assert not array.any()
        array[:] = expected
    np.testing.assert_array_equal(array, expected)
