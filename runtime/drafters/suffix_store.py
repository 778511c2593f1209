"""Earlier outputs of the runtime, in one suffix tree a tenant. If the store is full, it drops the oldest outputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Several
from typing import NamedTuple

from redraft.runtime.drafters.suffix_tree import SuffixTree


class _Stored(NamedTuple):
    tenant: str
    number: int
    start: int
    tokens: int


class SuffixStore:
    """Outputs by tenant. No request reads the outputs of another tenant.

    max_requests, max_tokens: limits for all tenants together, in outputs and tokens.   depth: longest context.
    """

    def __init__(self, max_requests: int, max_tokens: int, depth: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._depth = depth
        self._trees: dict[str, SuffixTree] = {}
        self._stored: deque[_Stored] = deque()
        self._next = 0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._stored)

    def tree(self, tenant: str) -> SuffixTree | None:
        """Return the tree of a tenant's outputs; None without outputs."""
        return self._trees.get(tenant)

    def add(self, tenant: str, prompt_end: Several[int], output: Several[int]) -> None:
        """Add an output. The last tokens of its prompt are the context of its first token, and are never drafted.

        The store ignores an output that is longer than itself.
        """
        text = (*prompt_end[-self._depth :], *output)
        if not output or len(text) > self._max_tokens:
            return
        start = len(text) - len(output)
        self._trees.setdefault(tenant, SuffixTree(self._depth)).add(self._next, text, start)
        self._stored.append(_Stored(tenant, self._next, start, len(text)))
        self._next += 1
        self.tokens += len(text)
        while len(self._stored) > self._max_requests or self.tokens > self._max_tokens:
            self._drop_oldest()

    def forget(self, tenant: str) -> None:
        """Drop all outputs of a tenant."""
        if self._trees.pop(tenant, None) is not None:
            self._stored = deque(one for one in self._stored if one.tenant != tenant)
            self.tokens = sum(one.tokens for one in self._stored)

    def _drop_oldest(self) -> None:
        oldest = self._stored.popleft()
        self.tokens -= oldest.tokens
        tree = self._trees[oldest.tenant]
        tree.remove(oldest.number, oldest.start)
        if not tree:
            del self._trees[oldest.tenant]
