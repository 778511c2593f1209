"""The default number of threads, on machines faked as folders `sys` and `proc`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from redraft.cgroups import group_folders
from redraft.cpus import default_threads, find_threads

V2 = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1 = (
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "34 31 0:31 /docker/a /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
)


def machine(root: Path, cpus: int, smt: int = 1, nodes: int = 1, files: Mapping[str, str] | None = None) -> Path:
    """Fake a machine of `cpus` logical processors. Siblings are half the machine apart, as on servers."""
    cores = cpus // smt
    made = {"sys/devices/system/cpu/online": f"0-{cpus - 1}"}
    for cpu in range(cpus):
        siblings = ",".join(str(cpu % cores + cores * thread) for thread in range(smt))
        made[f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list"] = siblings
    for node in range(nodes):
        here = [str(cpu) for cpu in range(cpus) if cpu % cores * nodes // cores == node]
        made[f"sys/devices/system/node/node{node}/cpulist"] = ",".join(here)
    for name, text in {**made, **(files or {})}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def runs_on(cpu: int) -> dict[str, str]:
    """`/proc/self/stat` of a process with an odd name that last ran on this processor."""
    return {"proc/self/stat": "7 (a ) b) " + " ".join(["0"] * 36 + [str(cpu)] + ["0"] * 13)}


def in_group(path: str, **files: str) -> dict[str, str]:
    """A group of version 2 with files, `__` for `/` and `_` for `.` in their names."""
    named = {f"sys/fs/cgroup/{name.replace('__', '/').replace('_', '.')}": text for name, text in files.items()}
    return {"proc/self/cgroup": f"0::{path}", "proc/self/mountinfo": V2, **named}


def old_groups(quota: str) -> dict[str, str]:
    """Groups of version 1: a quota, and a container's cpuset that is mounted as the top."""
    return {
        "proc/self/cgroup": "5:cpuset:/docker/a/b\n2:cpu,cpuacct:/docker/a",
        "proc/self/mountinfo": V1,
        "sys/fs/cgroup/cpu,cpuacct/docker/a/cpu.cfs_quota_us": quota,
        "sys/fs/cgroup/cpu,cpuacct/docker/a/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/cpuset/b/cpuset.effective_cpus": "0-5",
    }


ALL = "all"
CASES = {
    "VM of two cores": (dict(cpus=2), ALL, 2, "2 processors"),
    "64 cores with SMT": (dict(cpus=128, smt=2), ALL, 64, "128 processors, 64 physical cores"),
    "pinned to both threads of two cores": (dict(cpus=128, smt=2), {3, 4, 67, 68}, 2, "4 processors, 2 physical cores"),
    "one and a half processors": (
        dict(cpus=8, files=in_group("/", cpu_max="150000 100000")), ALL, 1, "8 processors, quota of 1.5",
    ),
    "less than one processor": (dict(cpus=8, files=in_group("/", cpu_max="20000 100000")), ALL, 1, "quota of 0.2"),
    "no quota": (dict(cpus=8, files=in_group("/a", a__cpu_max="max 100000")), ALL, 8, "8 processors"),
    "the tightest of nested groups": (
        dict(cpus=8, files=in_group("/a/b", cpu_max="max 100000", a__cpu_max="3000 1000", a__b__cpu_max="6000 1000")),
        ALL, 3, "8 processors, quota of 3",
    ),
    "a cpuset": (dict(cpus=8, files=in_group("/a", a__cpuset_cpus_effective="0-1,4")), ALL, 3, "3 processors"),
    "a group outside of the mount": (dict(cpus=8, files=in_group("/../x", cpu_max="2000 1000")), ALL, 2, "quota of 2"),
    "version 1": (dict(cpus=8, files=old_groups("400000")), ALL, 4, "6 processors, quota of 4"),
    "version 1 without a quota": (dict(cpus=8, files=old_groups("-1")), ALL, 6, "6 processors"),
    "the second of two nodes": (
        dict(cpus=32, smt=2, nodes=2, files=runs_on(25)), ALL, 8, "32 processors, 16 in NUMA node 1, 8 physical cores",
    ),
    "two nodes, pinned": (dict(cpus=16, nodes=2, files=runs_on(9)), set(range(12)), 12, "12 processors"),
    "damaged files": (
        dict(cpus=4, nodes=2, files={**in_group("/", cpu_max="many of them"), "proc/self/stat": "1 (",
                                     "sys/devices/system/cpu/online": "0-x"}), {0, 1, 2}, 2, "in NUMA node 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_threads(tmp_path: Path, case: str) -> None:
    faked, affinity, count, reason = CASES[case]
    found = find_threads(set(range(faked["cpus"])) if affinity == ALL else affinity, machine(tmp_path, **faked))
    assert (found.count, reason in found.reason) == (count, True), found


def test_threads_stay_on_their_node_only_if_there_are_several(tmp_path: Path) -> None:
    root = machine(tmp_path, 8, nodes=2, files=runs_on(5))
    assert find_threads(set(range(8)), root).node == (4, 5, 6, 7)
    assert find_threads({0, 1, 4, 5}, root).node == ()
    assert find_threads(set(range(8)), machine(tmp_path / "one", 8)).node == ()


def test_a_system_without_these_files_has_a_thread_for_each_processor(tmp_path: Path) -> None:
    assert find_threads({0, 1, 5}, tmp_path).count == 3
    assert list(group_folders("cpu", tmp_path)) == []


def test_this_machine_has_at_least_one_thread() -> None:
    assert default_threads().count >= 1
