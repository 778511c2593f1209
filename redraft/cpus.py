"""The default number of threads: physical cores of one NUMA node that this process may use, within its quota."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from redraft.cgroups import ROOT, group_folders, read_text


@dataclass(frozen=True)
class Threads:
    """The default number of threads.

    node:   logical processors of the NUMA node that the threads should stay on; empty if the system keeps them there.
    reason: how `count` follows from the machine, in words.
    """

    count: int
    node: tuple[int, ...]
    reason: str


@cache
def default_threads() -> Threads:
    """Return the number for this process, found once: engines of one process must share a NUMA node."""
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    return find_threads(affinity)


def find_threads(affinity: set[int], root: Path = ROOT) -> Threads:
    """Return the number for a process that may run on the logical processors `affinity`. `root` has `proc` and `sys`.

    1. Processors: those of `affinity`, of the control group's cpuset, and online.
    2. NUMA: if these are all processors of the machine, only those of the node that the process runs on, since
       reading weights from the memory of another node is slow.
    3. Cores: one thread for each physical core, as ONNX Runtime does itself. Two threads of a core share its units.
    4. Quota: not more threads than whole processors that the control groups allow, since more would be stopped
       together in the middle of a product. At least one.
    Files that are missing limit nothing.
    """
    online = _listed(read_text(root / "sys/devices/system/cpu/online")) or affinity
    allowed = (affinity & online) or affinity
    for cpuset in _cpusets(root):
        allowed = (allowed & cpuset) or allowed
    node = _node(allowed, root) if allowed == online else None
    used = allowed if node is None else node[1]
    cores = {_siblings(cpu, root) for cpu in used}
    count, quota = len(cores), _quota(root)
    words = [_plural(len(allowed), "processor")]
    if node is not None:
        words.append(f"{len(used)} in NUMA node {node[0]}")
    if count < len(used):
        words.append(_plural(count, "physical core"))
    if quota < count:
        words.append(f"quota of {quota:g}")
        count = max(1, math.floor(quota))
    return Threads(count, () if node is None else tuple(sorted(used)), ", ".join(words))


def cores_of(cpus: set[int], root: Path = ROOT) -> list[tuple[int, ...]]:
    """Return these logical processors by core, those of a core together, in order."""
    cores = {_siblings(cpu, root) for cpu in cpus}
    return sorted(tuple(cpu for cpu in core if cpu in cpus) for core in cores)


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _listed(text: str) -> set[int]:
    """Return the numbers of a list like 0-3,8. Empty if it is none."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            return set()
        found.update(range(int(first), int(last or first) + 1))
    return found


def _cpusets(root: Path) -> Iterator[set[int]]:
    """Yield the processors that the process's groups allow."""
    for folder in group_folders("cpuset", root):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
            if cpus := _listed(read_text(folder / name)):
                yield cpus
                break


def _node(allowed: set[int], root: Path) -> tuple[int, set[int]] | None:
    """Return number and processors of the node that the process runs on, or None if the machine has only one."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    nodes = {int(folder.name[4:]): _listed(read_text(folder / "cpulist")) & allowed for folder in folders}
    nodes = {number: cpus for number, cpus in sorted(nodes.items()) if cpus}
    if len(nodes) < 2:
        return None
    last = read_text(root / "proc/self/stat").rpartition(")")[2].split()
    current = int(last[36]) if len(last) > 36 else -1  # field 39 of proc(5): the processor that it last ran on
    return max(nodes.items(), key=lambda node: (current in node[1], len(node[1])))


def _siblings(cpu: int, root: Path) -> tuple[int, ...]:
    """Return the logical processors of a processor's core."""
    folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    listed = _listed(read_text(folder / "core_cpus_list")) or _listed(read_text(folder / "thread_siblings_list"))
    return tuple(sorted(listed)) or (cpu,)


def _quota(root: Path) -> float:
    """Return the processors that the process's groups may use at once; infinite without a limit."""
    quotas = [math.inf]
    for folder in group_folders("cpu", root):
        old = f"{read_text(folder / 'cpu.cfs_quota_us')} {read_text(folder / 'cpu.cfs_period_us')}"
        quota, _, period = (read_text(folder / "cpu.max") or old).partition(" ")
        if quota.isdecimal() and period.strip().isdecimal() and int(period) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas)
