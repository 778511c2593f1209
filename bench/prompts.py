"""Prompts to measure on: JSON lines with `id`, `category` (the kind) and `turns`, the user's messages."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redraft.errors import DataError, UsageError
from redraft.files import read_text

ALL = "all"
"""The name of all kinds together."""
FORM = 'expected an object such as {"id": "p1", "category": "code", "turns": ["def f("]}'


@dataclass(frozen=True)
class BenchPrompt:
    """One prompt of a file, and the kind of text it asks for.

    text: the first turn, and all of the prompt outside a chat.   later_turns: of the user, in a chat.
    """

    id: str
    kind: str
    text: str
    later_turns: tuple[str, ...] = ()

    @property
    def turns(self) -> tuple[str, ...]:
        """Return the user's messages of a chat, at least one."""
        return self.text, *self.later_turns


def load_prompts(files: Iterable[Path], limit: int | None = None) -> tuple[BenchPrompt, ...]:
    """Return the prompts of all files, at most `limit` of each kind, with kinds taking turns.

    Raises UsageError for a missing file and a limit below 1, DataError naming file and line for one that cannot be read
    or holds none.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"a limit of {limit} leaves no prompt", "give --limit at least 1")
    listed = list(files)
    ranked, seen = [], Counter[str]()
    for file in listed:
        for prompt in _read(file):
            ranked.append((seen[prompt.kind], prompt))
            seen[prompt.kind] += 1
    if not ranked:
        raise DataError(f"no prompts in {', '.join(map(str, listed))}", FORM)
    ranked.sort(key=lambda pair: pair[0])
    return tuple(prompt for rank, prompt in ranked if limit is None or rank < limit)


def _read(file: Path) -> Iterator[BenchPrompt]:
    for number, line in enumerate(read_text(file).split("\n"), start=1):
        if line.strip():
            yield _prompt(line, f"{file}, line {number}", file.stem)


def _prompt(line: str, where: str, default_kind: str) -> BenchPrompt:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({error})", FORM) from error
    turns = value.get("turns") if isinstance(value, dict) else None
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{where}: no text in `turns`", FORM)
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, str) or not turn:
            raise DataError(f"{where}: no text in `turns`, turn {number}", FORM)
    kind = str(value.get("category", default_kind))
    if kind == ALL:
        raise DataError(f"{where}: the kind {ALL!r} stands for all kinds together", "rename the category, or the file")
    return BenchPrompt(str(value.get("id", where)), kind, turns[0], tuple(turns[1:]))
