"""The ranges of a run: their nesting, the clock's seconds, and no work without a watcher."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from redraft.bench.stages import profile, with_paths
from redraft.runtime import Generation, Runtime, SpeculationParams
from redraft.runtime.observe.metrics import Clock
from redraft.runtime.observe.profiling import ENGINE, STEP, Nvtx, Recorded, Recording, StageTimers
from redraft.types import Budget
from tests.runtime.fakes import greedy, know_costs, make_runtime

PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]
PARTS = {"offers", "catch-up", "resample", "draft", "choose", "fill", "verify", "accept", "commit"}
BUDGET = Budget(6, 3, 2)


def run(runtime: Runtime, watcher: object) -> Generation:
    """Decode with a watcher and a drafter in every step."""
    with runtime.verifier.ranges.listening(watcher):  # type: ignore[arg-type]
        return runtime.generate([PROMPT], greedy(40), speculation=SpeculationParams(budget=BUDGET))[0]


@pytest.fixture(scope="module")
def watched(lyanna_bundle: Path) -> tuple[Recording, Generation]:
    """Return the recording of a bundle with a drafter."""
    recording = Recording()
    with pytest.MonkeyPatch.context() as patch:
        know_costs(patch)
        with Runtime.open(lyanna_bundle, threads=1, verify=False) as runtime:
            return recording, run(runtime, recording)


def test_a_trace_is_the_json_that_perfetto_reads(watched: tuple[Recording, Generation]) -> None:
    file = io.StringIO()
    watched[0].write(file, {"method": "lyanna"})
    trace = json.loads(file.getvalue())
    events = trace["traceEvents"]
    assert trace["otherData"] == {"method": "lyanna"}
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    assert {event["name"] for event in events if event["ph"] == "M"} == {"process_name", "thread_name"}
    assert len({(event["pid"], event["tid"]) for event in events}) == 1
    assert min(event["ts"] for event in events if event["ph"] != "M") == 0
    assert sum(event["ph"] == "X" for event in events) == len(watched[0].ranges)


def test_the_events_of_a_trace_nest(watched: tuple[Recording, Generation]) -> None:
    """In the order of the file, an event ends before those that enclose it, as the format demands of one thread."""
    file = io.StringIO()
    watched[0].write(file)
    open_ns: list[tuple[int, str]] = []
    around: dict[str, set[str]] = {}
    for event in json.loads(file.getvalue())["traceEvents"]:
        if event["ph"] != "X":
            continue
        start = round(event["ts"] * 1e3)
        end = start + round(event["dur"] * 1e3)
        while open_ns and open_ns[-1][0] <= start:
            open_ns.pop()
        assert not open_ns or end <= open_ns[-1][0]
        around.setdefault(event["name"], set()).add(open_ns[-1][1] if open_ns else "")
        open_ns.append((end, event["name"]))
    assert around[STEP] == {""}
    assert {name for name, outer in around.items() if STEP in outer} == PARTS
    assert around["engine.verifier"] == {"prefill", "verify"}
    assert around["engine.lyanna.resample"] == {"resample"}
    assert around["engine.lyanna.draft"] == {"draft"}


def test_parts_of_a_step_sum_to_less_than_it(watched: tuple[Recording, Generation]) -> None:
    totals = [0.0, 0.0]
    for path, ms in with_paths(watched[0].ranges):
        if path[0] == STEP and len(path) < 3:
            totals[len(path) - 1] += ms
    steps_ms, parts_ms = totals
    assert 0.5 * steps_ms < parts_ms <= steps_ms


def test_the_metrics_are_sums_of_the_same_ranges(watched: tuple[Recording, Generation]) -> None:
    recording, generation = watched
    found, metrics = profile(recording.ranges), generation.metrics
    assert found.stage_ms == pytest.approx(metrics.stage_ms, rel=1e-6)
    assert found.outside_engines == pytest.approx(metrics.overhead_fraction, rel=1e-6)
    assert min(found.stage_ms.values()) > 0
    step = next(stage for stage in found.stages if stage.path == (STEP,))
    assert step.calls == metrics.num_steps


def test_every_step_counts_verified_and_accepted_tokens(watched: tuple[Recording, Generation]) -> None:
    recording, generation = watched
    values: dict[str, list[float]] = {}
    for name, _, value in recording.counts:
        values.setdefault(name, []).append(value)
    assert len(values["tree nodes"]) == len(values["accepted tokens"]) == generation.metrics.num_steps
    assert sum(values["tree nodes"]) - generation.metrics.num_steps == generation.metrics.num_draft_tokens
    assert sum(values["accepted tokens"]) >= generation.metrics.num_accepted_draft_tokens > 0


@pytest.mark.parametrize(
    ("verify", "own", "drafting", "moved"),
    [(10.0, 6.0, 5.0, 4.0), (10.0, 6.0, 3.0, 3.0), (10.0, 11.0, 5.0, 0.0), (10.0, 10.0, 5.0, 0.0)],
)
def test_time_that_the_verifier_waits_for_a_draft_is_the_drafts(
    monkeypatch: pytest.MonkeyPatch, verify: float, own: float, drafting: float, moved: float
) -> None:
    """It is at most as long as the draft, and excludes the verifier's own work."""
    now = iter([0.0, 1.0, 1.0, 1.0 + verify])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    clock = Clock()
    ranges = StageTimers(clock)
    for name in ("draft", "verify"):
        with ranges.stage(name):
            pass
    ranges.waited_for("draft", drafting, own)
    assert (clock.draft, clock.verify) == (1.0 + moved, verify - moved)
    assert (ranges.stage("draft").latest, ranges.stage("verify").latest) == (1.0 + moved, verify - moved)


