"""The figures as Markdown: two tables, and a line of settings for each decoder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from redraft.bench.peers.ours import NAME

TITLES = {"int8": "8 bits", "int4": "4 bits"}


def markdown(result: Mapping[str, Any]) -> str:
    """Return the result of the command as Markdown."""
    return "\n".join((*_introduction(result), "", *_speeds(result), "", *_ratios(result), "", *_notes(result)))


def _introduction(result: Mapping[str, Any]) -> Iterator[str]:
    machine = result["environment"]
    yield (
        f"Milliseconds a token, plain / n-gram: medians over {result['prompts']} prompts, {result['new_tokens']} new "
        f"tokens, {result['looping_answers']} answers that loop; {machine['threads']} threads, {machine['cpu']}."
    )


def _speeds(result: Mapping[str, Any]) -> Iterator[str]:
    def cell(figures: Mapping[str, Any]) -> str:
        return " / ".join(f"{mode['ms_per_token']['median']:.1f}" for mode in figures["modes"].values())

    yield from _table(result, "decoders", (NAME, *result["peers"]), cell)


def _ratios(result: Mapping[str, Any]) -> Iterator[str]:
    def cell(figures: Mapping[str, Any]) -> str:
        ours = (figures[mode]["all"] for mode in figures if mode != "best_mode")
        texts = (f"{each['median']:.2f} ({each['low']:.2f} to {each['high']:.2f})" for each in ours)
        return f"{' / '.join(texts)} of {figures['best_mode']}"

    yield f"Speed of {NAME}, plain / n-gram, over the best mode of a peer: medians of pairs with 95 % intervals."
    yield ""
    yield from _table(result, "ratios", result["peers"], cell)


def _table(
    result: Mapping[str, Any], section: str, names: Sequence[str], cell: Callable[[Mapping[str, Any]], str]
) -> Iterator[str]:
    """Yield the lines of a table with a row for each name and a column for each precision."""
    columns = result["precisions"]
    yield _row("", *(TITLES.get(precision, precision) for precision in columns))
    yield _row(*("---" for _ in (section, *columns)))
    for name in names:
        yield _row(name, *(_cell(result, section, name, precision, cell) for precision in columns))


def _cell(
    result: Mapping[str, Any], section: str, name: str, precision: str, cell: Callable[[Mapping[str, Any]], str]
) -> str:
    figures = result[section].get(precision, {}).get(name)
    if figures is not None:
        return cell(figures)
    if {f"{name} {precision}", f"{NAME} {precision}"} & result["failed"].keys():
        return "failed"
    return "not installed" if name in result["left_out"] else "not offered"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _notes(result: Mapping[str, Any]) -> Iterator[str]:
    for precision, decoders in result["decoders"].items():
        yield from (_note(result, name, precision, figures) for name, figures in decoders.items())
    yield from (f"- {name} is not installed: `{install}`" for name, install in result["left_out"].items())
    yield from (f"- {key} failed: {reason}" for key, reason in result["failed"].items())


def _note(result: Mapping[str, Any], name: str, precision: str, figures: Mapping[str, Any]) -> str:
    same = {mode: result["prompts"] - len(found["first_differences"]) for mode, found in figures["modes"].items()}
    texts = ", ".join(f"{mode} {count}" for mode, count in same.items())
    return (
        f"- {name} {result['versions'][name]} {precision}: {json.dumps(figures['settings'], ensure_ascii=False)}; "
        f"{figures['busy_threads']:.1f} busy threads, at most {figures['idle_cpu_ms']:.0f} ms of processor time "
        f"between turns; texts equal to our plain ones: {texts} of {result['prompts']}"
    )
