"""`redraft replay`: replay a trace and check every step of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from redraft.cli.console import print_json
from redraft.cli.options import Json
from redraft.errors import DataError

if TYPE_CHECKING:
    from redraft.runtime.observe.trace import Replay


def replay(
    trace: Annotated[Path, typer.Argument(metavar="FILE", help="A file that `redraft generate --trace FILE` wrote.")],
    as_json: Json = False,
) -> None:
    """Check a trace by accepting every recorded tree again. Shows the accepted tokens of each source of trees.

    If costs decided the sizes of trees, it also shows how many tokens the estimates promised.
    """
    from redraft.files import read_text
    from redraft.runtime.observe import trace as traces

    text = read_text(trace)
    try:
        played = traces.replay(text.splitlines())
    except DataError as error:
        raise DataError(f"{trace}: {error.message}", "generate it again") from None
    if not played.requests:
        raise DataError(f"{trace}: found no step", "generate it again, with more new tokens")
    summary = summarise(played)
    print_json(summary) if as_json else typer.echo(describe(summary))


def summarise(played: Replay) -> dict[str, Any]:
    """Return counts by source, and the tokens of each request, its prompt included."""
    sources = {
        source: {
            "steps": played.steps[source],
            "nodes": played.nodes[source],
            "accepted": played.accepted[source],
            "conditional_acceptance": played.conditional_acceptance(source),
            "calibration": _calibration(played.expected[source], played.observed[source]),
        }
        for source in sorted(played.steps.keys() | played.nodes.keys())
    }
    return {
        "sources": sources,
        "tokens_per_step": _calibration(played.expected_tokens, played.observed_tokens),
        "requests": {str(number): len(ids) for number, ids in played.requests.items()},
    }


def _calibration(expected: float, brought: float) -> dict[str, float | None] | None:
    """Return what estimates promised, what came, and the promise's relative error, None if nothing came.

    None without estimates.
    """
    if not expected:
        return None
    return {"expected": expected, "brought": brought, "error": expected / brought - 1 if brought else None}


def describe(summary: dict[str, Any]) -> str:
    """Return the summary as lines."""
    lines = []
    for source, counts in summary["sources"].items():
        line = f"{source:<10} {counts['steps']} steps, {counts['nodes']} nodes, {counts['accepted']} accepted"
        if shares := counts["conditional_acceptance"]:
            depths = ", ".join(f"{100 * share:.0f} %" for share in shares)
            line += f"; accepted at each depth, given all depths before: {depths}"
        if counts["calibration"]:
            line += f"; {_promise(counts['calibration'], 1)}"
        lines.append(line)
    if summary["tokens_per_step"]:
        lines.append(f"tokens a step: {_promise(summary['tokens_per_step'], 3)}")
    requests = (f"request {number}: {count} tokens, prompt included" for number, count in summary["requests"].items())
    return "\n".join([*lines, *requests])


def _promise(calibration: dict[str, Any], digits: int) -> str:
    """Return what estimates promised and what came, in words."""
    error = "" if calibration["error"] is None else f" ({calibration['error']:+.1%})"
    return f"expected {calibration['expected']:.{digits}f}, brought {calibration['brought']:.{digits}f}{error}"
