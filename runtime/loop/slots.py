"""The verifier's slots: those of running requests, of requests whose rows are computed, and of parked prefixes.

    0 … B - 1      running requests, without a gap: a call over B requests reads the first B slots
    others         requests that still have rows to compute, and prefixes: rows of requests that ended or were preempted

Rows are copied when a request changes its slot. A row's bits depend on its request's tokens alone, so a request that
takes over rows of another one has the text that it would have without them.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from redraft.errors import UsageError
from redraft.runtime.drafters.base import PREFIX_BLOCK, Drafter
from redraft.runtime.requests.request import Request, drafting
from redraft.runtime.steps.verifier import Verifier
from redraft.types import IntArray

MANY_ROWS = 1024
"""Rows of an empty slot whose memory is given back. Taking memory again costs more than fewer rows save."""


class Slots:
    """The slots of one verifier, for at most `max_num_seqs` requests; other slots hold prefixes only."""

    def __init__(self, verifier: Verifier) -> None:
        self.running: list[Request] = []
        self.filling: list[Request] = []
        self._verifier = verifier
        self._prefixes: OrderedDict[int, Request] = OrderedDict()  # by slot, the least recently used first
        self._tokens: dict[int, IntArray] = {}

    @property
    def free(self) -> int:
        """Requests that may still be admitted."""
        return self._verifier.max_num_seqs - len(self.running) - len(self.filling)

    @property
    def used(self) -> bool:
        """True if a request has a slot."""
        return bool(self.running or self.filling)

    @property
    def prefixes(self) -> int:
        """Parked prefixes."""
        return len(self._prefixes)

    @property
    def rows(self) -> int:
        """Rows of all requests and prefixes."""
        owners = [*self.running, *self.filling, *self._prefixes.values()]
        return sum([one.num_computed_tokens for one in owners])

    def drop_oldest(self) -> bool:
        """Forget the least recently used prefix. Returns false if there is none."""
        if not self._prefixes:
            return False
        self._drop(next(iter(self._prefixes)))
        return True

    def admit(self, request: Request) -> None:
        """Give a request a slot, with the rows of the longest prefix of its tokens that is parked."""
        source, rows = self._longest(request)
        target = self._target(source)
        request.slot = target
        request.admitted = request.admitted or time.perf_counter()
        request.num_computed_tokens = self._take_over(request, source, rows)
        request.cached_tokens = max(request.cached_tokens, min(request.num_computed_tokens, request.prompt_length))
        self.filling.append(request)

    def join(self, request: Request) -> bool:
        """Let a request run, whose rows are computed. Returns false if no slot is free for one that is before it."""
        target = len(self.running)
        other = next((one for one in self.filling if one.slot == target), request)
        if other is not request:
            space = self._space()
            if space is None:
                return False
            self._settle(other, space)
        self._settle(request, target)
        if not request.counters.steps:
            request.began = self._verifier.clock.copy()
        self.filling.remove(request)
        self.running.append(request)
        return True

    def leave(self, request: Request, park: bool = True) -> None:
        """Take a request's slot. Its rows stay as a prefix if `park`, and if there is a slot for them."""
        slot, last = request.slot, self.running[-1] if self.running else None
        park = park and request.num_computed_tokens >= PREFIX_BLOCK
        if request in self.filling:
            self.filling.remove(request)
        elif request is last:
            self.running.pop()
        else:
            assert last is not None
            space = self._space() if park else None
            park = space is not None
            if space is not None:
                self._copy(request, slot, space)
            self._copy(last, last.slot, slot)
            self.running[slot] = self.running.pop()
            self._release(last.slot, last.num_computed_tokens)
            last.slot, slot = slot, -1 if space is None else space
        if park:
            self._park(request, slot)
        elif slot >= 0:
            self._release(slot, request.num_computed_tokens)
        request.slot = -1

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Let the block overwrite rows of the verifier. Rows in use have their values again after it.

        On a GPU prefixes are dropped instead. Raises UsageError there if a request has a slot.
        """
        owners = [*self.running, *self.filling, *self._prefixes.values()]
        if self.used and self._verifier.device.asynchronous:
            raise UsageError("requests are running", "warm the runtime for this method before the first request")
        if not owners or self._verifier.device.asynchronous:
            self.clear()
            yield
            return
        caches = self._verifier.steps.host_kv()
        places = [(slice(one.slot, one.slot + 1), slice(None), slice(one.num_computed_tokens)) for one in owners]
        saved = [[cache[place].copy() for place in places] for cache in caches]
        try:
            yield
        finally:
            for cache, rows in zip(caches, saved, strict=True):
                for place, values in zip(places, rows, strict=True):
                    cache[place] = values

    def forget_drafter(self, drafter: Drafter) -> None:
        """Drop the state that prefixes have of a drafter. Their rows stay."""
        for prefix in self._prefixes.values():
            if drafter in prefix.speculation.drafter.parts:
                prefix.speculation, prefix.drafting = prefix.plain, {}

    def clear(self) -> None:
        """Forget all prefixes."""
        for slot in tuple(self._prefixes):
            self._drop(slot)

    def reset(self) -> None:
        """Take all slots, and forget all rows."""
        owners = [*self.running, *self.filling]
        self.running, self.filling = [], []
        for request in owners:
            slot, request.slot = request.slot, -1
            if slot >= 0:
                self._release(slot, request.num_computed_tokens)
        self.clear()

    def _target(self, source: int) -> int:
        """Return a slot for a new request, without a prefix unless it is `source`. Prefers the first that will run."""
        taken = {request.slot for request in (*self.running, *self.filling)}
        target = next(slot for slot in range(self._verifier.slots) if slot not in taken)
        if target != source:
            self._vacate(target, keep=source)
        return target

    def _settle(self, request: Request, slot: int) -> None:
        """Move a request to a slot."""
        if request.slot != slot:
            self._vacate(slot)
            self._copy(request, request.slot, slot)
            self._release(request.slot, request.num_computed_tokens)
            request.slot = slot

    def _copy(self, request: Request, source: int, target: int) -> None:
        self._verifier.move(source, target, request.num_computed_tokens)
        with drafting(request):
            request.speculation.drafter.move(request, source, target)

    def _vacate(self, slot: int, keep: int = -1) -> None:
        """Move the prefix of a slot to another one, in place of the least recently used one. `keep` is not dropped."""
        prefix = self._prefixes.get(slot)
        if prefix is None:
            return
        space = self._space(slot, keep)
        if space is not None:
            self._copy(prefix, slot, space)
            self._move_prefix(slot, space)
        else:
            self._drop(slot)

    def _space(self, slot: int = -1, keep: int = -1) -> int | None:
        """Return an empty slot, after dropping the least recently used prefix if necessary.

        None if the prefix in `slot` is that one, or if requests have all slots.
        """
        empty = self._empty(slot)
        if empty is not None:
            return empty
        oldest = next((place for place in self._prefixes if place != keep), None)
        if oldest is None or oldest == slot:
            return None
        self._drop(oldest)
        return oldest

    def _empty(self, slot: int = -1) -> int | None:
        """Return a slot with no rows of a request or prefix that is not `slot`; None if there is none."""
        taken = {request.slot for request in (*self.running, *self.filling)} | set(self._prefixes) | {slot}
        return next((place for place in reversed(range(self._verifier.slots)) if place not in taken), None)

    def _park(self, request: Request, slot: int) -> None:
        """Keep the rows of a request, which are in this slot."""
        tokens = request.tokens[: request.num_computed_tokens]
        self._prefixes[slot] = replace(
            request, tokens=tokens, prompt_length=len(tokens), text=None, drafting=dict(request.drafting), slot=slot,
            record=None, deliver=None,
        )  # fmt: skip
        self._tokens[slot] = np.array(tokens, np.int64)

    def _drop(self, slot: int) -> None:
        """Forget a prefix. Memory of many rows is given back."""
        self._release(slot, len(self._tokens.pop(slot)))
        del self._prefixes[slot]

    def _release(self, slot: int, rows: int) -> None:
        """Give the memory of an empty slot back that had so many rows, if they were many."""
        if rows >= MANY_ROWS:
            self._verifier.release(slot)

    def _move_prefix(self, source: int, target: int) -> None:
        """Note that the rows of a prefix are in another slot. It is as old as before."""
        self._prefixes = OrderedDict(
            (target if slot == source else slot, prefix) for slot, prefix in self._prefixes.items()
        )
        self._tokens[target] = self._tokens.pop(source)
        self._prefixes[target].slot = target

    def _longest(self, request: Request) -> tuple[int, int]:
        """Return the slot of the prefix with the most tokens in common, and their number in whole blocks; or -1, 0."""
        tokens = np.array(request.tokens[:-1], np.int64)
        best = -1, 0
        for slot, own in self._tokens.items():
            if self._prefixes[slot].salt == request.salt:
                length = min(len(own), len(tokens))
                differs = np.flatnonzero(own[:length] != tokens[:length])
                rows = int(differs[0]) if len(differs) else length
                best = max(best, (slot, rows - rows % PREFIX_BLOCK), key=lambda found: found[1])
        return best if best[1] else (-1, 0)

    def _take_over(self, request: Request, source: int, rows: int) -> int:
        """Copy the first rows of a prefix, with the drafter's state, to the request's slot. Returns their number."""
        prefix = self._prefixes.get(source)
        whole = prefix is not None and rows + PREFIX_BLOCK > len(prefix.tokens)
        if prefix is not None and source == request.slot:
            empty = None if whole else self._empty(source)
            if empty is not None:  # its other rows may be of use later
                self._copy(prefix, source, empty)
                self._move_prefix(source, empty)
                self._prefixes.move_to_end(empty)
        rows = self._begun(request, prefix, rows)
        if source == request.slot:
            if source in self._prefixes:
                del self._prefixes[source], self._tokens[source]
        elif rows:
            self._prefixes.move_to_end(source, last=not whole)  # the request will have all of its rows, and more
            self._verifier.move(source, request.slot, rows)
            with drafting(request):
                request.speculation.drafter.move(request, source, request.slot)
        return rows

    def _begun(self, request: Request, prefix: Request | None, rows: int) -> int:
        """Begin the drafter's state of a request. Returns how many rows of the prefix the verifier need not compute."""
        with drafting(request):
            drafter = request.speculation.drafter
            if prefix is not None:
                return drafter.resume(request, prefix, rows)
            drafter.begin(request)
        return rows
