"""The cache holds the most recently used values."""

from __future__ import annotations

from redraft.runtime.recent import Recent


def test_the_least_recently_used_value_is_dropped() -> None:
    dropped: list[list[str]] = []
    kept: Recent[str, int] = Recent(2, lambda: dropped.append(list(kept)))
    assert kept.get("a") is None
    assert [kept.add(key, value) for key, value in (("a", 1), ("b", 2))] == [1, 2]
    assert kept.get("a") == 1
    assert kept.add("c", 3) == 3
    assert dropped == [["b", "a"]]  # called before the value is dropped
    assert list(kept) == ["a", "c"]
    assert (kept.get("b"), len(kept)) == (None, 2)
    kept.clear()
    assert not len(kept)
