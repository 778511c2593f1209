"""The picture of a trace: which ranges it shows, and that it is one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.trace_picture import Bar, counters, describe, draw, read, window
from redraft.errors import DataError
from redraft.runtime.profiling import Recording


def write_trace(path: Path, steps: int = 3) -> Path:
    """Steps of 4 ms, each with a verification of 2 ms after 1 ms, its engine's call as long."""
    recording = Recording()
    for start in range(steps):
        for name in ("step", "verify", "engine.verifier"):
            recording.enter(name)
        for name, first, last in (("engine.verifier", 1, 3), ("verify", 1, 3), ("step", 0, 4)):
            recording.leave(name, start + first * 1e-3, start + last * 1e-3)
        recording.count("tree nodes", start + 1)
    with path.open("w") as file:
        recording.write(file, {"engines": "tiny", "method": "lyanna", "environment": {"cpu": "CPU", "threads": 2}})
    return path


def test_a_window_holds_its_steps_and_their_ranges(tmp_path: Path) -> None:
    events = read(write_trace(tmp_path / "trace.json"))["traceEvents"]
    bars = window(events, first=1, steps=1)
    assert bars == [Bar("step", 0, 4, 0), Bar("verify", 1, 2, 1), Bar("engine.verifier", 1, 2, 2)]
    assert [bar.start_ms for bar in window(events, 1, 2) if bar.depth == 0] == pytest.approx([0, 1000])
    with pytest.raises(DataError, match="no steps 2 to 3"):
        window(events, first=2, steps=2)


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    trace = read(write_trace(tmp_path / "trace.json"))
    title = describe(trace, 0, 2)
    assert title == "tiny, lyanna: steps 0 to 1 (CPU, 2 threads)"
    assert counters(trace["traceEvents"]) == {"tree nodes": [1, 2, 3]}
    draw(window(trace["traceEvents"], 0, 2), counters(trace["traceEvents"]), title, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("text", ["", "{}", "[]", json.dumps({"traceEvents": [3]})])
def test_a_file_that_is_no_trace(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(DataError, match="redraft profile --out"):
        read(tmp_path / "file")
