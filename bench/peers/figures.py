"""Turns to figures: tokens a second by decoder and mode, ratios from pairs, and texts that differ; also as Markdown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import compress
from typing import Any

from redraft.bench.command import markdown_table
from redraft.bench.compare import Run
from redraft.bench.peers.base import DRAFT, PLAIN, Decoded
from redraft.bench.peers.ours import NAME
from redraft.bench.peers.turns import Key, Results
from redraft.bench.peers.worker import Turn
from redraft.bench.prompts import ALL
from redraft.bench.statistics import first_difference, interval_text, rate_of, rate_text, ratio_text, speedup

TITLES = {"int8": "8 bits", "int4": "4 bits"}


def figures(
    results: Results[Decoded], questions: Sequence[Run], settings: Mapping[Key, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return all figures as JSON: `decoders` and `ratios` by precision and name, and what was decoded."""
    precisions = dict.fromkeys(key.precision for key in results.turns)
    keys = {precision: [key for key in results.turns if key.precision == precision] for precision in precisions}
    return {
        **summary(questions),
        "decoders": {
            precision: {
                key.name: {"settings": dict(settings[key]), **_decoder(results, questions, key)} for key in some
            }
            for precision, some in keys.items()
        },
        "ratios": {
            precision: {key.name: ratios for key in some if (ratios := _ratios(results, questions, key))}
            for precision, some in keys.items()
        },
        "failed": {str(key): reason for key, reason in results.failed.items()},
    }


def summary(questions: Sequence[Run]) -> dict[str, int]:
    """Return what was decoded."""
    return {
        "prompts": len(questions),
        "new_tokens": sum(len(question.answer) for question in questions),
        "looping_answers": sum(question.loops for question in questions),
    }


def _decoder(results: Results[Decoded], questions: Sequence[Run], key: Key) -> dict[str, Any]:
    """Return a decoder's figures."""
    modes = results.turns[key]
    turns = [turn for mode in modes.values() for turn in mode]
    ours = results.turns.get(Key(NAME, key.precision))
    return {
        "modes": {
            mode: {
                "tokens_per_second": rate_of([turn.decoded.timing for turn in some]),
                "differences": None if ours is None else _differences(questions, some, ours[PLAIN]),
            }
            for mode, some in modes.items()
        },
        **processor(turns),
    }


def processor(turns: Sequence[Turn[Any]]) -> dict[str, float]:
    """Return how a decoder used the processor.

    busy_threads: processor time over time, while it decodes.
    idle_cpu_ms: the most processor time between two of its turns. Below the pause before turns, no other loses.
    """
    return {
        "busy_threads": sum(turn.cpu_seconds for turn in turns) / sum(turn.wall_seconds for turn in turns),
        "idle_cpu_ms": 1e3 * max(turn.idle_cpu_seconds for turn in turns),
    }


def _differences(
    questions: Sequence[Run], turns: Sequence[Turn[Decoded]], plain: Sequence[Turn[Decoded]]
) -> list[dict[str, Any]]:
    """Return an entry for each output that differs from our plain one: its prompt, and the first token that differs."""
    tokens = [first_difference(a.decoded.token_ids, b.decoded.token_ids) for a, b in zip(plain, turns, strict=True)]
    listed = zip(questions, tokens, strict=True)
    return [{"prompt": question.prompt.id, "token": token} for question, token in listed if token is not None]


def _ratios(results: Results[Decoded], questions: Sequence[Run], key: Key) -> dict[str, Any] | None:
    """Return how many times as fast ours is as a peer's best mode on the same prompts.

    same_mode: of the peer's drafts by a second model over ours.
    """
    ours = results.turns.get(Key(NAME, key.precision))
    if key.name == NAME or ours is None:
        return None
    modes = results.turns[key]
    best = max(modes, key=lambda mode: rate_of([turn.decoded.timing for turn in modes[mode]]))
    both = DRAFT in modes and DRAFT in ours
    return {
        "best_mode": best,
        "modes": {mode: _ratio(modes[best], turns, questions) for mode, turns in ours.items()},
        "same_mode": {DRAFT: _ratio(modes[DRAFT], ours[DRAFT], questions)} if both else {},
    }


