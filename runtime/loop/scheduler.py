"""Scheduling of requests: it admits waiting requests to free slots, steps all, and removes finished ones."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator

from redraft.runtime.loop.decode_loop import Cycle
from redraft.runtime.requests.request import Request


def run(cycle: Cycle, requests: Iterable[Request]) -> Iterator[None]:
    """Run every request to its end, at most `max_num_seqs` at a time.

    Yields after every first token and after every step.
    """
    waiting = deque(requests)
    batch: list[Request] = []
    while waiting or batch:
        while waiting and len(batch) < cycle.verifier.max_num_seqs:
            admit(cycle, batch, waiting.popleft())
            yield
            retire(cycle, batch)
        if batch:
            cycle.step(batch)
            yield
            retire(cycle, batch)


def admit(cycle: Cycle, batch: list[Request], seq: Request) -> None:
    """Compute the prompt of `seq` in the first free slot, which follows the batch's."""
    slot = len(batch)
    batch.append(seq)
    seq.started = time.perf_counter()
    with cycle.ranges.stage("begin"):
        cycle.begin(seq, slot)


def retire(cycle: Cycle, batch: list[Request]) -> None:
    """Remove finished sequences. The last sequence moves to each free slot, so that slots have no gap."""
    for slot in reversed(range(len(batch))):
        if batch[slot].finish_reason is not None:
            batch[slot].ended = cycle.clock.copy()
            batch[slot].speculation.drafter.finish(batch[slot])
            last = batch.pop()
            if slot < len(batch):
                cycle.move(last, len(batch), slot)
                batch[slot] = last
