"""Sets of cores that replicas share out between them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from redraft.errors import UsageError
from redraft.runtime.replicas.cores import core_sets

FOUR = [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_sets_are_disjoint_and_split_no_core() -> None:
    assert core_sets(4, FOUR) == [(0, 1, 2, 3, 4, 5, 6, 7)]
    assert core_sets(2, FOUR) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert core_sets(3, FOUR) == [(0, 1, 2, 4, 5, 6)]
    with pytest.raises(UsageError, match="a replica wants 5 cores, and there are 4"):
        core_sets(5, FOUR)


TAKE = """
import os, sys
from redraft.errors import UsageError
from redraft.runtime.replicas.cores import take_cores
try:
    cpus, held = take_cores([(cpu,) for cpu in map(int, sys.argv[1:])])
    print(*cpus, *sorted(os.sched_getaffinity(0)), flush=True)
    input()
except UsageError as error:
    print(error.message, flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_a_set_is_free_again_when_its_process_is_killed() -> None:
    cpus = sorted(os.sched_getaffinity(0))[:2]
    if len(cpus) < 2:
        pytest.skip("this machine has one processor")

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", TAKE, *map(str, cpus)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )  # fmt: skip

    def said(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    first, second = start(), start()
    try:
        assert sorted([said(first), said(second)]) == [f"{cpu} {cpu}" for cpu in cpus]
        with start() as third:
            assert said(third) == "all of the 2 sets of cores are taken"
        first.kill()
        first.wait()
        with start() as fourth:
            assert said(fourth) in {f"{cpu} {cpu}" for cpu in cpus}
            fourth.kill()
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()
