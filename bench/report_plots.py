"""The pictures of a report, as PNG and SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from redraft.bench.compare import PLAIN
from redraft.bench.plots import COLOURS, figure, saved
from redraft.bench.prompts import ALL
from redraft.bench.report_latency import TOGETHER
from redraft.bench.report_runs import STAGES

_MARKERS = "osD^vPX*<>"
_STAGE_LABELS = {"verify": "verification", "resample": "resampling", "draft": "drafting", "host": "rest"}


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
        "stages": _stages(report["temperatures"]["0"]["stages"], title, folder),
        "positions": _positions(report["positions"], title, folder),
    }  # fmt: skip
    if report["latency"]:
        made["logits"] = _logits(report["latency"]["logits_ms"], title, folder)
    for number, one in enumerate(report["trained"]):
        if one["frequencies"]:
            name = f"frequencies{number or ''}"
            made[name] = _frequencies(one["frequencies"], f"{title}, texts of training", folder, name)
        curves = {
            table["title"]: [(row["place"], row["tau"][ALL]) for row in table["rows"]]
            for table in one["tables"]
            if table.get("curve")
        }
        if curves:
            made[f"passes{number or ''}"] = _curves(curves, title, folder, f"passes{number or ''}")
        tables = [table for table in one["tables"] if table["rows"]]
        for place, table in enumerate(tables):
            if table.get("progress") and any(row["progress"] for row in table["rows"]):
                name = progress_name(number, place)
                made[name] = _progress(table["rows"], f"{title}: {table['title']}", folder, name)
        name = f"trained{number or ''}"
        rows = {row["run"]: row for row in tables[0]["rows"]} if tables else one["runs"]
        made[name] = _lines(
            {run: [share["mean"] for share in row["depths"]] for run, row in rows.items()},
            "acceptance, given the tokens before", f"{title}, held-out texts", folder, name,
        )  # fmt: skip
    return made


def progress_name(comparison: int, table: int) -> str:
    """Return the name of the picture of a comparison's table: both count from 0, tables without rows do not count."""
    return f"progress{comparison or ''}-{table}"


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
    """Draw a verification's time by nodes, and the drafting of a verified draft, over the time of one node."""
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


def _stages(stages: Mapping[str, Mapping[str, float]], title: str, folder: Path) -> list[Path]:
    """Draw the milliseconds of a step by method as stacked stages, after Lyanna's Figure 13b."""
    drawn, axes = figure(8, 4)
    below = [0.0] * len(stages)
    names = ["plain" if name == PLAIN else name for name in stages]
    for stage, colour in zip(STAGES, COLOURS, strict=False):
        heights = [each[stage] for each in stages.values()]
        axes.bar(names, heights, 0.7, bottom=below, color=colour, label=_STAGE_LABELS.get(stage, stage))
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.tick_params(axis="x", labelrotation=20)
    axes.set(ylabel="ms a step", title=f"{title}, temperature 0", ylim=(0, None))
    axes.legend(fontsize=8, ncols=2)
    return saved(drawn, folder, "stages")


def _positions(positions: Mapping[str, Sequence[Mapping[str, Any]]], title: str, folder: Path) -> list[Path]:
    """Draw accepted tokens of a block by its position in the output, a line a method: SD²'s Figure 5."""
    drawn, axes = figure(8, 4)
    for (method, bins), colour, marker in zip(positions.items(), cycle(COLOURS), cycle(_MARKERS), strict=False):
        places, accepted = [each["position"] for each in bins], [each["accepted"] for each in bins]
        axes.plot(places, accepted, color=colour, marker=marker, label=method)
    axes.set(xlabel="position in the output", ylabel="accepted tokens a block", ylim=(0, None))
    axes.set_title(f"{title}, temperature 0")
    axes.legend(fontsize=8, ncols=2)
    return saved(drawn, folder, "positions")


def _progress(rows: Sequence[Mapping[str, Any]], title: str, folder: Path, name: str) -> list[Path]:
    """Draw accepted tokens of chains, accuracy and loss by training step, a line a run.

    The first is SD²'s Figure 4, the others are Lyanna's Figure 5. Without losses of all runs, there are two.
    """
    with_loss = all(each["loss"] is not None for row in rows for each in row["progress"])
    drawn, axes = figure(7, 10 if with_loss else 7, rows=3 if with_loss else 2)
    tokens, accuracy, losses = axes[0], axes[1], axes[2:]
    for row, colour, marker in zip(rows, cycle(COLOURS), cycle(_MARKERS), strict=False):
        steps = [each["step"] for each in row["progress"]]
        how = {"color": colour, "marker": marker, "label": row["run"]}
        tokens.plot(steps, [each["chain_tokens"] - 1 for each in row["progress"]], **how)
        accuracy.plot(steps, [each["accuracy"] for each in row["progress"]], **how)
        for loss in losses:
            loss.plot(steps, [each["loss"] for each in row["progress"]], **how)
            loss.set(ylabel="training loss, mean since the point before")
    tokens.set(ylabel="accepted tokens a step, chains", title=title)
    accuracy.set(ylabel="accuracy, mean over depths")
    axes[-1].set(xlabel="training step")
    tokens.legend(fontsize=8)
    return saved(drawn, folder, name)


def _frequencies(shares: Sequence[Sequence[float]], title: str, folder: Path, name: str) -> list[Path]:
    """Draw the share of a text's tokens that are among the most frequent ones: Lyanna's Figure 7, summed up."""
    drawn, axes = figure(7, 4)
    axes.plot([100 * part for part, _ in shares], [100 * share for _, share in shares], color=COLOURS[0], marker="o")
    axes.set_xscale("log")
    axes.set(xlabel="most frequent tokens, % of the vocabulary", ylabel="% of the tokens of the texts", title=title)
    return saved(drawn, folder, name)


def _logits(logits: Mapping[str, Mapping[str, Any]], title: str, folder: Path) -> list[Path]:
    """Draw milliseconds of the logits of N steps, in one pass and one after another: Lyanna's Figure 13a."""
    drawn, axes = figure(7, 4)
    for way, colour, marker in zip(("one_pass", "iterative"), COLOURS, _MARKERS, strict=False):
        taken = [found[way][TOGETHER]["median"] for found in logits.values()]
        axes.plot(list(map(int, logits)), taken, color=colour, marker=marker, label=way.replace("_", " "))
    axes.set(xlabel="drafted tokens", ylabel="ms for head, softmax and top-k", title=title, ylim=(0, None))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize=8)
    return saved(drawn, folder, "logits")
