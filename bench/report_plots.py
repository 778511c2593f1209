"""The pictures of a report, as PNG and SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from redraft.bench.plots import COLOURS, figure, saved
from redraft.bench.report_runs import ALL

_MARKERS = "osD^vPX*<>"


def draw(report: Mapping[str, Any], title: str, folder: Path) -> dict[str, list[Path]]:
    """Draw all pictures that the report has figures for. Returns the files by the picture's name."""
    made = {
        "speed": _speed(report, title, folder),
        "acceptance": _lines(
            {name: each["conditional"] for name, each in report["depths"].items()},
            "acceptance, given the tokens before", title, folder, "acceptance",
        ),
        "misaligned": _lines(
            {name: each["misaligned"] for name, each in report["depths"].items()},
            "misaligned tokens", title, folder, "misaligned",
        ),
        "costs": _costs(report["costs"], title, folder),
    }  # fmt: skip
    for number, one in enumerate(report["trained"]):
        curves = {
            table["title"]: [(row["place"], row["tau"][ALL]) for row in table["rows"]]
            for table in one["tables"]
            if table.get("curve")
        }
        if curves:
            made[f"passes{number or ''}"] = _curves(curves, title, folder, f"passes{number or ''}")
        name = f"trained{number or ''}"
        rows = {row["run"]: row for row in one["tables"][0]["rows"]} if one["tables"] else one["runs"]
        made[name] = _lines(
            {run: [share["mean"] for share in row["depths"]] for run, row in rows.items()},
            "acceptance, given the tokens before", f"{title}, held-out texts", folder, name,
        )  # fmt: skip
    return made


def _speed(report: Mapping[str, Any], title: str, folder: Path) -> list[Path]:
    """Draw speed over plain decoding by method, over all outputs that do not loop, with intervals."""
    drawn, axes = figure(8, 4)
    names, width = report["methods"], 0.8 / len(report["temperatures"])
    for offset, (temperature, found) in enumerate(report["temperatures"].items()):
        there = [(place, cell) for place, name in enumerate(names) if (cell := found["speeds"][name].get(ALL))]
        places, speeds = [place + offset * width for place, _ in there], [cell["speed"] for _, cell in there]
        bounds = [cell["interval"] or (cell["speed"],) * 2 for _, cell in there]
        errors = _errors(speeds, bounds)
        axes.bar(
            places, speeds, width, yerr=errors, capsize=3, color=COLOURS[offset], label=f"temperature {temperature}"
        )
    axes.axhline(1, color="#636363", linestyle="--", label="plain decoding")
    axes.set_xticks([place + width * (len(report["temperatures"]) - 1) / 2 for place in range(len(names))], names)
    axes.tick_params(axis="x", labelrotation=20)
    axes.set(ylabel="speed over plain decoding", title=title, ylim=(0, None))
    axes.legend(fontsize=8)
    return saved(drawn, folder, "speed")


def _errors(values: Sequence[float], bounds: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return lengths of error bars: below and above."""
    below = [max(value - low, 0) for value, (low, _) in zip(values, bounds, strict=True)]
    return [below, [max(high - value, 0) for value, (_, high) in zip(values, bounds, strict=True)]]


def _lines(by_method: Mapping[str, Sequence[float]], label: str, title: str, folder: Path, name: str) -> list[Path]:
    """Draw a figure by depth, a line a method."""
    drawn, axes = figure(7, 4)
    for (method, values), colour, marker in zip(by_method.items(), cycle(COLOURS), cycle(_MARKERS), strict=False):
        axes.plot(range(1, len(values) + 1), values, color=colour, marker=marker, label=method)
    axes.set(xlabel="depth of the drafted token", ylabel=label, title=title, ylim=(0, 1))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize=8, ncols=2)
    return saved(drawn, folder, name)


def _costs(costs: Mapping[str, Any], title: str, folder: Path) -> list[Path]:
    """Draw a verification's time by nodes, and a step's drafting, over the time of one node."""
    drawn, axes = figure(7, 4)
    sizes = list(map(int, costs["verify_ms"]))
    one = costs["verify_ms"]["1"]
    axes.plot(
        sizes, [ms / one for ms in costs["verify_ms"].values()], color="#636363", marker="o", label="verification"
    )
    for (method, ms), colour in zip(costs["draft_ms"].items(), cycle(COLOURS), strict=False):
        axes.axhline(ms / one, color=colour, linestyle="--", label=f"drafting, {method}")
    axes.set(
        xlabel="nodes of the tree, root included", ylabel="time over that of one node", title=title, ylim=(0, None)
    )
    axes.legend(fontsize=8, ncols=2)
    return saved(drawn, folder, "costs")


def _curves(
    curves: Mapping[str, Sequence[tuple[int, Mapping[str, Any]]]], title: str, folder: Path, name: str
) -> list[Path]:
    """Draw tokens a step by the place of a run in its table, a line a table: Figure 1b, by passes of training."""
    drawn, axes = figure(7, 4)
    for (label, points), colour, marker in zip(curves.items(), cycle(COLOURS), cycle(_MARKERS), strict=False):
        values = [each["mean"] for _, each in points]
        errors = _errors(values, [each["interval"] or (each["mean"],) * 2 for _, each in points])
        places = [place for place, _ in points]
        axes.errorbar(places, values, yerr=errors, capsize=3, color=colour, marker=marker, label=label)
    axes.set(xlabel="passes of training", ylabel="tokens a step, chains", title=title)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize=8)
    return saved(drawn, folder, name)
