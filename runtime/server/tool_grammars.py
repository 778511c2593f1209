"""Grammars of answers with tool calls, in llguidance's form of Lark, one for each format of calls.

`redraft.runtime.server.parts` reads every text of such a grammar as the calls that the grammar meant: where that reader
could find the beginning of a call, the grammar has a call or nothing. A marker that is a token of its own is that token
in the grammar, since llguidance may read such a token as no text. Its letters are no content either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace

from redraft.errors import UsageError
from redraft.runtime.sampling.constraints import schema_error, schema_rule
from redraft.runtime.server.errors import api_error, wrong
from redraft.runtime.server.fields import FunctionDefinition
from redraft.runtime.server.parameters import MOST_SCHEMA_BYTES, Job
from redraft.runtime.server.tool_calls import NAME_CHARACTERS
from redraft.runtime.server.tool_choice import CallRules
from redraft.runtime.server.tool_formats import AnswerFormat, ToolFormat
from redraft.runtime.text.tokenizer import Tokenizer

_SPACES = r"[ \t\n\r]*"
_FEW_SPACES = r"[ \n]{0,4}"
"""Those that an answer may have before a section. Their number is limited, as in JSON: models may repeat them."""
_ANY = "(?s:.*)"
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a function without `parameters`."""


def with_grammar(job: Job, rules: CallRules, form: AnswerFormat, tokenizer: Tokenizer) -> Job:
    """Return a job whose answers obey the rules.

    form: that of the answer to the rendered prompt.   Raises ApiError for functions that no grammar can hold.
    """
    try:
        return replace(job, sampling=replace(job.sampling, grammar=call_grammar(rules, form, tokenizer)))
    except UsageError as error:
        raise api_error(error) from None


def call_grammar(rules: CallRules, form: AnswerFormat, tokenizer: Tokenizer) -> str:
    """Return the grammar of answers that obey the rules. Raises ApiError as `with_grammar`, UsageError without
    llguidance.
    """
    return "\n".join(_Grammar(form, tokenizer).lines(rules))


