"""Texts on the terminal while they are written: colours by origin, and two answers side by side."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.columns import Columns
    from rich.text import Text

    from redraft.runtime.pieces import Piece

STYLES = {"verifier": "", "lookup": "green", "drafter": "cyan"}
WORDS = {"verifier": "by the model itself", "lookup": "looked up in the text", "drafter": "drafted"}
"""What the origins of `redraft.runtime.pieces` mean, in the order in which users see them."""
SECONDS_BETWEEN_DRAWINGS = 0.08


def styled(text: str, origin: str) -> Text:
    """Return a text in the colour of its origin."""
    from rich.text import Text

    return Text(text, style=STYLES[origin])


def print_counts(counts: Mapping[str, int]) -> None:
    """Print numbers of tokens by origin, which explains the colours too."""
    from rich.console import Console
    from rich.text import Text

    shown = [styled(f"{counts[origin]} {words}", origin) for origin, words in WORDS.items() if counts.get(origin)]
    total = sum(counts.values())
    Console(highlight=False, soft_wrap=True).print(Text.assemble(f"  of {total} tokens: ", Text(", ").join(shown)))


class Answer:
    """The pieces of one text so far."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.counts: Counter[str] = Counter()
        self.pieces: list[Piece] = []

    def add(self, piece: Piece) -> None:
        """Add a token's piece."""
        self.counts[piece.origin] += 1
        self.pieces.append(piece)


class SideBySide:
    """Answers to one prompt in columns, drawn again while they grow, and a last time when the context ends.

    shown: False without a terminal; then nothing is drawn.
    """

    def __init__(self, prompt: str, answers: Sequence[Answer], quiet: bool = False) -> None:
        self._prompt = prompt
        self._answers = answers
        self.shown = sys.stdout.isatty() and not quiet
        self._latest = 0.0

    def __enter__(self) -> SideBySide:
        if self.shown:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(highlight=False), auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.shown:
            self._live.update(self._columns())
            self._live.stop()

    def draw(self) -> None:
        """Draw the answers, unless that was done a moment ago: drawing takes time from decoding."""
        now = time.monotonic()
        if self.shown and now - self._latest > SECONDS_BETWEEN_DRAWINGS:
            self._live.update(self._columns(), refresh=True)
            self._latest = time.monotonic()

    def _columns(self) -> Columns:
        from rich.columns import Columns
        from rich.panel import Panel
        from rich.text import Text

        width = max(self._live.console.width // 2 - 2, 30)
        between = "" if self._prompt.endswith("\n") else "\n\n"
        panels = []
        for answer in self._answers:
            text = Text(self._prompt + between, style="dim")
            body = Text.assemble(text, *(styled(piece.text, piece.origin) for piece in answer.pieces))
            panels.append(Panel(body, title=answer.title, width=width))
        return Columns(panels)


def print_plainly(prompt: str, texts: Mapping[str, str]) -> None:
    """Print a prompt and the answers by name without any colour, equal ones once."""
    by_text: dict[str, list[str]] = {}
    for name, text in texts.items():
        by_text.setdefault(text, []).append(name)
    print(f"\nprompt: {prompt.rstrip()}")
    for text, names in by_text.items():
        print(f"{' and '.join(names)}: {text}")
