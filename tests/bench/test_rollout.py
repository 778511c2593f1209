"""Changes of a live application: what its report calls apart."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

pytest.importorskip("ray.serve", reason="the extra `ray` is not installed")

from redraft.bench.rollout import allowed_processors, apart

TWO_THREADS = """
import os, sys, threading, time
def narrow():
    os.sched_setaffinity(0, {int(sys.argv[1])})
    print("ready", flush=True)
    time.sleep(60)
threading.Thread(target=narrow, daemon=True).start()
time.sleep(60)
"""


def test_replicas_are_apart_if_each_has_one_set_that_no_other_has() -> None:
    def sets(*found: set[int]) -> set[frozenset[int]]:
        return {frozenset(one) for one in found}

    assert apart({1: sets({0, 4}), 2: sets({1, 5})})
    assert not apart({1: sets({0, 4}), 2: sets({4, 5})})
    assert not apart({1: sets({0}, {0, 1}), 2: sets({2})})
    assert not apart({1: sets({0}), 2: sets({0})})
    assert not apart({1: sets({0}), 2: sets()})


def test_the_processors_are_those_of_all_threads() -> None:
    every = frozenset(os.sched_getaffinity(0))
    if len(every) < 2:
        pytest.skip("one processor has one set of itself")
    process = subprocess.Popen([sys.executable, "-c", TWO_THREADS, str(min(every))], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        end = time.monotonic() + 10
        while len(found := allowed_processors(process.pid)) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        assert found == {every, frozenset({min(every)})}
    finally:
        process.kill()
        process.wait()
