"""The figures as Markdown: two tables, and a line of settings for each decoder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from redraft.bench.peers.ours import NAME
from redraft.bench.prompts import ALL
from redraft.bench.statistics import interval_text, rate_text, ratio_text

TITLES = {"int8": "8 bits", "int4": "4 bits"}


def markdown(result: Mapping[str, Any]) -> str:
    """Return the result of the command as Markdown."""
    return "\n".join((*_introduction(result), "", *_speeds(result), "", *_ratios(result), "", *_notes(result)))


def _introduction(result: Mapping[str, Any]) -> Iterator[str]:
    machine = result["environment"]
    yield (
        f"Tokens a second over {result['prompts']} prompts, {result['new_tokens']} new tokens, "
        f"{result['looping_answers']} answers that loop; {machine['threads']} threads, {machine['cpu']}."
    )


def speed_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Return tokens a second by library and mode, a column for each precision, with a header."""

    def cells(figures: Mapping[str, Any]) -> dict[str, str]:
        return {mode: rate_text(found["tokens_per_second"]) for mode, found in figures["modes"].items()}

    return _rows(result, "decoders", "mode", (NAME, *result["peers"]), cells)


def ratio_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Return our speed over the best mode of each peer by our mode, a column for each precision, with a header."""

    def cells(figures: Mapping[str, Any]) -> dict[str, str]:
        best, found = figures["best_mode"], {}
        for mode, ratios in figures["modes"].items():
            found[mode] = f"{_estimate(ratios['all'])} of {best}"
            if result["looping_answers"]:
                steady = ratios["not_looping"]
                found[f"{mode}, not looping"] = f"{_estimate(steady)} of {best}" if steady else "every answer loops"
        for mode, ratios in figures["same_mode"].items():
            found[f"{mode}, same mode"] = _estimate(ratios[ALL])
        return found

    return _rows(result, "ratios", f"{NAME}'s mode", result["peers"], cells)


def _speeds(result: Mapping[str, Any]) -> Iterator[str]:
    yield from _table(speed_rows(result))


def _ratios(result: Mapping[str, Any]) -> Iterator[str]:
    yield f"Speed of {NAME} by its mode, over the best mode of a peer, with 95 % intervals."
    yield ""
    yield from _table(ratio_rows(result))


def _estimate(found: Mapping[str, Any]) -> str:
    ratio = ratio_text(found["rate"], found["base_rate"])
    return f"{ratio} ({interval_text(*(found['interval'] or (None, None)))})"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield _row(*rows[0])
    yield _row(*("---" for _ in rows[0]))
    yield from (_row(*row) for row in rows[1:])


def _rows(
    result: Mapping[str, Any],
    section: str,
    title: str,
    names: Sequence[str],
    cells: Callable[[Mapping[str, Any]], dict[str, str]],
) -> list[list[str]]:
    """Return a header, and a row for each name and mode with a column for each precision.

    title: of the column of modes.   cells: gives texts by mode from a name's figures.
    """
    columns = result["precisions"]
    rows = [["", title, *(TITLES.get(precision, precision) for precision in columns)]]
    for name in names:
        found = {p: cells(result[section][p][name]) for p in columns if name in result[section].get(p, {})}
        absent = {p: _absence(result, section, name, p) for p in columns if p not in found}
        for mode in dict.fromkeys(mode for texts in found.values() for mode in texts) or ("",):
            rows.append([name, mode, *(found[p].get(mode, "-") if p in found else absent[p] for p in columns)])
    return rows


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
