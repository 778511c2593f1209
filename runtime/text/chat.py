"""Chat templates: a sandboxed Jinja environment with the extensions, filters and functions of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from redraft import names
from redraft.errors import UsageError
from redraft.runtime.conversation import Message, plain_messages, plain_objects


@cache
def chat_environment() -> ImmutableSandboxedEnvironment:
    """Return the environment that compiles every chat template."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
    )
    return environment


class GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks the assistant's text for training. It renders its body."""

    tags = {"generation"}  # noqa: RUF012  (Jinja declares it as an attribute of instances)

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the block as a call of its body, so that variables of the body are local."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

    def _write(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """The function `dict` of templates. Python's own class would give them its attributes."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """The function `namespace` of templates. Names that begin with an underscore are refused."""

    def __init__(*args: Any, **values: Any) -> None:
        self, *rest = args
        found = dict(*rest, **values)
        for name in found:
            _check_name(name)
        Namespace.__init__(self, found)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with an underscore, found {name!r}")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | str | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    """The filter `tojson`. Jinja's own escapes HTML and sorts keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    """The local date and time."""
    return datetime.now().strftime(format)


DEFAULT = names.DEFAULT_CHAT_TEMPLATE
TOOL_USE = "tool_use"
"""The template for a conversation with tools. Models without it use the default template."""

_CHECK = "give messages of the form that the model's template expects"
_FIX = "fix the template in the checkpoint and build again"


@dataclass(frozen=True)
class ChatTemplates:
    """A model's chat templates by name, and the special tokens that they may contain.

    special_tokens: text by name, for example {"bos_token": "<s>"}. Tokens that the model lacks are left out.
    """

    sources: Mapping[str, str]
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path, special_tokens: Mapping[str, str]) -> ChatTemplates:
        """Read `chat_template.jinja` and `additional_chat_templates/NAME.jinja` from a bundle, if present."""
        found = {path.stem: path for path in (folder / names.CHAT_TEMPLATES_FOLDER).glob("*.jinja")}
        single = folder / names.CHAT_TEMPLATE_FILE
        paths = {**found, DEFAULT: single} if single.is_file() else found
        return cls({name: path.read_text(encoding="utf-8") for name, path in paths.items()}, special_tokens)

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, tools: Sequence[Message] | None = None,
        documents: Sequence[Message] | None = None, chat_template: str | None = None, **variables: Any,
    ) -> str:  # fmt: skip
        """Render the prompt of a conversation.

        tools:         JSON schemas of functions; a template named `tool_use` then replaces the default one.
        documents:     objects that the template may quote, usually with `title` and `text`.
        chat_template: name of the template to use.   variables: further values for the template.
        Raises UsageError if the template does not exist, does not compile, or refuses its input.
        """
        template = self._template(chat_template, tools is not None)
        values = {
            **self.special_tokens,
            **plain_objects("variables", [variables])[0],
            "messages": plain_messages(messages),
            "tools": None if tools is None else plain_objects("tools", tools),
            "documents": None if documents is None else plain_objects("documents", documents),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render(values)
        except TemplateError as error:
            raise UsageError(f"the chat template refuses these messages: {_reason(error)}") from error
        except Exception as error:
            raise UsageError(f"the chat template fails on these messages ({_reason(error)})", _CHECK) from error

    def check(self) -> None:
        """Raise UsageError if the model has no default template, or if it does not compile."""
        self._template(None, tools=False)

    def source(self, tools: bool) -> str:
        """Return the Jinja text of the template that `render` takes by default. Raises UsageError if none exists."""
        return self.sources[self._choose(None, tools)]

    def _template(self, name: str | None, tools: bool) -> Template:
        """Return the compiled template. Raises UsageError if it does not exist or does not compile."""
        chosen = self._choose(name, tools)
        return _compile(chosen, self.sources[chosen])

    def _choose(self, name: str | None, tools: bool) -> str:
        """Return the name of the template to use. Raises UsageError if it does not exist."""
        if not self.sources:
            raise UsageError("this model has no chat template", "give a plain prompt, without --chat")
        wanted = name or (TOOL_USE if tools and TOOL_USE in self.sources else DEFAULT)
        if wanted not in self.sources:
            raise UsageError(
                f"this model has no chat template {wanted!r}", f"name one of these: {', '.join(sorted(self.sources))}"
            )
        return wanted


@lru_cache(maxsize=16)
def _compile(name: str, source: str) -> Template:
    """Compile a template. Raises UsageError if it is not valid."""
    try:
        return chat_environment().from_string(source)
    except TemplateSyntaxError as error:
        cause = f"{_reason(error)} (line {error.lineno})"
        raise UsageError(f"the chat template {name!r} does not compile: {cause}", _FIX) from error
    except Exception as error:
        raise UsageError(f"the chat template {name!r} does not compile: {_reason(error)}", _FIX) from error


def _reason(error: Exception) -> str:
    """Return one line for an error: its message, with its type unless the template itself raised it."""
    message = " ".join(str(error).split())
    if type(error) in (TemplateError, TemplateSyntaxError):
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
