"""Values that are made on first use, of which the ones used last are kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """At most `most` values. `before_drop` is called before one goes, which a device may still be using."""

    def __init__(self, most: int, before_drop: Callable[[], None] = lambda: None) -> None:
        self._most = most
        self._before_drop = before_drop
        self._values: OrderedDict[K, V] = OrderedDict()  # the one that was not used for longest comes first

    def get(self, key: K) -> V | None:
        """The value, which is now the one used last; None if there is none."""
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def add(self, key: K, value: V) -> V:
        """Keep a new value. If there are too many, the one that was not used for longest goes."""
        while len(self._values) >= self._most:
            self._before_drop()
            del self._values[next(iter(self._values))]
        self._values[key] = value
        return value

    def clear(self) -> None:
        """Drop all values."""
        self._values.clear()

    def __iter__(self) -> Iterator[K]:
        """The keys, the one that was not used for longest first."""
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
