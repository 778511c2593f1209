"""Turns to figures: tokens a second by decoder and mode, ratios from pairs, and texts that differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from redraft.bench.peers.base import DRAFT, PLAIN
from redraft.bench.peers.ours import NAME
from redraft.bench.peers.turns import Key, Question, Results
from redraft.bench.peers.worker import Opened, Turn
from redraft.bench.prompts import ALL
from redraft.bench.statistics import Timing, first_difference, loops, rate_of, speedup


def figures(results: Results, questions: Sequence[Question], opened: Mapping[Key, Opened]) -> dict[str, Any]:
    """Return all figures as JSON: `decoders` and `ratios` by precision and name, and what was decoded."""
    precisions = list(dict.fromkeys(key.precision for key in results.turns))
    return {
        "prompts": len(questions),
        "new_tokens": sum(question.count for question in questions),
        "looping_answers": sum(loops(question.answer) for question in questions),
        "decoders": {
            p: _by_name(results, p, lambda key: _decoder(results, questions, key, opened)) for p in precisions
        },
        "ratios": {p: _by_name(results, p, lambda key: _ratios(results, questions, key)) for p in precisions},
        "failed": {str(key): reason for key, reason in results.failed.items()},
    }


def _by_name(results: Results, precision: str, figure: Callable[[Key], dict[str, Any] | None]) -> dict[str, Any]:
    """Return a figure of every decoder of a precision that has one."""
    found = {key.name: figure(key) for key in results.turns if key.precision == precision}
    return {name: value for name, value in found.items() if value is not None}


def _decoder(results: Results, questions: Sequence[Question], key: Key, opened: Mapping[Key, Opened]) -> dict[str, Any]:
    """Return a decoder's figures.

    busy_threads: processor time over time, while it decodes.
    idle_cpu_ms: the most processor time between two of its turns. Below the pause before turns, no other loses.
    """
    modes = results.turns[key]
    turns = [turn for mode in modes.values() for turn in mode]
    return {
        "settings": dict(opened[key].settings),
        "modes": {mode: _mode(results, questions, key, mode) for mode in modes},
        "busy_threads": sum(turn.cpu_seconds for turn in turns) / sum(turn.wall_seconds for turn in turns),
        "idle_cpu_ms": 1e3 * max(turn.idle_cpu_seconds for turn in turns),
    }


def _mode(results: Results, questions: Sequence[Question], key: Key, mode: str) -> dict[str, Any]:
    """Return tokens a second, and the outputs that differ from our plain text; None if ours has failed."""
    turns, ours = results.turns[key][mode], results.turns.get(Key(NAME, key.precision))
    differences = None if ours is None else _differences(questions, turns, ours[PLAIN])
    return {"tokens_per_second": rate_of(_timings(turns)), "differences": differences}


def _differences(questions: Sequence[Question], turns: Sequence[Turn], plain: Sequence[Turn]) -> list[dict[str, Any]]:
    """Return an entry for each output that differs: its prompt, and the first token that differs."""
    places = (first_difference(a.decoded.token_ids, b.decoded.token_ids) for a, b in zip(plain, turns, strict=True))
    return [
        {"prompt": question.prompt.id, "token": place}
        for question, place in zip(questions, places, strict=True)
        if place is not None
    ]


def _ratios(results: Results, questions: Sequence[Question], key: Key) -> dict[str, Any] | None:
    """Return how many times as fast ours is as a peer's best mode on the same prompts.

    same_mode: of the peer's drafts by a second model over ours.
    """
    ours = results.turns.get(Key(NAME, key.precision))
    if key.name == NAME or ours is None:
        return None
    modes = results.turns[key]
    best = max(modes, key=lambda mode: rate_of(_timings(modes[mode])))
    theirs = modes[best]
    found = {"best_mode": best, "modes": {mode: _ratio(theirs, turns, questions) for mode, turns in ours.items()}}
    pair = {DRAFT: _ratio(modes[DRAFT], ours[DRAFT], questions)} if DRAFT in modes and DRAFT in ours else {}
    return found | {"same_mode": pair}


def _ratio(theirs: Sequence[Turn], ours: Sequence[Turn], questions: Sequence[Question]) -> dict[str, Any]:
    """Return ratios with intervals (`speedup`): over `all` prompts, those whose answer does not loop, and by kind.

    `not_looping` is None if every answer loops.
    """
    pairs = list(zip(questions, _timings(theirs), _timings(ours), strict=True))
    steady = [pair for pair in pairs if not loops(pair[0].answer)]
    kinds = {kind: [pair for pair in pairs if pair[0].prompt.kind == kind] for kind in _kinds(questions)}

    def over(some: Sequence[tuple[Question, Timing, Timing]]) -> dict[str, Any]:
        return speedup([pair[1] for pair in some], [pair[2] for pair in some]).to_json()

    return {
        ALL: over(pairs),
        "not_looping": over(steady) if steady else None,
        "kinds": {kind: over(some) for kind, some in kinds.items()},
    }


def _kinds(questions: Sequence[Question]) -> list[str]:
    return sorted({question.prompt.kind for question in questions})


def _timings(turns: Sequence[Turn]) -> list[Timing]:
    return [turn.decoded.timing for turn in turns]
