"""Lines of progress: the share done and the time left follow the pace, and a pipe gets few lines."""

from __future__ import annotations

import pytest

from redraft.assembly import progress
from redraft.assembly.progress import BuildProgress
from redraft.cli import console


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that both modules see."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_time_left_follows_the_pace(clock: list[float]) -> None:
    lines: list[str] = []
    build = BuildProgress(lines.append)
    with build.stage("trace"):
        assert lines == ["trace, 0 s so far"]
        build.expect({"trace": 10.0, "write": 20.0, "check": 10.0})
        assert build.line() == ".................... 0 %, 40 s left: trace"
        clock[0] += 6  # silent, and as fast as expected
        assert build.line() == "###................. 15 %, 34 s left: trace"
        clock[0] += 14  # twice the expected time, but for a twentieth
        assert build.line().startswith("#####............... 24 %, 64 s left")
    with build.stage("write") as done:
        assert lines[1] == "#####............... 25 %, 60 s left: write"
        done(1, 2)
        clock[0] += 20
        assert build.line() == "##########.......... 50 %, 40 s left: write 50 %"
        with build.stage("trace") as inner:  # a stage within another one is no new one
            inner(1, 1)
        assert build.line() == "##########.......... 50 %, 40 s left: write 50 %"
    with build.stage("write"):  # the choice of bits begins a stage again
        assert build.line() == "#####............... 25 %, 120 s left: write"


def test_a_pipe_gets_a_line_a_stage_and_one_from_time_to_time(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with console.progress() as report:
        for second in range(8):
            clock[0] = 100.0 + second
            report(f"####.... {second} %, {9 - second} s left: write {second} %")
        report("####.... 9 %, 1 s left: check")
    shown = [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines()]
    seconds = [0, 3, 6]
    assert shown[:-1] == [f"####.... {second} %, {9 - second} s left: write {second} %" for second in seconds]
    assert shown[-1].endswith("check")
