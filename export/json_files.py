"""JSON files of a checkpoint, read like transformers' configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from redraft.errors import CheckpointError

DOWNLOAD_AGAIN = "download or copy the checkpoint again"

_FLOAT = "__float__"
_FLOATS = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}
"""Floats that JSON cannot represent. transformers 5 writes them as {"__float__": "Infinity"}."""


def read_json_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in `path`, with infinities and NaN as floats.

    Raises FileNotFoundError, and CheckpointError if the file is damaged or does not hold an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_hook=_decode_float)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error})", DOWNLOAD_AGAIN) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object", DOWNLOAD_AGAIN)
    return value


def _decode_float(value: dict[str, Any]) -> Any:
    """Return the float that an object represents, else the object itself."""
    tag = value.get(_FLOAT)
    return _FLOATS.get(tag, value) if len(value) == 1 and isinstance(tag, str) else value
