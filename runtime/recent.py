"""A cache of values that are created on first use. It holds the most recently used ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """At most `most` values. It calls `before_drop` before it drops a value, which a device may still be using."""

    def __init__(self, most: int, before_drop: Callable[[], None] = lambda: None) -> None:
        self._most = most
        self._before_drop = before_drop
        self._values: OrderedDict[K, V] = OrderedDict()  # the least recently used first

    def get(self, key: K) -> V | None:
        """Return the value, which becomes the most recently used; None for an unknown key."""
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def add(self, key: K, value: V) -> V:
        """Add a new value. If the cache is full, drop the least recently used one."""
        while len(self._values) >= self._most:
            self._before_drop()
            del self._values[next(iter(self._values))]
        self._values[key] = value
        return value

    def clear(self) -> None:
        """Drop all values."""
        self._values.clear()

    def __iter__(self) -> Iterator[K]:
        """Iterate over the keys, the least recently used first."""
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
