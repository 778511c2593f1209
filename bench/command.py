"""Measuring as a command: one JSON object out, errors as one line, options that several commands have."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redraft.errors import RedraftError, UsageError
from redraft.types import Budget


def run(main: Callable[[], dict[str, Any]]) -> None:
    """Print the result of `main` as JSON. Errors end the process as in `one_line_errors`."""
    with one_line_errors():
        print(as_json(main()))


def as_json(result: dict[str, Any]) -> str:
    """Return a result as indented JSON. Raises ValueError for infinities and NaN."""
    return json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False)


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of text, the header first, as a table of Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], ["---"] * len(rows[0]), *rows[1:]))


def read_json(path: Path, hint: str) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one for other JSON. Raises UsageError with `hint`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint) from None
    except ValueError:
        raise UsageError(f"{path} is no JSON", hint) from None
    return value if isinstance(value, dict) else {}


@contextmanager
def one_line_errors() -> Iterator[None]:
    """On an error print one line and exit with its status, or 130."""
    try:
        yield
    except RedraftError as error:
        print(f"redraft: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        print("redraft: error: interrupted", file=sys.stderr)
        sys.exit(130)


def bundle_parser(
    text: str | None, max_new_tokens: int, limit: int | None = None, bundles: bool = False
) -> argparse.ArgumentParser:
    """Return a parser with the options of commands that decode prompts by a bundle.

    text: the module's docstring.   max_new_tokens, limit: defaults; None for all prompts of a kind.
    bundles: True takes one bundle or more.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=Path, required=True, nargs="+" if bundles else None, help="an engine bundle")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSON lines")
    parser.add_argument("--limit", type=int, default=limit, help="at most this many prompts of each kind")
    parser.add_argument("--max-new-tokens", type=int, default=max_new_tokens)
    return parser


def sizes(text: str) -> tuple[int, ...]:
    """Return the numbers of a comma-separated option. Raises ValueError, as argparse wants."""
    values = tuple(int(part) for part in text.split(","))
    if min(values) < 1:
        raise ValueError(text)
    return values


def budget(text: str) -> Budget:
    """Parse a budget like `nodes=12,depth=4,width=4`. Raises ValueError for other text."""
    pairs = {key.strip(): int(value) for key, value in (part.split("=") for part in text.split(","))}
    if set(pairs) != {"nodes", "depth", "width"}:
        raise ValueError(text)
    try:
        return Budget(**pairs)
    except UsageError as error:
        raise ValueError(text) from error


def rates(text: str) -> tuple[float, ...]:
    """Parse probabilities by depth like `0.9,0.8,0.7`. Raises ValueError for other text."""
    values = tuple(float(part) for part in text.split(","))
    if not all(0 <= value <= 1 for value in values):
        raise ValueError(text)
    return values


class Sections:
    """Figures by section, also in the file `out` if one is given.

    The file is written after every section, so that the figures outlive a later failure.
    """

    def __init__(self, out: Path | None = None) -> None:
        self.figures: dict[str, Any] = {}
        self.out = out

    def put(self, section: str, value: Any) -> None:
        """Set a section."""
        self.figures[section] = value
        self._write()

    def add(self, section: str, entry: Any) -> None:
        """Append to a section that is a list."""
        self.figures.setdefault(section, []).append(entry)
        self._write()

    def fill(self, measure: Callable[[Sections], None]) -> dict[str, Any]:
        """Run `measure`, which fills the sections, and return the figures. An error becomes a section too."""
        try:
            measure(self)
        except Exception as error:
            self.put("error", reason_of(error))
            raise
        return self.figures

    def _write(self) -> None:
        if self.out is None:
            return
        self.out.parent.mkdir(parents=True, exist_ok=True)
        part = self.out.with_name(f"{self.out.name}.part")
        part.write_text(as_json(self.figures) + "\n")
        os.replace(part, self.out)


def reason_of(error: Exception) -> str:
    """Return an error as one line."""
    line = " ".join(str(error).split())
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
