"""What the programs of this folder share as commands: one JSON object out, errors as one line."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

from redraft.errors import RedraftError


def run(main: Callable[[], dict[str, Any]]) -> None:
    """Print what `main` measured as JSON; on an error print one line and leave with its status."""
    try:
        print(json.dumps(main(), indent=2, ensure_ascii=False, allow_nan=False))
    except RedraftError as error:
        print(f"redraft: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.exit_status)


def quiet_export() -> None:
    """Silence what tracing says about itself; errors still come."""
    warnings.filterwarnings("ignore")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)


def sizes(text: str) -> tuple[int, ...]:
    """Numbers of a comma-separated option. Raises ValueError, as argparse wants."""
    values = tuple(int(part) for part in text.split(","))
    if not values or min(values) < 1:
        raise ValueError(text)
    return values
