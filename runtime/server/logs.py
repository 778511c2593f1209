"""The form of the log: one line a message, as text or as a JSON object."""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
FIELDS = "redraft_fields"
"""Name of a message's values in its `extra`."""
_PLAIN = re.compile(r"[\w./:+-]+", re.ASCII)


def configure_logging(form: LogFormat, level: LogLevel) -> None:
    """Write redraft's messages from `level` on to the standard error, and warnings of other libraries.

    It replaces the process's handlers.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("redraft").setLevel(level.upper())


class JsonLines(logging.Formatter):
    """A JSON object a line, in ASCII: `time` in UTC, `level`, `logger`, `message`, the message's own values."""

    def format(self, record: logging.LogRecord) -> str:
        values = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return json.dumps(values)


class TextLines(logging.Formatter):
    """`TIME level logger: message key=value …`. Values with other characters than those of words are JSON."""

    def format(self, record: logging.LogRecord) -> str:
        message = " ".join(record.getMessage().splitlines())
        values = "".join(f" {name}={_text(value)}" for name, value in _fields(record).items())
        line = f"{_time(record)} {record.levelname.lower()} {record.name}: {message}{values}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the values of a message that are known. Times have microseconds."""
    given: dict[str, Any] = getattr(record, FIELDS, {})
    return {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in given.items()
        if value is not None
    }


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _text(value: Any) -> str:
    return value if isinstance(value, str) and _PLAIN.fullmatch(value) else json.dumps(value, separators=(",", ":"))