def test_nothing_is_recorded_without_a_watcher() -> None:
    runtime, recording = make_runtime(), Recording()
    run(runtime, recording)
    seen = len(recording.ranges), len(recording.counts)
    again = runtime.generate([PROMPT], greedy(40), speculation=SpeculationParams(budget=BUDGET))[0]
    assert (len(recording.ranges), len(recording.counts)) == seen > (0, 0)
    assert again.metrics.stage_ms["verify"] > 0


def test_an_unwatched_range_that_no_metric_needs_never_reads_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = StageTimers(Clock())
    readings = []
    monkeypatch.setattr(time, "perf_counter", lambda: readings.append(1) or float(len(readings)))
    with ranges.stage("fill"), ranges.stage("commit"):
        pass
    assert readings == []
    with ranges.stage("draft"):
        pass
    assert (len(readings), ranges.clock.draft, ranges.stage("draft").latest) == (2, 1.0, 1.0)


def test_ranges_of_no_length_stay_inside_of_those_around_them() -> None:
    """The clock may be too coarse, or stand still."""
    recording = Recording()
    recording.ranges = [Recorded("engine.verifier", 1.0, 1.0, 2), Recorded("verify", 1.0, 1.0, 1),
                        Recorded(STEP, 1.0, 1.0, 0)]  # fmt: skip
    assert [path for path, _ in with_paths(recording.ranges)] == [
        (STEP,), (STEP, "verify"), (STEP, "verify", "engine.verifier")
    ]  # fmt: skip
    file = io.StringIO()
    recording.write(file)
    names = [event["name"] for event in json.loads(file.getvalue())["traceEvents"] if event["ph"] == "X"]
    assert names == [STEP, "verify", "engine.verifier"]


def test_nvtx_gets_the_ranges_that_a_recording_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges are pushed and popped in pairs, and each name is registered once."""
    stack: list[str] = []
    paths: list[tuple[str, ...]] = []
    registered: list[str] = []

    def push(name: str) -> None:
        stack.append(name)
        paths.append(tuple(stack))

    def register(message: str) -> str:
        registered.append(message)
        return message

    domain = SimpleNamespace(push_range=push, pop_range=stack.pop, get_event_attributes=register)
    domains: list[Any] = []
    fake = SimpleNamespace(get_domain=lambda name: domains.append(name) or domain)
    monkeypatch.setitem(sys.modules, "nvtx", fake)
    recording = Recording()
    run(make_runtime(), recording)
    run(make_runtime(), Nvtx())
    assert domains == ["redraft"]
    assert stack == []
    assert paths == [path for path, _ in with_paths(recording.ranges)]
    assert sorted(registered) == sorted(set(registered))
    assert any(name.startswith(ENGINE) for name in registered)


def test_nvtx_itself_takes_the_calls() -> None:
    pytest.importorskip("nvtx")
    assert run(make_runtime(), Nvtx()).metrics.num_steps > 0
