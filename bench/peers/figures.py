"""Turns to figures: milliseconds a token by decoder and mode, ratios from pairs, and texts that differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from redraft.bench.peers.base import DRAFT, PLAIN
from redraft.bench.peers.ours import NAME
from redraft.bench.peers.turns import Key, Question, Results
from redraft.bench.peers.worker import Opened, Turn
from redraft.bench.prompts import ALL
from redraft.bench.statistics import first_difference, loops, median_estimate


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
    """Return milliseconds a token, and the outputs that differ from our plain text; None if ours has failed."""
    turns, ours = results.turns[key][mode], results.turns.get(Key(NAME, key.precision))
    differences = None if ours is None else _differences(questions, turns, ours[PLAIN])
    return {"ms_per_token": vars(median_estimate(_ms(turns))), "differences": differences}


def _differences(questions: Sequence[Question], turns: Sequence[Turn], plain: Sequence[Turn]) -> list[dict[str, Any]]:
    """Return an entry for each output that differs: its prompt, and the first token that differs."""
    places = (first_difference(a.decoded.token_ids, b.decoded.token_ids) for a, b in zip(plain, turns, strict=True))
    return [
        {"prompt": question.prompt.id, "token": place}
        for question, place in zip(questions, places, strict=True)
        if place is not None
    ]


def _ratios(results: Results, questions: Sequence[Question], key: Key) -> dict[str, Any] | None:
    """Return the times of a peer's best mode over ours on the same prompts: above 1, we are faster.

    same_mode: of the peer's drafts by a second model over ours.
    """
    ours = results.turns.get(Key(NAME, key.precision))
    if key.name == NAME or ours is None:
        return None
    modes = results.turns[key]
    best = min(modes, key=lambda mode: median_estimate(_ms(modes[mode])).median)
    theirs = _ms(modes[best])
    found = {"best_mode": best, "modes": {mode: _ratio(theirs, _ms(turns), questions) for mode, turns in ours.items()}}
    pair = {DRAFT: _ratio(_ms(modes[DRAFT]), _ms(ours[DRAFT]), questions)} if DRAFT in modes and DRAFT in ours else {}
    return found | {"same_mode": pair}


def _ratio(theirs: Sequence[float], ours: Sequence[float], questions: Sequence[Question]) -> dict[str, Any]:
    """Return medians of pairs with intervals: over `all` prompts, those whose answer does not loop, and by kind.

    `not_looping` is None if every answer loops.
    """
    pairs = [(question, a / b) for question, a, b in zip(questions, theirs, ours, strict=True)]
    steady = [ratio for question, ratio in pairs if not loops(question.answer)]
    kinds = {
        kind: [ratio for question, ratio in pairs if question.prompt.kind == kind]
        for kind in sorted({question.prompt.kind for question in questions})
    }
    return {
        ALL: vars(median_estimate([ratio for _, ratio in pairs])),
        "not_looping": vars(median_estimate(steady)) if steady else None,
        "kinds": {kind: vars(median_estimate(ratios)) for kind, ratios in kinds.items()},
    }


def _ms(turns: Sequence[Turn]) -> list[float]:
    return [turn.decoded.ms_per_token for turn in turns]
