"""A measurement's JSON, written again after every part of it, so that what was found outlives what fails later."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Report:
    """What was found so far, by section; also in the file `out` if one is named."""

    def __init__(self, out: Path | None = None) -> None:
        self.found: dict[str, Any] = {}
        self.out = out

    def put(self, section: str, value: Any) -> None:
        """Set a section."""
        self.found[section] = value
        self._write()

    def add(self, section: str, entry: Any) -> None:
        """Append to a section that is a list."""
        self.found.setdefault(section, []).append(entry)
        self._write()

    def fill(self, measure: Callable[[Report], None]) -> dict[str, Any]:
        """All that `measure` puts here. What it raises goes on, and is a line of the report."""
        try:
            measure(self)
        except Exception as error:
            self.put("error", reason_of(error))
            raise
        return self.found

    def _write(self) -> None:
        if self.out is None:
            return
        self.out.parent.mkdir(parents=True, exist_ok=True)
        part = self.out.with_name(f"{self.out.name}.part")
        part.write_text(json.dumps(self.found, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
        os.replace(part, self.out)


def reason_of(error: Exception) -> str:
    """An error as one line of a report."""
    line = " ".join(str(error).split())
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