class _Grammar:
    """The rules of one format.

    Terminals have capital letters. TEXT is content without a call, and FREE content that may go on with one.
    """

    def __init__(self, form: AnswerFormat, tokenizer: Tokenizer) -> None:
        assert form.tools is not None
        self._form = form
        self._tools = form.tools
        self._tokenizer = tokenizer
        self._bare = form.tools is ToolFormat.LLAMA
        self._optional = form.reasoning is not None and not form.in_reasoning

    def lines(self, rules: CallRules) -> list[str]:
        """Return all rules. The arguments of each function have a rule of their own: references in a schema are
        relative to its root.
        """
        _check_size(rules.functions)
        schemas = [_schema(function) for function in rules.functions]
        return [
            f"start: {self._start(rules.forced)}",
            *([] if rules.forced else self._content()),
            *self._reasoning(rules.forced),
            f"calls: {self._calls(rules)}",
            f"call: {' | '.join(self._call(place, one) for place, one in enumerate(rules.functions))}",
            *[f"arguments_{place}: {schema_rule(schema)}" for place, schema in enumerate(schemas)],
        ]

    def _start(self, forced: bool) -> str:
        """Return the sections of an answer. Its reasoning may end it if no call is forced."""
        answer = "calls" if forced else "(TEXT | calls)"
        if self._form.reasoning is None:
            return answer
        after = f"/{_FEW_SPACES}/ calls" if forced else answer
        found = [f"reasoning {after}"]
        if self._optional:
            found.append(answer)
        if not forced:
            found.append("unended")
        return " | ".join(found)

    def _content(self) -> list[str]:
        """Return the rules of text before a call or without one."""
        free, opener = f"FREE: /{_ANY}/{self._not_at_the_start()}", self._tools.opener
        text = f"TEXT: FREE & {_without(opener)}"
        if self._token(opener) is not None:
            return [free, text, f"opened: TEXT {self._marker(opener)}"]
        return [free, text, f"opened[lazy]: FREE {_text(opener)}"]

    def _not_at_the_start(self) -> str:
        """Return the beginnings that content may not have: those of a reasoning section and of a bare call."""
        beginnings = [r"\{"] if self._bare else []
        if self._optional and self._form.reasoning is not None:
            beginnings.append(_regex(self._form.reasoning[0]))
        return "".join(f" & ~/{_SPACES}{one}{_ANY}/" for one in beginnings)

    def _reasoning(self, forced: bool) -> list[str]:
        """Return the rules of a reasoning section that ends, and of one that does not."""
        if self._form.reasoning is None:
            return []
        opener, closer = self._form.reasoning
        begin, text = "", _ANY
        if self._optional and self._token(opener) is not None:
            begin = f"/{_FEW_SPACES}/ {self._marker(opener)} "
        elif self._optional:
            text = f"{_FEW_SPACES}{_regex(opener)}{_ANY}"
        unended = [f"unended: {begin}UNENDED", f"UNENDED: /{text}/ & {_without(closer)}"]
        if self._token(closer) is not None:
            return [*unended, f"reasoning: unended {self._marker(closer)}"]
        ended = [f"reasoning: {begin}thought", f"thought[lazy]: /{text}/ {_text(closer)}"]
        return ended if forced else [*unended, *ended]

    def _calls(self, rules: CallRules) -> str:
        """Return the calls of an answer, with the content before them if that is allowed."""
        opener = self._marker(self._tools.opener)
        first = opener if rules.forced else "opened"

        def several(begin: str, call: str, between: str) -> str:
            return f"{begin} {call}" if rules.single else f"{begin} {call} ({between} {call})*"

        if self._tools is ToolFormat.HERMES:
            closer = self._marker("</tool_call>")
            return several(first, rf"/\n?/ call /\n?/ {closer}", f"/\\n?/ {opener}")
        if self._bare:
            return several("" if rules.forced else "opened?", "call", '"; "')
        if self._form.names_first:
            return several(first, "call", opener)
        return several(f'{first} / ?/ "["', "call", '", "') + ' "]"'

    def _call(self, place: int, function: FunctionDefinition) -> str:
        """Return a call of one function."""
        if self._form.names_first:
            if not function.name or not set(function.name) <= NAME_CHARACTERS:
                raise wrong(f"this model's calls cannot have the name {function.name!r}", "tools")
            return f"{_text(function.name)} {self._marker('[ARGS]')} arguments_{place}"
        head = f'{{"name": {json.dumps(function.name)}, "{self._tools.keys[0]}": '
        return f'{_text(head)} arguments_{place} "}}"'

    def _marker(self, text: str) -> str:
        """Return a marker: its token if there is one, else its text."""
        token = self._token(text)
        return _text(text) if token is None else f"<[{token}]>"

    def _token(self, text: str) -> int | None:
        return self._tokenizer.added_id(text)


def _check_size(functions: Iterable[FunctionDefinition]) -> None:
    """Raise ApiError if the functions' schemas are too large together."""
    if (size := sum(len(json.dumps(one.parameters)) for one in functions)) > MOST_SCHEMA_BYTES:
        raise wrong(f"the functions' parameters have {size} bytes, at most {MOST_SCHEMA_BYTES} are allowed", "tools")


def _schema(function: FunctionDefinition) -> dict[str, object]:
    """Return the schema of a function's arguments, which are an object. Raises ApiError if it does not compile."""
    schema = _NO_PARAMETERS if function.parameters is None else function.parameters
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise wrong(f"the parameters of {function.name!r} must be of the type object", "tools")
    schema = {**schema, "type": "object"}
    if error := schema_error(json.dumps(schema)):
        raise wrong(f"the parameters of {function.name!r} do not compile: {error}", "tools")
    return schema


def _text(text: str) -> str:
    """Return a text as an element of a grammar."""
    return json.dumps(text)


def _regex(text: str) -> str:
    """Return the regular expression of a text, for use between slashes."""
    return re.escape(text).replace("/", r"\/")


def _without(text: str) -> str:
    """Return the terminal of texts that do not contain `text`."""
    return f"~/{_ANY}{_regex(text)}{_ANY}/"
