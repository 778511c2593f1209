"""Texts on the terminal while they are written: colours by origin, and two answers side by side."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

if TYPE_CHECKING:
    from redraft.runtime.generation import Piece

STYLES = {"verifier": "", "lookup": "green", "drafter": "cyan", "resampled": "magenta"}
WORDS = {
    "verifier": "by the model itself", "lookup": "looked up in the text", "drafter": "drafted",
    "resampled": "drafted by resampling",
}  # fmt: skip
"""The meaning of origins of `redraft.runtime.generation`, in the order in which users see them."""
SECONDS_BETWEEN_DRAWINGS = 0.1


def styled(text: str, origin: str) -> Text:
    """Return a text in the colour of its origin."""
    return Text(text, style=STYLES[origin])


def print_counts(counts: Mapping[str, int]) -> None:
    """Print numbers of tokens by origin, which explains the colours too."""
    shown = [styled(f"{counts[origin]} {words}", origin) for origin, words in WORDS.items() if counts.get(origin)]
    total = sum(counts.values())
    Console(highlight=False, soft_wrap=True).print(Text.assemble(f"  of {total} tokens: ", Text(", ").join(shown)))


class Answer:
    """The pieces of one text so far. end: what follows the last one, an ellipsis if the text was cut off."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.end = ""
        self.counts: Counter[str] = Counter()
        self.pieces: list[Piece] = []

    def add(self, piece: Piece) -> None:
        """Add a token's piece."""
        self.counts[piece.origin] += 1
        self.pieces.append(piece)


class SideBySide:
    """Answers to one prompt in columns: on a terminal drawn again while they grow, and once when the context ends."""

    def __init__(self, prompt: str, answers: Sequence[Answer], quiet: bool = False) -> None:
        self._prompt = prompt
        self._answers = answers
        self._quiet = quiet
        self._live: Live | None = None
        self._latest = 0.0

    def __enter__(self) -> SideBySide:
        if not self._quiet:
            console = Console(highlight=False)
            console.print()
            console.print(Text(self._prompt.rstrip(), style="bold"))
            self._live = Live(console=console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.update(self._columns(self._live.console.width))
            self._live.stop()
            if not self._live.console.is_terminal:  # where the last drawing ends without a line's end
                self._live.console.line()

    def draw(self) -> None:
        """Draw the answers, unless that was done a moment ago: drawing takes time from decoding."""
        now = time.monotonic()
        if self._live is not None and self._live.console.is_terminal and now - self._latest > SECONDS_BETWEEN_DRAWINGS:
            self._live.update(self._columns(self._live.console.width), refresh=True)
            self._latest = time.monotonic()

    def _columns(self, width: int) -> Columns:
        panels = []
        for answer in self._answers:
            pieces = [styled(piece.text, piece.origin) for piece in answer.pieces]
            panels.append(Panel(Text.assemble(*pieces, answer.end), title=answer.title, width=max(width // 2 - 1, 30)))
        return Columns(panels)
