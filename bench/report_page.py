"""The pictures of a report, and its HTML page, which needs no other file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import cycle
from pathlib import Path
from typing import Any

from redraft.bench.compare import PLAIN, STAGES
from redraft.bench.controllers import tables
from redraft.bench.load import table as load_table
from redraft.bench.long_prompts import table as long_prompt_table
from redraft.bench.plots import COLOURS, GREY, Pictures, Points
from redraft.bench.prompts import ALL
from redraft.bench.report_inputs import SIGNIFICANT, TOGETHER, latency_tables, peer_tables
from redraft.bench.statistics import interval_text
from redraft.errors import UsageError

PAGE, FIGURES = "report.html", "report.json"
_TEMPLATE, LOAD_TEMPLATE = "report.html.jinja", "load.html.jinja"
_STAGE_LABELS = {"verify": "verification", "resample": "resampling", "draft": "drafting", "host": "rest"}


def write_page(
    report: Mapping[str, Any], pictures: Mapping[str, Sequence[Path]], folder: Path, template: str = _TEMPLATE
) -> Path:
    """Write the page into a folder. Pictures are its SVG files, as part of the page. Raises UsageError."""
    import jinja2

    sources = files("redraft.bench")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(lambda name: sources.joinpath(name).read_text(encoding="utf-8")),
    )  # fmt: skip
    filters: dict[str, Any] = {
        "bounds": interval_text,
        "controller_tables": tables,
        "latency_tables": latency_tables,
        "load_table": load_table,
        "long_prompt_table": long_prompt_table,
        "peer_tables": peer_tables,
    }
    environment.filters |= filters
    environment.globals |= {"progress_name": progress_name, "SIGNIFICANT": SIGNIFICANT}
    drawn = {
        name: _inline(next(path for path in paths if path.suffix == ".svg"), name) for name, paths in pictures.items()
    }
    path = folder / PAGE
    try:
        path.write_text(environment.get_template(template).render(report=report, pictures=drawn), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", "give another folder") from None
    return path


def _inline(path: Path, name: str) -> str:
    """Return an SVG file as an element. Its ids get the picture's name, so that pictures do not share any."""
    text = path.read_text(encoding="utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r'\bid="', f'id="{name}-', text)
    return re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", text)


def draw(report: Mapping[str, Any], title: str, folder: Path) -> dict[str, list[Path]]:
    """Draw all pictures that the report has figures for. Returns the files by the picture's name."""
    pictures = Pictures(folder, title)
    _speed(report, pictures)
    for name, key, label in (
        ("acceptance", "conditional", "acceptance, given the tokens before"),
        ("misaligned", "misaligned", "misaligned tokens"),
    ):
        _by_depth({method: each[key] for method, each in report["depths"].items()}, label, title, pictures, name)
    _costs(report["costs"], pictures)
    _stages(report["temperatures"]["0"]["stages"], pictures)
    positions = {
        method: ([each["position"] for each in bins], [each["accepted"] for each in bins])
        for method, bins in report["positions"].items()
    }
    pictures.lines(
        "positions", positions, width=8, title=f"{title}, temperature 0", ylim=(0, None),
        xlabel="position in the output", ylabel="accepted tokens a block",
    )  # fmt: skip
    if report["latency"]:
        logits = report["latency"]["logits_ms"]
        ways = {"one pass": "one_pass", "iterative": "iterative"}
        series = {
            label: (list(map(int, logits)), [times[way][TOGETHER]["median"] for times in logits.values()])
            for label, way in ways.items()
        }
        pictures.lines(
            "logits", series, whole=True, ylim=(0, None), xlabel="drafted tokens",
            ylabel="ms for head, softmax and top-k",
        )  # fmt: skip
    for number, one in enumerate(report["trained"]):
        _comparison(one, number, title, pictures)
    return pictures.files


def draw_load(report: Mapping[str, Any], title: str, folder: Path) -> dict[str, list[Path]]:
    """Draw tokens a second by method for each batch size (Lyanna, Figures 8 to 11), with bars from `batches`."""
    pictures, batches = Pictures(folder, title), report["batches"]
    methods = list(next(iter(batches.values())))
    width = 0.8 / len(methods)
    with pictures.axes("load", width=8, xlabel="requests at once", ylabel="tokens a second", ylim=(0, None)) as axes:
        for offset, method in enumerate(methods):
            rates = [each[method]["tokens_per_second"] for each in batches.values()]
            label = "plain" if method == PLAIN else method
            axes.bar([place + offset * width for place in range(len(batches))], rates, width, label=label)
        axes.set_xticks([place + width * (len(methods) - 1) / 2 for place in range(len(batches))], list(batches))
    return pictures.files


def progress_name(comparison: int, table: int) -> str:
    """Return the name of the picture of a comparison's table: both count from 0, tables without rows do not count."""
    return f"progress{comparison or ''}-{table}"


def _comparison(one: Mapping[str, Any], number: int, title: str, pictures: Pictures) -> None:
    """Draw the pictures of a comparison that `redraft train all` wrote. number: of the comparison, from 0."""
    suffix = number or ""
    if one["frequencies"]:
        parts, shares = zip(*one["frequencies"], strict=True)
        pictures.lines(
            f"frequencies{suffix}", {"": ([100 * part for part in parts], [100 * share for share in shares])},
            title=f"{title}, texts of training", xscale="log",
            xlabel="most frequent tokens, % of the vocabulary", ylabel="% of the tokens of the texts",
        )  # fmt: skip
    curves = {table["title"]: table["rows"] for table in one["tables"] if table.get("curve")}
    if curves:
        _curves(curves, f"passes{suffix}", pictures)
    tables = [table for table in one["tables"] if table["rows"]]
    for place, table in enumerate(tables):
        if table.get("progress") and any(row["progress"] for row in table["rows"]):
            _progress(table["rows"], f"{title}: {table['title']}", progress_name(number, place), pictures)
    rows = {row["run"]: row for row in tables[0]["rows"]} if tables else one["runs"]
    acceptance = {run: [share["mean"] for share in row["depths"]] for run, row in rows.items()}
    label = "acceptance, given the tokens before"
    _by_depth(acceptance, label, f"{title}, held-out texts", pictures, f"trained{suffix}")


def _by_depth(series: Mapping[str, Sequence[float]], label: str, title: str, pictures: Pictures, name: str) -> None:
    """Draw shares by depth, a line for each name."""
    points: dict[str, Points] = {label: (range(1, len(each) + 1), each) for label, each in series.items()}
    pictures.lines(
        name, points, whole=True, title=title, ylim=(0, 1), xlabel="depth of the drafted token", ylabel=label
    )


def _speed(report: Mapping[str, Any], pictures: Pictures) -> None:
    """Draw speed over plain decoding by method, over all outputs that do not loop, with intervals."""
    names, width = report["methods"], 0.8 / len(report["temperatures"])
    with pictures.axes("speed", width=8, ylabel="speed over plain decoding", ylim=(0, None)) as axes:
        for offset, (temperature, figures) in enumerate(report["temperatures"].items()):
            cells = [(place, cell) for place, name in enumerate(names) if (cell := figures["speeds"][name].get(ALL))]
            places, speeds = [place + offset * width for place, _ in cells], [cell["speed"] for _, cell in cells]
            errors = _errors(speeds, [cell["interval"] for _, cell in cells])
            axes.bar(places, speeds, width, yerr=errors, capsize=3, label=f"temperature {temperature}")
        axes.axhline(1, color=GREY, linestyle="--", label="plain decoding")
        axes.set_xticks([place + width * (len(report["temperatures"]) - 1) / 2 for place in range(len(names))], names)
        axes.tick_params(axis="x", labelrotation=20)


def _errors(values: Sequence[float], intervals: Sequence[Sequence[float] | None]) -> list[list[float]]:
    """Return lengths of error bars, below and above; 0 without an interval."""
    bounds = [interval or (value, value) for value, interval in zip(values, intervals, strict=True)]
    below = [max(value - low, 0) for value, (low, _) in zip(values, bounds, strict=True)]
    return [below, [max(high - value, 0) for value, (_, high) in zip(values, bounds, strict=True)]]


def _costs(costs: Mapping[str, Any], pictures: Pictures) -> None:
    """Draw a verification's time by nodes, and the drafting of a verified draft, over the time of one node."""
    one = costs["verify_ms"]["1"]
    with pictures.axes(
        "costs", xlabel="nodes of the tree, root included", ylabel="time over that of one node", ylim=(0, None)
    ) as axes:
        times = [ms / one for ms in costs["verify_ms"].values()]
        axes.plot(list(map(int, costs["verify_ms"])), times, color=GREY, marker="o", label="verification")
        for (method, ms), colour in zip(costs["draft_ms"].items(), cycle(COLOURS), strict=False):
            axes.axhline(ms / one, color=colour, linestyle="--", label=f"drafting, {method}")


def _curves(curves: Mapping[str, Sequence[Mapping[str, Any]]], name: str, pictures: Pictures) -> None:
    """Draw tokens a step by the place of a run in its table, a line a table: Figure 1b, by passes of training."""
    with pictures.axes(name, xlabel="passes of training", ylabel="tokens a step, chains") as axes:
        for label, rows in curves.items():
            tau = [row["tau"][ALL] for row in rows]
            means = [each["mean"] for each in tau]
            errors = _errors(means, [each["interval"] for each in tau])
            axes.errorbar([row["place"] for row in rows], means, yerr=errors, capsize=3, label=label)
        axes.xaxis.get_major_locator().set_params(integer=True)


def _stages(stages: Mapping[str, Mapping[str, float]], pictures: Pictures) -> None:
    """Draw the milliseconds of a step by method as stacked stages, after Lyanna's Figure 13b."""
    names, below = ["plain" if name == PLAIN else name for name in stages], [0.0] * len(stages)
    title = f"{pictures.title}, temperature 0"
    with pictures.axes("stages", width=8, title=title, ylabel="ms a step", ylim=(0, None)) as axes:
        for stage in STAGES:
            heights = [each[stage] for each in stages.values()]
            axes.bar(names, heights, 0.7, bottom=below, label=_STAGE_LABELS[stage])
            below = [low + height for low, height in zip(below, heights, strict=True)]
        axes.tick_params(axis="x", labelrotation=20)


def _progress(rows: Sequence[Mapping[str, Any]], title: str, name: str, pictures: Pictures) -> None:
    """Draw accepted tokens of chains, accuracy and loss by training step, a line a run.

    The first is SD²'s Figure 4, the others are Lyanna's Figure 5. Without losses of all runs, there are two.
    """
    with_loss = all(each["loss"] is not None for row in rows for each in row["progress"])
    keys = {"chain_tokens": "accepted tokens a step, chains", "accuracy": "accuracy, mean over depths"}
    keys |= {"loss": "training loss, mean since the point before"} if with_loss else {}
    with pictures.axes(name, 7, 10 if with_loss else 7, len(keys), title=title) as axes:
        for (key, label), each in zip(keys.items(), axes, strict=True):
            verifiers_own = 1 if key == "chain_tokens" else 0
            for row in rows:
                steps = [point["step"] for point in row["progress"]]
                each.plot(steps, [point[key] - verifiers_own for point in row["progress"]], label=row["run"])
            each.set(ylabel=label)
        axes[-1].set(xlabel="training step")
