"""A picture of some steps of a trace that `redraft profile --out` wrote.

    python -m experiments.trace_picture TRACE -o PNG [--first 20] [--steps 4]

Above are the ranges of these steps, nested from top to bottom. Below are the verified and the accepted tokens of every
step of the run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from redraft.bench.command import run
from redraft.errors import DataError
from redraft.runtime.observe.profiling import ENGINE, STEP

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import Patch

Bar = tuple[str, float, float, int]
"""A range: its name, start and length in milliseconds, and the number of ranges around it."""
COLOURS = {
    STEP: "#d9d9d9", "offers": "#8dd3c7", "resample": "#fdb462", "draft": "#80b1d3", "choose": "#bebada",
    "fill": "#ccebc5", "verify": "#fb8072", "accept": "#ffed6f", "commit": "#b3de69", ENGINE: "#636363",
}  # fmt: skip
_LABELLED = 0.035
"""Share of the width from which on a range shows its name."""


def main() -> dict[str, Any]:
    """Draw the picture that the options describe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="trace of `redraft profile --out`")
    parser.add_argument("-o", dest="out", type=Path, required=True, help="the picture, PNG")
    parser.add_argument("--first", type=int, default=20, help="first step shown")
    parser.add_argument("--steps", type=int, default=4, help="steps shown")
    options = parser.parse_args()
    trace = json.loads(options.trace.read_bytes())
    bars = window(trace["traceEvents"], options.first, options.steps)
    about = trace.get("otherData", {})
    machine = about.get("environment", {})
    title = (
        f"{about.get('engines', '')}, {about.get('method', '')}: steps {options.first} to "
        f"{options.first + options.steps - 1} ({machine.get('cpu', '')}, {machine.get('threads', '?')} threads)"
    )
    figure, (above, below) = pyplot.subplots(2, figsize=(12, 5), height_ratios=(2, 1), layout="constrained")
    draw_ranges(above, bars, title)
    draw_counters(below, trace["traceEvents"])
    handles = [Patch(color=colour) for colour in COLOURS.values()]
    labels = ["engine call" if name == ENGINE else name for name in COLOURS]
    figure.legend(handles, labels, ncols=10, fontsize=8, loc="outside lower center")
    figure.savefig(options.out, dpi=110)
    return {"picture": str(options.out), "bytes": options.out.stat().st_size, "ranges": len(bars)}


def window(events: Sequence[dict[str, Any]], first: int, steps: int) -> list[Bar]:
    """Return the ranges of `steps` steps from number `first` on (the first is 0), time beginning with them.

    Raises DataError if the trace has fewer.
    """
    ranges = sorted((event for event in events if event["ph"] == "X"), key=lambda event: (event["ts"], -event["dur"]))
    shown = [event for event in ranges if event["name"] == STEP][first : first + steps]
    if len(shown) < steps:
        raise DataError(f"the trace has no steps {first} to {first + steps - 1}", "give a smaller --first")
    start_us, end_us = shown[0]["ts"], shown[-1]["ts"] + shown[-1]["dur"]
    bars: list[Bar] = []
    ends: list[float] = []  # of the ranges around this one
    for event in ranges:
        if start_us <= event["ts"] < end_us:
            ends = [end for end in ends if end > event["ts"]]
            bars.append((event["name"], (event["ts"] - start_us) / 1e3, event["dur"] / 1e3, len(ends)))
            ends.append(event["ts"] + event["dur"])
    return bars


def draw_ranges(axes: Any, bars: Sequence[Bar], title: str) -> None:
    """Draw nested ranges, with names in those that are wide enough."""
    whole_ms = max(start + ms for _, start, ms, _ in bars)
    for name, start, ms, depth in bars:
        engine = name.startswith(ENGINE)
        colour = COLOURS[ENGINE] if engine else COLOURS.get(name, "#ffffff")
        axes.broken_barh([(start, ms)], (-depth - 0.92, 0.92), facecolor=colour, edgecolor="white")
        if ms > _LABELLED * whole_ms:
            text, place = f"{name.removeprefix(ENGINE)}\n{ms:.2f} ms", (start + ms / 2, -depth - 0.46)
            dark = "white" if engine else "black"
            axes.annotate(text, place, ha="center", va="center", fontsize=7, color=dark, clip_on=True)
    axes.set(title=title, xlabel="ms", xlim=(0, whole_ms), yticks=[])


def draw_counters(axes: Any, events: Sequence[dict[str, Any]]) -> None:
    """Draw the counters of all steps."""
    values: dict[str, list[float]] = {}
    for event in events:
        if event["ph"] == "C":
            values.setdefault(event["name"], []).append(event["args"]["value"])
    for name, counted in values.items():
        axes.step(range(len(counted)), counted, where="mid", label=name)
    axes.set(xlabel="step", xlim=(0, None), ylim=(0, None))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize=7)


if __name__ == "__main__":
    run(main)
