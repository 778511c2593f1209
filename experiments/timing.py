"""Timing several things in one run, block by block in turn, so that a slow minute of the machine affects all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np

from redraft.bench.environment import SETTLE_SECONDS

WARM_UP_RUNS = 4


def interleaved(calls: Mapping[str, Callable[[], None]], blocks: int = 8, runs: int = 12) -> dict[str, list[float]]:
    """Return milliseconds of every run by name. A block warms up one call, then times it `runs` times."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(blocks):
        for name, call in calls.items():
            time.sleep(SETTLE_SECONDS)
            for _ in range(WARM_UP_RUNS):
                call()
            for _ in range(runs):
                start = time.perf_counter()
                call()
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def medians(calls: Mapping[str, Callable[[], None]], blocks: int = 8, runs: int = 12) -> dict[str, float]:
    """Return median milliseconds by name; see `interleaved`."""
    return {name: float(np.median(values)) for name, values in interleaved(calls, blocks, runs).items()}
