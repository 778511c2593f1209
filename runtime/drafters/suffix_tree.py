"""A suffix tree of token sequences: it finds earlier occurrences of the latest tokens, for every length of context.

It is a tree of reversed texts. A child of a node adds the token before the node's context, so one walk from the root
visits the contexts of all lengths. A node is split only if more than a few contexts share it, and a split node keeps
only its latest places. So the tree needs a limited number of bytes for each token.

A store has one tree a tenant, with earlier outputs of the runtime. If it is full, it drops the oldest outputs.

Oliaro et al., "SuffixDecoding" (arXiv 2411.04975), section 3.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

LEAF_PLACES = 16
"""A node with more places than this is split, unless its context has the largest length."""
LATEST = 32
"""Most places of a split node, and of a node of the longest context."""
SPLIT_DEPTH = 8
"""A longer context does not split a node: its latest places are compared token by token instead."""
_START = -1
"""Represents the token before the first one of a text."""
_SHIFT = 32
_INDEX = (1 << _SHIFT) - 1


class Match(NamedTuple):
    """Places after contexts that agree with the latest `length` tokens, oldest first."""

    length: int
    places: list[int]


class _Node:
    """Places of one context, oldest first. children: by the token before the context; None for a leaf."""

    __slots__ = ("children", "places")

    def __init__(self) -> None:
        self.places: list[int] = []
        self.children: dict[int, _Node] | None = None

    def child(self, before: int) -> _Node:
        """Return the child of a split node, which is created on first use."""
        assert self.children is not None
        child = self.children.get(before)
        if child is None:
            child = self.children[before] = _Node()
        return child


class SuffixTree:
    """The texts of some sequences, by their numbers, which increase.

    A place is a position in one of the texts: the sequence's number and the token's index. `depth` is the longest
    context, in tokens.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._texts: dict[int, Sequence[int]] = {}
        self._root = _Node()

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self._texts)

    def add(self, number: int, text: Sequence[int], start: int) -> None:
        """Index the tokens of a text from `start` on. Pass a longer text again with its first new index."""
        self._texts[number] = text
        for index in range(max(start, 1), len(text)):
            self._insert(text, index, number << _SHIFT | index)

    def remove(self, number: int, start: int) -> None:
        """Remove the oldest text, which was indexed from `start` on."""
        text = self._texts.pop(number)
        for index in range(max(start, 1), len(text)):
            self._take_out(text, index, number << _SHIFT | index)

    def matches(self, tokens: Sequence[int]) -> list[Match]:
        """Return the places that continue the latest of `tokens`, by length of context, longest first.

        Each match also has the places of the matches before it.
        """
        path = list(self._walk(tokens))
        depth = len(path) - 1
        node = path[-1]
        found = [Match(d, path[d].places) for d in range(1, depth) if len(path[d].places) > len(path[d + 1].places)]
        if depth > 0:
            found.append(Match(depth, node.places))
        if node.children is None:
            found.extend(self._longer(tokens, depth, node.places))
        found.reverse()
        return found

    def following(self, place: int, count: int) -> Sequence[int]:
        """Return at most `count` tokens from a place on, up to the end of the text."""
        index = place & _INDEX
        return self._texts[place >> _SHIFT][index : index + count]

    def _walk(self, tokens: Sequence[int]) -> Iterator[_Node]:
        """Yield the nodes of the latest tokens, root first, as far as the tree has them."""
        node: _Node | None = self._root
        end = len(tokens)
        while node is not None:
            yield node
            if node.children is None or end == 0:
                return
            end -= 1
            node = node.children.get(tokens[end])

    def _longer(self, tokens: Sequence[int], depth: int, places: list[int]) -> Iterator[Match]:
        """Yield the matches of a leaf with longer contexts than its own, shortest first."""
        lengths = [self._agreement(tokens, place, depth) for place in places]
        for length in sorted(set(lengths)):
            if length > depth:
                yield Match(length, [place for place, agrees in zip(places, lengths, strict=True) if agrees >= length])

    def _agreement(self, tokens: Sequence[int], place: int, length: int) -> int:
        """Return how many tokens before a place agree with the latest ones. `length` of them are known to agree."""
        text, index, end = self._texts[place >> _SHIFT], place & _INDEX, len(tokens)
        most = min(self._depth, index, end)
        while length < most and text[index - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length

    def _insert(self, text: Sequence[int], index: int, place: int) -> None:
        node, depth = self._root, 0
        while node.children is not None:
            _append(node.places, place)
            depth += 1
            node = node.child(text[index - depth] if depth <= index else _START)
        if depth >= min(self._depth, SPLIT_DEPTH, index + 1):
            _append(node.places, place)
            return
        node.places.append(place)
        if len(node.places) > LEAF_PLACES:
            self._split(node, depth)

    def _split(self, node: _Node, depth: int) -> None:
        node.children = {}
        for place in node.places:
            text, index = self._texts[place >> _SHIFT], place & _INDEX
            node.child(text[index - depth - 1] if depth < index else _START).places.append(place)

    def _take_out(self, text: Sequence[int], index: int, place: int) -> None:
        node, depth = self._root, 0
        path = []
        while True:
            if node.places and node.places[0] == place:
                del node.places[0]
            if len(node.places) <= LEAF_PLACES // 2:
                node.children = None  # older places were removed before, so all that it has are here
            if node.children is None:
                break
            depth += 1
            before = text[index - depth] if depth <= index else _START
            path.append((node, before))
            child = node.children.get(before)
            if child is None:  # it had only older places
                break
            node = child
        for parent, before in reversed(path):
            child = parent.children.get(before) if parent.children else None
            if child is not None and (child.places or child.children):
                return
            if parent.children:
                parent.children.pop(before, None)


def _append(places: list[int], place: int) -> None:
    """Append a place, and drop old ones if the list is too long."""
    places.append(place)
    if len(places) >= 2 * LATEST:
        del places[:-LATEST]


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

    def add(self, tenant: str, prompt_end: Sequence[int], output: Sequence[int]) -> None:
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
