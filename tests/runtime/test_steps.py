"""The cache of steps holds the most recently used ones."""

from __future__ import annotations

from redraft.runtime.steps import LruCache


def test_the_least_recently_used_value_is_dropped() -> None:
    dropped: list[list[str]] = []
    cache: LruCache[str, int] = LruCache(2, lambda: dropped.append(list(cache)))
    assert [cache.get(key, lambda value=value: value) for key, value in (("a", 1), ("b", 2), ("a", 3))] == [1, 2, 1]
    assert cache.get("c", lambda: 3) == 3
    assert dropped == [["b", "a"]]  # called before the value is dropped
    assert list(cache) == ["a", "c"]
    assert cache.get("b", lambda: 4) == 4
    cache.clear()
    assert not len(cache)
