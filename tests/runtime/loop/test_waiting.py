"""The queue of waiting requests: priorities, tenants in turns, removal and deadlines."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from redraft.runtime.loop.waiting import WaitingQueue
from redraft.runtime.requests.request import Request
from redraft.runtime.sampling.sampler import Greedy


def waiting(turn: str | None = None, priority: int = 0, deadline: float | None = None) -> Request:
    return Request([1], 1, 2, frozenset(), Greedy(), turn=turn, priority=priority, deadline=deadline)


TENANTS = st.sampled_from(["a", "b", "c", None])


@given(st.lists(st.tuples(TENANTS, st.integers(-2, 2)), max_size=40))
def test_smaller_priorities_come_first_and_a_tenants_requests_in_their_order(added: list[tuple[str, int]]) -> None:
    queue, requests = WaitingQueue(), [waiting(*one) for one in added]
    for request in requests:
        queue.push(request)
    taken = [queue.pop() for _ in range(len(queue))]
    assert [one.priority for one in taken] == sorted(one.priority for one in requests)
    for key in set(added):
        own = [one for one in requests if (one.turn, one.priority) == key]
        assert [one for one in taken if one in own] == own


@given(st.lists(TENANTS, max_size=60))
def test_no_tenant_waits_for_two_requests_of_another(tenants: list[str]) -> None:
    """While a tenant has a request that waits, every other one takes at most one turn between two of its own."""
    queue = WaitingQueue()
    for tenant in tenants:
        queue.push(waiting(tenant))
    left, taken = Counter(tenants), list[str | None]()
    since = {tenant: Counter[str | None]() for tenant in left}
    while len(queue):
        tenant = queue.pop().turn
        taken.append(tenant)
        left[tenant] -= 1
        for other, counts in since.items():
            if other == tenant:
                counts.clear()
            elif left[other]:
                counts[tenant] += 1
                assert counts[tenant] <= 1, f"{tenant} came twice while {other} waited: {taken}"
    assert Counter(taken) == Counter(tenants)


@given(st.lists(st.tuples(TENANTS, st.booleans()), max_size=30))
def test_removed_requests_do_not_come(added: list[tuple[str, bool]]) -> None:
    queue = WaitingQueue()
    requests = [waiting(tenant) for tenant, _ in added]
    for request in requests:
        queue.push(request)
    for request, (_, removed) in zip(requests, added, strict=True):
        assert not removed or (queue.remove(request) and not queue.remove(request))
    kept = [request for request, (_, removed) in zip(requests, added, strict=True) if not removed]
    assert len(queue) == len(kept)
    taken = [queue.pop() for _ in kept]
    assert {id(one) for one in taken} == {id(one) for one in kept}
    assert queue.priority is None


class Compared(int):
    """A priority that counts its comparisons."""

    count = 0

    def __lt__(self, other: int) -> bool:
        Compared.count += 1
        return int(self) < int(other)

    def __hash__(self) -> int:
        return hash(int(self))


def test_looking_at_the_next_request_compares_no_others() -> None:
    """Every step looks at it. With thousands of priorities, a search for the smallest took most of a step."""
    queue = WaitingQueue()
    for number in range(1000):
        queue.push(waiting(priority=Compared(number * 7 % 1000)))
    Compared.count = 0
    assert [queue.priority for _ in range(100)] == [0] * 100
    assert Compared.count == 0
    for number in range(20):
        assert queue.pop().priority == number
    assert Compared.count < 20 * 2 * 11


def test_a_preempted_request_comes_next() -> None:
    queue = WaitingQueue()
    for tenant in ("a", "b", "a"):
        queue.push(waiting(tenant))
    preempted = waiting("b")
    queue.push(preempted, first=True)
    assert queue.pop() is preempted


def test_expired_requests_leave_at_their_deadline() -> None:
    queue, late, later = WaitingQueue(), waiting(deadline=5.0), waiting(deadline=9.0)
    for request in (later, late, waiting()):
        queue.push(request)
    assert queue.expired(4.9) == []
    assert queue.expired(5.0) == [late]
    assert (len(queue), queue.pop()) == (2, later)
    assert queue.expired(100.0) == [], "a request that was taken has no deadline here"


def test_the_deadline_of_the_first_token_ends_with_that_token() -> None:
    request, queue = waiting(deadline=9.0), WaitingQueue()
    request.first_token_deadline = 5.0
    assert request.due == 5.0
    queue.push(request)
    assert queue.pop() is request
    request.tokens.append(2)
    assert request.due == 9.0
    queue.push(request, first=True)  # it lost its slot
    assert queue.expired(8.9) == []
    assert queue.expired(9.0) == [request]
