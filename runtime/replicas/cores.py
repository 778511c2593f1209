"""Cores of the replicas of one machine: sets that no two of them share.

A replica holds a locked file for each of its processors. The system gives the locks up when the process ends, however
it ends, so the next replica takes the set of one that was killed.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

from redraft.cpus import cores_of
from redraft.errors import UsageError
from redraft.user_cache import user_cache


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


def take_cores(sets: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], list[int]]:
    """Keep this process to a set of which no other process has a processor. Returns it, and the files that hold it.

    Later threads have the processors of the one that starts them.
    Raises UsageError if there is no such set, or if the system does not allow it.
    """
    folder = user_cache() / "cores"
    folder.mkdir(parents=True, exist_ok=True)
    for cpus in sets:
        if (held := _locked([folder / str(cpu) for cpu in cpus])) is None:
            continue
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cpus)
        if (found := os.sched_getaffinity(0)) != set(cpus):
            _release(held)
            raise UsageError(f"this process may use the processors {sorted(found)}, not {list(cpus)}")
        return tuple(cpus), held
    raise UsageError(f"all of the {len(sets)} sets of cores are taken", "start fewer replicas, or end other ones")


def _locked(paths: Sequence[Path]) -> list[int] | None:
    """Return files that this process has locked; None if another one has one of them."""
    held: list[int] = []
    for path in paths:
        held.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        try:
            fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            _release(held)
            return None
    return held


def _release(held: Sequence[int]) -> None:
    for file in held:
        os.close(file)