def _ratio(theirs: Sequence[Turn[Decoded]], ours: Sequence[Turn[Decoded]], questions: Sequence[Run]) -> dict[str, Any]:
    """Return ratios with intervals (`speedup`): over `all` prompts, those whose answer does not loop, and by kind.

    `not_looping` is None if every answer loops.
    """

    def over(chosen: Sequence[bool]) -> dict[str, Any] | None:
        timings = ([turn.decoded.timing for turn in compress(side, chosen)] for side in (theirs, ours))
        return asdict(speedup(*timings)) if any(chosen) else None

    kinds = [question.prompt.kind for question in questions]
    return {
        ALL: over([True] * len(questions)),
        "not_looping": over([not question.loops for question in questions]),
        "kinds": {kind: over([kind == each for each in kinds]) for kind in sorted(set(kinds))},
    }


def markdown(result: Mapping[str, Any]) -> str:
    """Return the result of the command as Markdown: two tables, and a line of settings for each decoder."""
    machine = result["environment"]
    return "\n".join([
        f"Tokens a second over {result['prompts']} prompts, {result['new_tokens']} new tokens, "
        f"{result['looping_answers']} answers that loop; {machine['threads']} threads, {machine['cpu']}.",
        "",
        markdown_table(speed_rows(result)),
        "",
        f"Speed of {NAME} by its mode, over the best mode of a peer, with 95 % intervals.",
        "",
        markdown_table(ratio_rows(result)),
        "",
        *_notes(result),
    ])  # fmt: skip


def speed_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Return tokens a second by library and mode, a column for each precision, with a header."""

    def cells(decoder: Mapping[str, Any]) -> dict[str, str]:
        return {mode: rate_text(one["tokens_per_second"]) for mode, one in decoder["modes"].items()}

    return _rows(result, "decoders", "mode", (NAME, *result["peers"]), cells)


def ratio_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Return our speed over the best mode of each peer by our mode, a column for each precision, with a header."""

    def cells(peer: Mapping[str, Any]) -> dict[str, str]:
        best, texts = peer["best_mode"], {}
        for mode, ratios in peer["modes"].items():
            texts[mode] = f"{speedup_text(ratios[ALL])} of {best}"
            if result["looping_answers"]:
                steady = ratios["not_looping"]
                looping = f"{mode}, not looping"
                texts[looping] = f"{speedup_text(steady)} of {best}" if steady else "every answer loops"
        return texts | {f"{mode}, same mode": speedup_text(one[ALL]) for mode, one in peer["same_mode"].items()}

    return _rows(result, "ratios", f"{NAME}'s mode", result["peers"], cells)


def speedup_text(ratio: Mapping[str, Any]) -> str:
    """Return the ratio and the interval of a `Speedup` as text."""
    return f"{ratio_text(ratio['rate'], ratio['base_rate'])} ({interval_text(ratio['interval'])})"


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
        texts = {p: cells(result[section][p][name]) for p in columns if name in result[section].get(p, {})}
        absent = {p: _absence(result, section, name, p) for p in columns if p not in texts}
        for mode in dict.fromkeys(mode for each in texts.values() for mode in each) or ("",):
            rows.append([name, mode, *(texts[p].get(mode, "-") if p in texts else absent[p] for p in columns)])
    return rows


def _absence(result: Mapping[str, Any], section: str, name: str, precision: str) -> str:
    """Return why a table has no figures of a decoder in a precision."""
    if f"{name} {precision}" in result["failed"]:
        return "failed"
    if section == "ratios" and name in result["decoders"].get(precision, {}):
        return f"{NAME} failed"
    return "not installed" if name in result["left_out"] else "not measured"


def _notes(result: Mapping[str, Any]) -> Iterator[str]:
    for precision, decoders in result["decoders"].items():
        for name, decoder in decoders.items():
            texts = ", ".join(f"{mode} {_same(result, one)}" for mode, one in decoder["modes"].items())
            yield (
                f"- {name} {result['versions'][name]} {precision}: "
                f"{json.dumps(decoder['settings'], ensure_ascii=False)}; {decoder['busy_threads']:.1f} busy threads, "
                f"at most {decoder['idle_cpu_ms']:.0f} ms of processor time between turns; texts equal to our plain "
                f"ones: {texts}"
            )
    yield from (f"- {name} is not installed: `{install}`" for name, install in result["left_out"].items())
    yield from (f"- {key} failed: {reason}" for key, reason in result["failed"].items())


def _same(result: Mapping[str, Any], mode: Mapping[str, Any]) -> str:
    if mode["differences"] is None:
        return "not compared"
    return f"{result['prompts'] - len(mode['differences'])} of {result['prompts']}"
