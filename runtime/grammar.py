"""What a text must match: a JSON schema, a regular expression or a grammar (`redraft.runtime.sampling.constraints`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redraft.errors import UsageError

JSON_SCHEMA, REGEX, LARK = "JSON schema", "regular expression", "grammar"
_EXAMPLE = 'for example {"type": "object"}'


@dataclass(frozen=True)
class Grammar:
    """What a text must match.

    kind: JSON_SCHEMA, REGEX or LARK.   text: its source, for example the schema as JSON.
    Raises UsageError for a source that is not text, and for a JSON schema that is not a JSON object.
    """

    kind: str
    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise UsageError(f"a {self.kind} is a text, not {self.text!r}")
        if self.kind != JSON_SCHEMA:
            return
        try:
            found = json.loads(self.text, parse_constant=_no_constant)
        except ValueError as error:
            raise UsageError(f"the JSON schema is not JSON: {error}", _EXAMPLE) from None
        if not isinstance(found, dict):
            raise UsageError(f"a JSON schema is a JSON object, not {found!r}", _EXAMPLE)


def requested_grammar(
    json_schema: str | None, regex: str | None, grammar: str | None, json_object: bool
) -> Grammar | None:
    """Return the one grammar of a request, or None. Raises UsageError for two, and for one that is not valid."""
    kinds = {"json_schema": JSON_SCHEMA, "regex": REGEX, "grammar": LARK, "json_object": JSON_SCHEMA}
    texts = (json_schema, regex, grammar, '{"type": "object"}' if json_object else None)
    given = {name: text for name, text in zip(kinds, texts, strict=True) if text is not None}
    if len(given) > 1:
        raise UsageError(f"a text can match one of {' and '.join(given)}", "give one of them")
    return next((Grammar(kinds[name], text) for name, text in given.items()), None)


def schema_text(schema: Mapping[str, Any]) -> str:
    """Return a JSON schema as JSON. Raises UsageError for a value that JSON lacks."""
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the JSON schema has a value that JSON lacks: {error}", _EXAMPLE) from None


def _no_constant(name: str) -> None:
    """Refuse NaN and infinities, which Python's JSON has and JSON lacks."""
    raise ValueError(f"{name} is no number of JSON")
