"""The bound on speculation's speed, worked out by hand."""

from __future__ import annotations

import pytest

from redraft.bench.bound import achieved, speed_bound
from redraft.bench.compare import Run
from redraft.bench.prompts import Prompt
from redraft.runtime import Generation
from redraft.runtime.metrics import Metrics

METHOD = "lyanna"


def generation(steps: int, accepted: int, rate: float, draft_ms: float, sizes: tuple[int, ...] = ()) -> Generation:
    stages = {"draft": draft_ms, "resample": 0.0, "verify": 0.0, "host": 0.0}
    counts = (steps, steps, accepted, accepted, 1 + accepted / steps, 1.0, ())
    metrics = Metrics(*counts, rate, 1.0, 0.1, stages, size_histogram=sizes)
    return Generation("", (1,) * 9, "length", 1, metrics)


def test_bound_is_acceptance_over_relative_cost() -> None:
    assert speed_bound(3.0, 2.0, 2.5, 0.5) == 2.0


def test_share_of_the_bound() -> None:
    """Three steps of 3 nodes and one of 1: t(n) is the mean of their costs."""
    drafted = generation(4, 4, 150.0, 2.0, (0, 1, 0, 3))
    runs = [Run(Prompt("1", "k", ""), [1], {"none": generation(8, 0, 100.0, 0.0), METHOD: drafted})]
    found = achieved(runs, METHOD, (0.0, 1.4, 2.0, 2.2))
    assert found["verification_ms"] == {"one": 1.4, "step": pytest.approx(2.0)}
    assert found["mean_acceptance_length"] == 2.0
    assert found["draft_ms"] == 0.5
    assert found["bound"] == pytest.approx(2 * 1.4 / 2.5)
    assert found["share_of_bound"] == pytest.approx(1.5 / (2 * 1.4 / 2.5))
