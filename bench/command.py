"""What the programs of this folder share as commands: one JSON object out, errors as one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from redraft.errors import RedraftError, UsageError
from redraft.types import Budget

BUDGET_KEYS = ("nodes", "depth", "width")


def run(main: Callable[[], dict[str, Any]]) -> None:
    """Print what `main` measured as JSON; on an error print one line and leave with its status, or 130."""
    try:
        print(json.dumps(main(), indent=2, ensure_ascii=False, allow_nan=False))
    except RedraftError as error:
        print(f"redraft: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        print("redraft: error: interrupted", file=sys.stderr)
        sys.exit(130)


def sizes(text: str) -> tuple[int, ...]:
    """Numbers of a comma-separated option. Raises ValueError, as argparse wants."""
    values = tuple(int(part) for part in text.split(","))
    if not values or min(values) < 1:
        raise ValueError(text)
    return values


def budget(text: str) -> Budget:
    """A budget from `nodes=12,depth=4,width=4`. Raises ValueError for anything else."""
    pairs = {key.strip(): int(value) for key, value in (part.split("=") for part in text.split(","))}
    if set(pairs) != set(BUDGET_KEYS):
        raise ValueError(text)
    try:
        return Budget(**pairs)
    except UsageError as error:
        raise ValueError(text) from error


def rates(text: str) -> tuple[float, ...]:
    """Probabilities by depth from `0.9,0.8,0.7`. Raises ValueError for anything else."""
    values = tuple(float(part) for part in text.split(","))
    if not values or not all(0 <= value <= 1 for value in values):
        raise ValueError(text)
    return values
