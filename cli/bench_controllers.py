"""The part of `redraft bench` that compares controllers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from redraft.cli.console import print_table
from redraft.errors import UsageError

if TYPE_CHECKING:
    from redraft.bench.compare import Run, Settings
    from redraft.bench.controllers import Ways
    from redraft.runtime import Runtime


def parse_ways(controllers: str | None, lengths: str | None, plots: Path | None, other: object) -> Ways:
    """Return the ways of decoding that `--controllers` names; none without the option.

    other: an option that contradicts it. Raises UsageError for an unknown controller, for lengths of another form, and
    for options that do not go together.
    """
    from redraft.bench.command import sizes
    from redraft.bench.controllers import PAPER_LENGTHS, ways_of
    from redraft.bench.plots import check_plots
    from redraft.runtime.controllers import split_controllers

    if controllers is None:
        if lengths is not None or plots is not None:
            raise UsageError("--initial-lengths and --plots belong to --controllers", "give it, or leave them out")
        return {}
    if other is not None:
        raise UsageError("--controllers takes neither --controller nor --synthetic-acceptance", "leave them out")
    if plots is not None:
        check_plots()
    try:
        return ways_of(split_controllers(controllers), PAPER_LENGTHS if lengths is None else sizes(lengths))
    except ValueError:
        raise UsageError(f"--initial-lengths {lengths!r}: expected whole numbers from 1", "such as 1,4,16") from None


def method_of(runtime: Runtime, methods: list[str]) -> str:
    """Return the one drafting method; by default the bundle's drafter. Raises UsageError for several and for none."""
    from redraft.runtime.drafters import split_pair

    if len(methods) > 1 or methods == ["none"]:
        raise UsageError("--controllers compares one drafting method", "give one with --methods")
    return methods[0] if methods else split_pair(runtime.default_method)[0]


def compare_controllers(
    runtime: Runtime, runs: list[Run], settings: Settings, ways: Ways, model: dict[str, Any], plots: Path | None
) -> dict[str, Any]:
    """Return the figures of a comparison of controllers, and draw Figures 1 and 2a into the folder `plots` if given.

    The text of Figure 2a is the first that does not loop. A controller decodes it with the middle one of its first
    lengths, `fixed` with the last one, which shows how many tokens each step could accept.
    """
    from redraft.bench.controllers import figures
    from redraft.bench.plots import Pictures, draw_steps, draw_throughput, steps_of
    from redraft.runtime.controllers import FIXED

    method = next(iter(settings.ways.values())).method
    result = {"method": method, **figures(runs, ways)}
    if plots is None:
        return result
    run = next((run for run in runs if not run.loops), None)
    if run is None or not result["controllers"]:
        raise UsageError("every output loops or is too short, so there is nothing to draw", "give other prompts")
    shown = [list(each.values())[-1 if name == FIXED else len(each) // 2] for name, each in ways.items()]
    steps = {way: steps_of(runtime, run.token_ids, settings.params, settings.ways[way]) for way in shown}
    title = f"{model['name']} {model['precision']}, {method}"
    pictures = Pictures(plots, title)
    draw_throughput(result, pictures)
    draw_steps(steps, pictures, f"{title}: {run.prompt.id}")
    return {**result, "plots": [str(path) for paths in pictures.files.values() for path in paths]}


def print_figures(result: dict[str, Any]) -> None:
    """Print the tables, and what they leave out."""
    from redraft.bench.controllers import tables

    for title, rows in tables(result):
        print_table(rows, title)
        typer.echo()
    machine = result["environment"]
    typer.echo(f"{machine['cpu']}, {machine['threads']} threads, {machine['model']['precision']}, {result['method']}")
    left_out = result["outputs"] - result["timed"]
    typer.echo(f"outputs: {result['outputs']}; left out, since they loop or are too short to time: {left_out}")
    typer.echo(f"outputs that differ from plain decoding: {result['differing_outputs']}")
    for path in result.get("plots", ()):
        typer.echo(path)
