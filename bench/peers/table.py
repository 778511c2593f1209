"""The figures as Markdown: two tables, and a line of settings for each decoder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from redraft.bench.peers.ours import NAME
from redraft.bench.statistics import interval_text

TITLES = {"int8": "8 bits", "int4": "4 bits"}


def markdown(result: Mapping[str, Any]) -> str:
    """Return the result of the command as Markdown."""
    return "\n".join((*_introduction(result), "", *_speeds(result), "", *_ratios(result), "", *_notes(result)))


def _introduction(result: Mapping[str, Any]) -> Iterator[str]:
    machine = result["environment"]
    yield (
        f"Milliseconds a token: medians over {result['prompts']} prompts, {result['new_tokens']} new tokens, "
        f"{result['looping_answers']} answers that loop; {machine['threads']} threads, {machine['cpu']}."
    )


def _speeds(result: Mapping[str, Any]) -> Iterator[str]:
    def cells(figures: Mapping[str, Any]) -> dict[str, str]:
        return {mode: f"{found['ms_per_token']['median']:.1f}" for mode, found in figures["modes"].items()}

    yield from _table(result, "decoders", "mode", (NAME, *result["peers"]), cells)


def _ratios(result: Mapping[str, Any]) -> Iterator[str]:
    def cells(figures: Mapping[str, Any]) -> dict[str, str]:
        best, found = figures["best_mode"], {}
        for mode, ratios in figures["modes"].items():
            found[mode] = f"{_estimate(ratios['all'])} of {best}"
            if result["looping_answers"]:
                steady = ratios["not_looping"]
                found[f"{mode}, not looping"] = f"{_estimate(steady)} of {best}" if steady else "every answer loops"
        for mode, ratios in figures["same_mode"].items():
            found[f"{mode}, same mode"] = _estimate(ratios["all"])
        return found

    yield f"Speed of {NAME} by its mode, over the best mode of a peer: medians of pairs with 95 % intervals."
    yield ""
    yield from _table(result, "ratios", f"{NAME}'s mode", result["peers"], cells)


def _estimate(found: Mapping[str, Any]) -> str:
    return f"{found['median']:.2f} ({interval_text(found['low'], found['high'])})"


def _table(
    result: Mapping[str, Any],
    section: str,
    title: str,
    names: Sequence[str],
    cells: Callable[[Mapping[str, Any]], dict[str, str]],
) -> Iterator[str]:
    """Yield the lines of a table with a row for each name and mode, and a column for each precision.

    title: of the column of modes.   cells: gives texts by mode from a name's figures.
    """
    columns = result["precisions"]
    yield _row("", title, *(TITLES.get(precision, precision) for precision in columns))
    yield _row(*("---" for _ in ("", title, *columns)))
    for name in names:
        found = {p: cells(result[section][p][name]) for p in columns if name in result[section].get(p, {})}
        absent = {p: _absence(result, section, name, p) for p in columns if p not in found}
        for mode in dict.fromkeys(mode for texts in found.values() for mode in texts) or ("",):
            yield _row(name, mode, *(found[p].get(mode, "-") if p in found else absent[p] for p in columns))


def _absence(result: Mapping[str, Any], section: str, name: str, precision: str) -> str:
    """Return why a table has no figures of a decoder in a precision."""
    if f"{name} {precision}" in result["failed"]:
        return "failed"
    if section == "ratios" and name in result["decoders"].get(precision, {}):
        return f"{NAME} failed"
    return "not installed" if name in result["left_out"] else "not measured"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _notes(result: Mapping[str, Any]) -> Iterator[str]:
    for precision, decoders in result["decoders"].items():
        yield from (_note(result, name, precision, figures) for name, figures in decoders.items())
    yield from (f"- {name} is not installed: `{install}`" for name, install in result["left_out"].items())
    yield from (f"- {key} failed: {reason}" for key, reason in result["failed"].items())


def _note(result: Mapping[str, Any], name: str, precision: str, figures: Mapping[str, Any]) -> str:
    texts = ", ".join(f"{mode} {_same(result, found)}" for mode, found in figures["modes"].items())
    return (
        f"- {name} {result['versions'][name]} {precision}: {json.dumps(figures['settings'], ensure_ascii=False)}; "
        f"{figures['busy_threads']:.1f} busy threads, at most {figures['idle_cpu_ms']:.0f} ms of processor time "
        f"between turns; texts equal to our plain ones: {texts}"
    )


def _same(result: Mapping[str, Any], mode: Mapping[str, Any]) -> str:
    differences = mode["differences"]
    if differences is None:
        return "not compared"
    return f"{result['prompts'] - len(differences)} of {result['prompts']}"
