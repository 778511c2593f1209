"""The table of stages, worked out by hand."""

from __future__ import annotations

import pytest

from redraft.bench.stages import profile, table
from redraft.errors import UsageError
from redraft.runtime.observe.profiling import Recorded


def step(start: float, verify_ms: float) -> list[Recorded]:
    """A step of 10 ms with 1 ms for offers and `verify_ms` for verifying, of which all but 1 ms is in the engine."""
    at, end = start + 2e-3, start + (2 + verify_ms) * 1e-3
    return [Recorded("offers", start, start + 1e-3, 1), Recorded("engine.verifier", at, end - 1e-3, 2),
            Recorded("verify", at, end, 1), Recorded("step", start, start + 10e-3, 0)]  # fmt: skip


RANGES = [Recorded("prefill", 0.5, 0.6, 0), *step(1.0, 4), *step(2.0, 6), *step(3.0, 8)]


def test_calls_totals_percentiles_and_shares() -> None:
    found = {stage.path: stage for stage in profile(RANGES).stages}
    assert list(found) == [
        ("prefill",), ("step",), ("step", "offers"), ("step", "verify"), ("step", "verify", "engine.verifier")
    ]  # fmt: skip
    verify = found["step", "verify"]
    assert (verify.calls, verify.total_ms, verify.mean_ms) == (3, pytest.approx(18), pytest.approx(6))
    assert (verify.p50_ms, verify.p99_ms) == (pytest.approx(6), pytest.approx(7.96))
    assert verify.share == pytest.approx(0.6)
    assert found["prefill",].share is None


def test_stages_of_the_metrics_and_the_time_outside_engines() -> None:
    found = profile(RANGES)
    assert found.stage_ms == pytest.approx({"draft": 3, "verify": 18, "resample": 0, "host": 9})
    assert found.outside_engines == pytest.approx(0.5)


def test_the_table_shows_nested_stages_and_the_rest() -> None:
    rows = table(profile(RANGES))
    assert [row[0] for row in rows] == [
        "range", "prefill", "step", "  offers", "  verify", "    engine.verifier", "  (between)"
    ]  # fmt: skip
    assert rows[-1] == ("  (between)", "", "9.0", "3.000", "", "", "30.0%")
    assert rows[1][-1] == ""


def test_a_run_without_steps_is_refused() -> None:
    with pytest.raises(UsageError, match="raise --max-new-tokens"):
        profile(RANGES[:1])
