"""Cores of the replicas of one machine: sets that no two of them share.

A replica holds a socket with an abstract name for each of its processors. Nothing of it is on the disk, and the system
gives the names up when the process ends, however it ends. So the next replica takes the set of one that was killed.
Containers with networks of their own do not see each other's names.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress

from redraft.cpus import cores_of
from redraft.errors import UsageError


def core_sets(cores: int, cpus: Sequence[Sequence[int]] | None = None) -> list[tuple[int, ...]]:
    """Return sets of logical processors, each of so many cores, none of which is in two of them.

    cpus: the logical processors of each core; None for those that this process may use.
    Raises UsageError if there are not enough cores for one set.
    """
    found = cores_of(os.sched_getaffinity(0)) if cpus is None else cpus
    if cores > len(found):
        raise UsageError(f"a replica wants {cores} cores, and there are {len(found)}", "give it fewer")
    starts = range(0, len(found) - cores + 1, cores)
    return [tuple(sorted(cpu for core in found[start : start + cores] for cpu in core)) for start in starts]


def take_cores(sets: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], list[socket.socket]]:
    """Keep this process to a set of which no other process has a processor. Returns it, and what holds it.

    Later threads have the processors of the one that starts them.
    Raises UsageError if there is no such set, or if the system does not allow it.
    """
    for cpus in sets:
        if (held := _held(cpus)) is None:
            continue
        try:
            _keep_to(cpus)
        except OSError as error:
            _release(held)
            raise UsageError(f"this process may not keep to the processors {list(cpus)}: {error.strerror}") from None
        return tuple(cpus), held
    raise UsageError(f"all of the {len(sets)} sets of cores are taken", "start fewer replicas, or end other ones")


def _keep_to(cpus: Sequence[int]) -> None:
    """Set the processors of all threads, and of those that they start meanwhile. Raises OSError."""
    done: set[str] = set()
    while threads := set(os.listdir("/proc/self/task")) - done:
        for thread in threads:
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(thread), cpus)
        done |= threads


def _held(cpus: Sequence[int]) -> list[socket.socket] | None:
    """Return sockets whose names stand for these processors; None if another process has one of them."""
    held: list[socket.socket] = []
    for cpu in cpus:
        held.append(socket.socket(socket.AF_UNIX))
        try:
            held[-1].bind(f"\0redraft processor {cpu}")
        except OSError:
            _release(held)
            return None
    return held


def _release(held: Sequence[socket.socket]) -> None:
    for one in held:
        one.close()
