"""A cache of limited size that drops the least recently used value."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """At most `most` values. It calls `before_drop` before it drops a value, which a device may still be using."""

    def __init__(self, most: int, before_drop: Callable[[], None] = lambda: None) -> None:
        self._most = most
        self._before_drop = before_drop
        self._values: OrderedDict[K, V] = OrderedDict()  # the least recently used first

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the value, which becomes the most recently used. If the cache lacks it, `make` creates it.

        A full cache drops the least recently used value.
        """
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
            return value
        value = make()
        while len(self._values) >= self._most:
            self._before_drop()
            del self._values[next(iter(self._values))]
        self._values[key] = value
        return value

    def items(self) -> list[tuple[K, V]]:
        """Return all keys with their values, the least recently used first. None of them counts as used."""
        return [*self._values.items()]

    def drop(self, wanted: Callable[[K], bool]) -> None:
        """Drop the values with such keys."""
        for key in [key for key in self._values if wanted(key)]:
            self._before_drop()
            del self._values[key]

    def clear(self) -> None:
        """Drop all values."""
        self._values.clear()
