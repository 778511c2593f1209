"""A picture of some steps of a trace that `redraft profile --out` wrote.

    python -m experiments.trace_picture TRACE -o PNG [--first 20] [--steps 4]

Above are the ranges of these steps, nested from top to bottom. Below are the verified and the accepted tokens of every
step of the run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redraft.bench.command import run
from redraft.errors import DataError
from redraft.runtime.profiling import ENGINE, STEP

COLOURS = {
    STEP: "#d9d9d9", "offers": "#8dd3c7", "resample": "#fdb462", "draft": "#80b1d3", "choose": "#bebada",
    "fill": "#ccebc5", "verify": "#fb8072", "accept": "#ffed6f", "commit": "#b3de69",
}  # fmt: skip
ENGINE_COLOUR = "#636363"
_LABELLED = 0.035
"""Share of the width from which on a range shows its name."""


@dataclass(frozen=True)
class Bar:
    """A range: its name, milliseconds, and the number of ranges around it."""

    name: str
    start_ms: float
    ms: float
    depth: int


def main() -> dict[str, Any]:
    """Draw the picture that the options describe."""
    options = _arguments()
    trace = read(options.trace)
    bars = window(trace["traceEvents"], options.first, options.steps)
    draw(bars, counters(trace["traceEvents"]), describe(trace, options.first, options.steps), options.out)
    return {"picture": str(options.out), "bytes": options.out.stat().st_size, "ranges": len(bars)}


def read(path: Path) -> dict[str, Any]:
    """Return a trace. Raises DataError for a file without one."""
    try:
        trace: dict[str, Any] = json.loads(path.read_bytes())
        trace["traceEvents"][0]["ph"]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(f"{path} is no trace: {error}", "write one with `redraft profile --out`") from None
    return trace


def window(events: Sequence[dict[str, Any]], first: int, steps: int) -> list[Bar]:
    """Return the ranges of `steps` steps from number `first` on (the first is 0), time beginning with them.

    Raises DataError if the trace has fewer.
    """
    found = sorted((event for event in events if event["ph"] == "X"), key=lambda event: (event["ts"], -event["dur"]))
    taken = [event for event in found if event["name"] == STEP][first : first + steps]
    if len(taken) < steps:
        raise DataError(f"the trace has no steps {first} to {first + steps - 1}", "give a smaller --first")
    start_us, end_us = taken[0]["ts"], taken[-1]["ts"] + taken[-1]["dur"]
    bars: list[Bar] = []
    open_until: list[float] = []
    for event in found:
        if not start_us <= event["ts"] < end_us:
            continue
        while open_until and open_until[-1] <= event["ts"]:
            open_until.pop()
        bars.append(Bar(event["name"], (event["ts"] - start_us) / 1e3, event["dur"] / 1e3, len(open_until)))
        open_until.append(event["ts"] + event["dur"])
    return bars


def counters(events: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Return values by name, in order."""
    values: dict[str, list[float]] = {}
    for event in events:
        if event["ph"] == "C":
            values.setdefault(event["name"], []).append(event["args"]["value"])
    return values


def describe(trace: dict[str, Any], first: int, steps: int) -> str:
    """Describe the picture in one line."""
    about = trace.get("otherData", {})
    machine = about.get("environment", {})
    where = f"{machine.get('cpu', '')}, {machine.get('threads', '?')} threads"
    return f"{about.get('engines', '')}, {about.get('method', '')}: steps {first} to {first + steps - 1} ({where})"


def draw(bars: Sequence[Bar], counted: dict[str, list[float]], title: str, out: Path) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, (above, below) = pyplot.subplots(2, figsize=(12, 5), height_ratios=(2, 1), layout="constrained")
    whole_ms = max(bar.start_ms + bar.ms for bar in bars)
    for bar in bars:
        colour = ENGINE_COLOUR if bar.name.startswith(ENGINE) else COLOURS.get(bar.name, "#ffffff")
        above.broken_barh([(bar.start_ms, bar.ms)], (-bar.depth - 0.92, 0.92), facecolor=colour, edgecolor="white")
        if bar.ms > _LABELLED * whole_ms:
            text = f"{bar.name.removeprefix(ENGINE)}\n{bar.ms:.2f} ms"
            dark = "white" if colour == ENGINE_COLOUR else "black"
            middle = (bar.start_ms + bar.ms / 2, -bar.depth - 0.46)
            above.annotate(text, middle, ha="center", va="center", fontsize=7, color=dark, clip_on=True)
    above.set(title=title, xlabel="ms", xlim=(0, whole_ms), yticks=[])
    handles = [Patch(color=colour) for colour in (*COLOURS.values(), ENGINE_COLOUR)]
    figure.legend(handles, [*COLOURS, "engine call"], ncols=10, fontsize=8, loc="outside lower center")
    for name, values in counted.items():
        below.step(range(len(values)), values, where="mid", label=name)
    below.set(xlabel="step", xlim=(0, None), ylim=(0, None))
    below.xaxis.get_major_locator().set_params(integer=True)
    if counted:
        below.legend(fontsize=7)
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="trace of `redraft profile --out`")
    parser.add_argument("-o", dest="out", type=Path, required=True, help="the picture, PNG")
    parser.add_argument("--first", type=int, default=20, help="first step shown")
    parser.add_argument("--steps", type=int, default=4, help="steps shown")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
