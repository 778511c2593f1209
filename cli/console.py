"""Output of every command: JSON to the standard output, progress to the standard error."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import typer

SECONDS_BETWEEN_COUNTS = 3
_COUNTS = str.maketrans("", "", "0123456789#. %")
"""Removes from a line what counts on, so that its stage stays."""


class Reporter(Protocol):
    """Receives one line of progress."""

    def __call__(self, message: str) -> None: ...


Status = Literal["ok", "absent", "warning", "broken"]


@dataclass(frozen=True)
class Finding:
    """One checked part. `broken` means that the CPU path cannot work; `hint` says how to fix it."""

    name: str
    status: Status
    found: str
    hint: str | None = None


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object. Refuses NaN and infinities, which are not JSON."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def print_table(rows: Sequence[Sequence[str]], title: str) -> None:
    """Print a title and rows of text, the header first; all but the first column are aligned right."""
    typer.echo(title)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        typer.echo("  ".join([first.ljust(widths[0]), *cells]).rstrip())


@contextmanager
def progress(quiet: bool = False) -> Iterator[Reporter]:
    """Report stages to the standard error: one live line on a terminal, a line a stage otherwise."""
    if quiet:
        yield lambda message: None
    elif sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status("starting") as status:
            yield lambda message: status.update(message)
    else:
        yield _Lines()


def print_caveats(caveats: Iterable[str]) -> None:
    """Print caveats to the standard error, one line each."""
    for caveat in caveats:
        print(f"beware: {caveat}", file=sys.stderr)


class _Lines:
    """Prints a stage when it begins, and its counts from time to time."""

    def __init__(self) -> None:
        self._start = self._latest = time.monotonic()
        self._stage = ""

    def __call__(self, message: str) -> None:
        now, stage = time.monotonic(), message.translate(_COUNTS)
        if stage == self._stage and now - self._latest < SECONDS_BETWEEN_COUNTS:
            return
        self._latest, self._stage = now, stage
        print(f"[{now - self._start:6.1f} s] {message}", file=sys.stderr, flush=True)
