"""Output of the parts of `experiments.lyanna`: tables in plain text, and progress on the error stream."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence


def render(tables: Mapping[str, Sequence[Sequence[str]]]) -> str:
    """Return tables by title as text, columns aligned, the first row a header."""
    return "\n\n".join(f"{title}\n\n{_aligned(rows)}" for title, rows in tables.items())


def note(message: str) -> None:
    """Print one line of progress."""
    print(message, file=sys.stderr, flush=True)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
