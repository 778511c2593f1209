"""Earlier outputs of the runtime, in one suffix tree a tenant. If the store is full, it drops the oldest outputs."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Several
from contextlib import contextmanager
from typing import NamedTuple

from redraft.runtime.drafters.suffix_tree import SuffixTree

_LOG = logging.getLogger("redraft.suffix")


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
            _LOG.debug("an output of %d tokens is not kept, the limit is %d", len(text), self._max_tokens)
            return
        new = _Stored(tenant, self._next, len(text) - len(output), len(text))
        self._next += 1
        with self._forgotten_on_error(tenant):
            self._trees.setdefault(tenant, SuffixTree(self._depth)).add(new.number, text, new.start)
            self._stored.append(new)
            self.tokens += new.tokens
        while len(self._stored) > self._max_requests or self.tokens > self._max_tokens:
            self._drop_oldest()

    def forget(self, tenant: str) -> None:
        """Drop all outputs of a tenant."""
        self._stored = deque(one for one in self._stored if one.tenant != tenant)
        self.tokens = sum(one.tokens for one in self._stored)
        self._trees.pop(tenant, None)

    @contextmanager
    def _forgotten_on_error(self, tenant: str) -> Iterator[None]:
        """Drop the tenant's outputs if its tree is left half changed, as by an interrupt."""
        try:
            yield
        except BaseException:
            self.forget(tenant)
            raise

    def _drop_oldest(self) -> None:
        oldest = self._stored[0]
        with self._forgotten_on_error(oldest.tenant):
            tree = self._trees[oldest.tenant]
            tree.remove(oldest.number, oldest.start)
            if not tree:
                del self._trees[oldest.tenant]
            self._stored.popleft()
            self.tokens -= oldest.tokens
