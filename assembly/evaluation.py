"""The held-out texts that builds measure on."""

from __future__ import annotations

from pathlib import Path

HELD_OUT = Path(__file__).resolve().parents[1] / "assets" / "tiny" / "heldout"


def held_out_texts(folder: Path = HELD_OUT) -> dict[str, Path]:
    """Return the repository's held-out text by kind. A wheel has none."""
    return {path.stem: path for path in sorted(folder.glob("*.txt"))}
