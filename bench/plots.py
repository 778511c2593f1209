"""Pictures of matplotlib as PNG and SVG files, and those of a comparison of controllers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import pstdev
from typing import Any

from redraft.bench.compare import trace
from redraft.errors import UsageError
from redraft.runtime import Runtime, SamplingParams, SpeculationParams
from redraft.runtime.trees.tree import depths_of

COLOURS = ("#80b1d3", "#fb8072", "#8dd3c7", "#fdb462", "#bebada", "#b3de69", "#fccde5", "#bc80bd", "#d9d9d9", "#636363")
GREY = COLOURS[-1]
_MARKERS = list("osD^vPX*<>")
KINDS: Mapping[str, Mapping[str, Any]] = {"png": {"dpi": 110}, "svg": {"metadata": {"Date": None}}}
"""Files of a picture, and how matplotlib writes them."""
Points = tuple[Sequence[float], Sequence[float]]
"""Places and values."""


def check_plots() -> None:
    """Raise UsageError if plots cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("plots need matplotlib", "install redraft[bench], or leave the plots out") from None


class Pictures:
    """Draws pictures into a folder. files: those of each picture by its name, one for each of `kinds`."""

    def __init__(self, folder: Path, title: str, kinds: Sequence[str] = (*KINDS,)) -> None:
        self.files: dict[str, list[Path]] = {}
        self.title = title
        self._folder = folder
        self._kinds = kinds

    @contextmanager
    def axes(self, name: str, width: float = 7, height: float = 4, rows: int = 1, **settings: Any) -> Iterator[Any]:
        """Yield the axes to draw on, a list of them if `rows` is given; then write the picture.

        width, height: in inches.   settings: of the axes, or of the first ones.   Raises UsageError if writing fails.
        """
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        drawn, axes = pyplot.subplots(rows, figsize=(width, height), layout="constrained", squeeze=False)
        first, listed = axes[0, 0], list(axes[:, 0])
        for each in listed:
            each.set_prop_cycle(color=COLOURS, marker=_MARKERS)
        try:
            yield first if rows == 1 else listed
            drawn.suptitle(settings.pop("title", self.title), fontsize="large")
            first.set(**settings)
            if first.get_legend_handles_labels()[0]:
                first.legend(fontsize=8, ncols=2)
            self.files[name] = self._write(drawn, name)
        finally:
            pyplot.close(drawn)

    def lines(self, name: str, series: Mapping[str, Points], whole: bool = False, **settings: Any) -> None:
        """Draw a line for each name. whole: True if places are whole numbers."""
        with self.axes(name, **settings) as axes:
            for label, (places, values) in series.items():
                axes.plot(places, values, label=label)
            if whole:
                axes.xaxis.get_major_locator().set_params(integer=True)

    def _write(self, drawn: Any, name: str) -> list[Path]:
        from matplotlib import rc_context

        paths = [self._folder / f"{name}.{kind}" for kind in self._kinds]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with rc_context({"svg.hashsalt": name}):
                for path, kind in zip(paths, self._kinds, strict=True):
                    drawn.savefig(path, format=kind, **KINDS[kind])
        except OSError as error:
            raise UsageError(f"cannot write plots to {self._folder}: {error.strerror}", "give another folder") from None
        return paths


@dataclass(frozen=True)
class Step:
    """A step of one text: its position, the length of its draft, and how many of its tokens were accepted."""

    position: int
    drafted: int
    accepted: int


def steps_of(
    runtime: Runtime, prompt: Sequence[int], params: SamplingParams, speculation: SpeculationParams
) -> list[Step]:
    """Return the steps of decoding a prompt."""
    lines = map(json.loads, trace(runtime, prompt, params, speculation)[0])
    return [
        Step(line["position"] - len(prompt) + 1, max(depths_of(line["parents"])), len(line["path"]))
        for line in lines
        if "position" in line
    ]


def draw_throughput(result: Mapping[str, Any], pictures: Pictures) -> None:
    """Draw Figure 1 of the GammaTune paper: tokens a second of controllers, with the deviation over first lengths."""
    rates = {
        name: [one["tokens_per_second"] for one in controller["lengths"].values()]
        for name, controller in result["controllers"].items()
    }
    means, deviations = [sum(each) / len(each) for each in rates.values()], list(map(pstdev, rates.values()))
    with pictures.axes("throughput", ylabel="tokens a second", ylim=(0, None)) as axes:
        axes.bar(list(rates), means, yerr=deviations, capsize=4)
        axes.axhline(result["plain_tokens_per_second"], color=GREY, linestyle="--", label="plain decoding")
        axes.tick_params(axis="x", labelrotation=20)


def draw_steps(steps: Mapping[str, Sequence[Step]], pictures: Pictures, title: str) -> None:
    """Draw Figure 2a of the GammaTune paper: accepted tokens at each step of one text, a row a controller."""
    with pictures.axes("steps", 9, 1.2 + 1.6 * len(steps), len(steps), title=title) as rows:
        listed = rows if len(steps) > 1 else [rows]
        for axes, (name, each) in zip(listed, steps.items(), strict=True):
            numbers = range(1, len(each) + 1)
            axes.bar(numbers, [step.accepted for step in each], width=1.0, color=COLOURS[0], label="accepted")
            axes.step(
                numbers, [step.drafted for step in each], where="mid", color=COLOURS[1], marker="", label="drafted"
            )
            axes.set(ylabel="tokens", ylim=(0, None))
            axes.set_title(name, fontsize=9, loc="left")
            axes.xaxis.get_major_locator().set_params(integer=True)
        listed[-1].set_xlabel("step")
