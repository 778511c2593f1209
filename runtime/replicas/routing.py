"""Which replica takes a request: the one that has computed most of its prompt, unless it has too much to do.

A prompt's blocks of BLOCK tokens have keys that depend on all tokens before them. The table knows which replicas
computed which block last. It forgets the oldest, as a replica drops its rows, so it may be wrong. Then rows are
computed again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

BLOCK = 32
"""Tokens of a block."""
MOST_BLOCKS = 1 << 16
"""Blocks that a table knows."""
MOST_OWNERS = 8
"""Replicas that it knows for a block: a beginning that all prompts have is soon everywhere."""
OVERLOAD = 4
"""Requests that a replica may have more than the idlest one and still get those whose prefix it has."""


class PrefixTable:
    """Knows the blocks and the sessions of replicas.   overload: as OVERLOAD."""

    def __init__(self, overload: int = OVERLOAD, most_blocks: int = MOST_BLOCKS) -> None:
        self._overload = overload
        self._most = most_blocks
        self._owners: OrderedDict[object, tuple[str, ...]] = OrderedDict()  # the latest first

    def order(
        self, tokens: Sequence[int], loads: Mapping[str, int], salt: str | None = None, session: str | None = None
    ) -> list[str]:
        """Return the replicas from the best to the worst. loads: requests of each replica, those that wait included.

        A session stays with its replica as long as that lives. A replica without the prefix comes by its load.
        """
        idlest = min(loads.values(), default=0)
        pinned = self._owners.get(_session(session), ())[:1] if session is not None else ()
        known = self._longest(tokens, loads, salt)

        def rank(name: str) -> tuple[bool, bool, int]:
            fits = name in known and loads[name] <= idlest + self._overload
            return name not in pinned, not fits, loads[name]

        return sorted(loads, key=rank)

    def note(self, tokens: Sequence[int], name: str, salt: str | None = None, session: str | None = None) -> None:
        """Note that a replica computes a prompt."""
        keys: list[object] = list(_keys(tokens, salt))
        for key in [*reversed(keys), *([] if session is None else [_session(session)])]:
            others = [one for one in self._owners.pop(key, ()) if one != name]
            self._owners[key] = (name, *others[: MOST_OWNERS - 1])
        while len(self._owners) > self._most:
            self._owners.popitem(last=False)

    def _longest(self, tokens: Sequence[int], loads: Mapping[str, int], salt: str | None) -> set[str]:
        """Return the living replicas with the longest known prefix; none if no one has a block."""
        found: set[str] = set()
        for key in _keys(tokens, salt):
            found = set(self._owners.get(key, ())) & loads.keys() or found
            if key not in self._owners:
                break
        return found


def _keys(tokens: Sequence[int], salt: str | None) -> Iterator[object]:
    """Yield the key of each whole block."""
    key: object = salt
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        key = hash((key, *tokens[start : start + BLOCK]))
        yield key


def _session(session: str) -> object:
    return "session", session
