"""The queue of waiting requests: by priority, and within one priority tenants take turns."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Iterator

from redraft.runtime.requests.request import Request

_FEW = 64
"""Entries of requests that no longer wait which may always stay."""


class WaitingQueue:
    """Requests that have no slot yet.

    Smaller priorities come first. Within one priority, each tenant's oldest request comes in turn, so a tenant with a
    hundred requests delays another one's by one request. Taking and adding compare a number of
    priorities and deadlines that grows with the logarithm of those that wait, and do the rest at the same cost.
    """

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[str | None, deque[Request]]] = {}
        self._priorities: list[int] = []  # a heap of those of the levels
        self._deadlines: list[tuple[float, int, Request]] = []
        self._numbers = itertools.count()
        self._waiting: dict[int, Request] = {}
        self._entries = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests, the oldest first."""
        return iter(tuple(self._waiting.values()))

    def push(self, request: Request, first: bool = False) -> None:
        """Add a request, in front of all of its priority if `first`."""
        if request.priority not in self._levels:
            self._levels[request.priority] = OrderedDict()
            heapq.heappush(self._priorities, request.priority)
        tenants = self._levels[request.priority]
        queue = tenants.setdefault(request.turn, deque())
        if first:
            queue.appendleft(request)
            tenants.move_to_end(request.turn, last=False)
        else:
            queue.append(request)
        self._waiting[id(request)] = request
        if (due := request.due) is not None:
            heapq.heappush(self._deadlines, (due, next(self._numbers), request))
        self._entries += 1
        if self._entries > 2 * len(self._waiting) + _FEW:
            self._forget_removed()

    @property
    def priority(self) -> int | None:
        """The priority of the next request; None if no request waits."""
        self._drop_removed()
        return self._priorities[0] if self._priorities else None

    @property
    def first(self) -> Request | None:
        """The next request; None if no request waits."""
        priority = self.priority
        return None if priority is None else next(iter(self._levels[priority].values()))[0]

    def pop(self) -> Request:
        """Take the next request. Raises IndexError if no request waits."""
        priority = self.priority
        if priority is None:
            raise IndexError("no request waits")
        tenants = self._levels[priority]
        tenant, queue = next(iter(tenants.items()))
        request = queue.popleft()
        if queue:
            tenants.move_to_end(tenant)
        else:
            self._drop_tenant(priority, tenant)
        del self._waiting[id(request)]
        return request

    def remove(self, request: Request) -> bool:
        """Remove a request. Returns false if it does not wait."""
        return self._waiting.pop(id(request), None) is not None

    def expired(self, now: float) -> list[Request]:
        """Remove and return the requests whose deadline has passed; `now` is in seconds of `time.monotonic`."""
        found = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            late = request.due is not None and request.due <= now  # it may have got its first token since
            if late and self.remove(request):
                found.append(request)
        return found

    def _forget_removed(self) -> None:
        """Drop the requests that no longer wait from all queues, so that they do not stay in memory."""
        self._deadlines = [entry for entry in self._deadlines if id(entry[2]) in self._waiting]
        heapq.heapify(self._deadlines)
        for tenants in self._levels.values():
            for tenant, queue in tuple(tenants.items()):
                tenants[tenant] = deque([one for one in queue if id(one) in self._waiting])
                if not tenants[tenant]:
                    del tenants[tenant]
        self._levels = {priority: tenants for priority, tenants in self._levels.items() if tenants}
        self._priorities = sorted(self._levels)  # a sorted list is a heap
        self._entries = len(self._waiting)

    def _drop_removed(self) -> None:
        """Drop removed requests from the front of the queues that come next."""
        while self._priorities:
            priority = self._priorities[0]
            tenant, queue = next(iter(self._levels[priority].items()))
            while queue and id(queue[0]) not in self._waiting:
                queue.popleft()
            if queue:
                return
            self._drop_tenant(priority, tenant)

    def _drop_tenant(self, priority: int, tenant: str | None) -> None:
        """Drop a tenant without requests of the smallest priority."""
        del self._levels[priority][tenant]
        if not self._levels[priority]:
            del self._levels[priority]
            heapq.heappop(self._priorities)
