"""The held-out texts that builds measure on."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).resolve()
HELD_OUT = (HERE.parent / "heldout", HERE.parents[1] / "assets/tiny/heldout")
"""The folder of held-out text in an installed package and in the repository."""


def held_out_texts() -> dict[str, Path]:
    """Return redraft's own held-out text by kind."""
    return {path.stem: path for folder in HELD_OUT for path in sorted(folder.glob("*.txt"))}
