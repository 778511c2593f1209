"""The fields of requests: OpenAI's, those that other servers added, and the ones that are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationError
from pydantic_core import PydanticCustomError

from redraft.errors import UsageError
from redraft.runtime.params import schema_text
from redraft.runtime.server.errors import refused, wrong

MOST_CHOICES = 128
"""Choices of one request, over all its prompts."""
MOST_BIASES = 1024
_Any = TypeVar("_Any")
Many = Annotated[list[_Any], Field(fail_fast=True)]
"""A list whose first wrong element is the only error: each error costs far more than the element."""


def _limited(biases: object) -> object:
    """Refuse large objects before their values are read, since each wrong value is an error."""
    if isinstance(biases, dict) and len(biases) > MOST_BIASES:
        raise PydanticCustomError("too_long", f"Object should have at most {MOST_BIASES} members")
    return biases


Bias = Annotated[dict[str, float], BeforeValidator(_limited)]
TokenIds = Many[Annotated[int, Field(ge=0, lt=1 << 32)]]
"""Those that the vocabulary lacks are refused later. The tokenizer takes 32 bits."""
StopText = Annotated[str, Field(max_length=256)]
"""OpenAI allows 4 stop strings, this server 16. More and longer ones would cost every token time."""
StopTexts = Annotated[Many[StopText], Field(max_length=16)]


def _true_or_false(value: object) -> object:
    """Refuse numbers, since 0 equals False."""
    if not isinstance(value, bool):
        raise PydanticCustomError("literal_error", "Input should be false")
    return value


No = Annotated[Literal[False], BeforeValidator(_true_or_false)]


def _finite(schema: dict[str, Any]) -> dict[str, Any]:
    """Refuse numbers such as 1e999, which become infinite, and which no answer could repeat."""
    try:
        schema_text(schema)
    except UsageError:
        raise PydanticCustomError("json_schema", "Input should have no number that JSON lacks") from None
    return schema


Schema = Annotated[dict[str, Any], AfterValidator(_finite)]


class Fields(BaseModel):
    """Fields of an object. A field that is null has its default.

    refused_fields: names of the reference that this server does not support.
    """

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False)
    refused_fields: ClassVar[frozenset[str]] = frozenset()


class StreamOptions(Fields):
    """`stream_options`."""

    include_usage: bool | None = None
    include_obfuscation: No | None = None


class SpeculativeConfig(Fields):
    """How a request drafts: `method`, and limits of its drafts."""

    method: str | None = None
    num_speculative_tokens: Annotated[int, Field(ge=0, le=1024)] | None = None
    controller: str | None = None


class RedraftOptions(Fields):
    """`redraft`: what a stream tells besides its text.

    steps: the source of each token, and the draft tree of each step.
    """

    steps: bool | None = None


class GenerationRequest(Fields):
    """Fields of all requests that generate."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Bias | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    speculative_config: SpeculativeConfig | No | None = None


class SampledRequest(GenerationRequest):
    """Fields of chats and completions."""

    stop: StopText | StopTexts | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: int | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None


class TextPart(Fields):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunction(Fields):
    """The function of a tool call; `arguments` is JSON."""

    name: str
    arguments: str


class MessageToolCall(Fields):
    """A tool call of an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[int | None, Field(exclude=True)] = None
    """A streamed call has one. Templates do not get it."""


class ChatMessage(Fields):
    """A message of a conversation."""

    refused_fields = frozenset({"audio", "function_call", "refusal", "annotations"})

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[TextPart] | None = None
    name: str | None = None
    tool_calls: Many[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class FunctionDefinition(Fields):
    """A function that the model may call. `parameters` is a JSON schema."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(Fields):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Fields):
    """The name of a function."""

    name: str


class NamedTool(Fields):
    """One of the tools, by its name."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Fields):
    """Those of the tools that the model may call. It must call one if the mode is `required`."""

    mode: Literal["auto", "required"]
    tools: Annotated[Many[NamedTool], Field(min_length=1)]


class AllowedToolChoice(Fields):
    """A `tool_choice` of several tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def kind_of_choice(choice: object) -> str:
    """Return the tag of a `tool_choice`. Errors leave it out, since it begins with a capital letter."""
    if not isinstance(choice, dict):
        return "Word"
    return "AllowedToolChoice" if choice.get("type") == "allowed_tools" else "NamedTool"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("Word")]
    | Annotated[NamedTool, Tag("NamedTool")]
    | Annotated[AllowedToolChoice, Tag("AllowedToolChoice")],
    Discriminator(kind_of_choice),
]


class NamedSchema(Fields):
    """A JSON schema. It is always enforced, strict or not."""

    name: str
    description: str | None = None
    schema_: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Fields):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class Prediction(Fields):
    """`prediction`: text that the answer will repeat in part."""

    type: Literal["content"]
    content: str | Many[TextPart]


class ChatRequest(SampledRequest):
    """The body of /v1/chat/completions."""

    refused_fields = frozenset({
        "audio", "function_call", "functions", "metadata", "moderation", "prompt_cache_options",
        "prompt_cache_retention", "reasoning_effort", "verbosity", "web_search_options",
    })  # fmt: skip

    messages: Annotated[Many[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None
    tools: Many[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: Many[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: No | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    redraft: RedraftOptions | None = None


def _kind_of_prompt(prompt: object) -> str:
    """Return the type that a prompt is meant to have, by its first element."""
    if not isinstance(prompt, list):
        return "str"
    if prompt and isinstance(prompt[0], str):
        return "list[str]"
    return "list[list[int]]" if prompt and isinstance(prompt[0], list) else "list[int]"


Prompt = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[TokenIds, Tag("list[int]")]
    | Annotated[Many[str], Field(max_length=MOST_CHOICES), Tag("list[str]")]
    | Annotated[Many[TokenIds], Field(max_length=MOST_CHOICES), Tag("list[list[int]]")],
    Discriminator(_kind_of_prompt),
]


class CompletionRequest(SampledRequest):
    """The body of /v1/completions."""

    prompt: Prompt
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: int | None = None


class TokenizeRequest(Fields):
    """The body of /tokenize: a prompt, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Many[ChatMessage], Field(min_length=1)] | None = None
    tools: Many[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeRequest(Fields):
    """The body of /detokenize."""

    model: str | None = None
    tokens: TokenIds


Model = TypeVar("Model", bound=Fields)


def parse(model: type[Model], body: bytes, allow_unknown: bool) -> Model:
    """Return the fields of a JSON body. Raises ApiError that names the first field that is wrong or not supported.

    allow_unknown: True to ignore unknown fields.
    """
    return _checked(lambda: model.model_validate_json(body), allow_unknown)


def fields_of(model: type[Model], values: Mapping[str, Any], allow_unknown: bool) -> Model:
    """Return fields by their values, of which those of a request have been parsed. Raises ApiError as `parse` does."""
    return _checked(lambda: model.model_validate(values, strict=False), allow_unknown)  # strict ones are no dicts


def _checked(read: Callable[[], Model], allow_unknown: bool) -> Model:
    """Return the fields that `read` returns. Raises ApiError as `parse` does."""
    try:
        found = read()
    except ValidationError as error:
        # A value that fits no type of a union has an error for each; the deepest one is of the type that was meant.
        worst = max(error.errors(include_url=False, include_input=False), key=lambda one: len(one["loc"]))
        name = ".".join(str(part) for part in worst["loc"] if _is_field(part))
        if worst["type"] == "json_invalid":
            raise wrong(f"the body is not JSON: {worst['msg']}", code="invalid_json") from None
        code = {"missing": "missing_parameter", "literal_error": "unsupported_value"}.get(worst["type"])
        message = f"{name}: {worst['msg']}" if name else f"the body: {worst['msg']}"
        raise wrong(message, name or None, code or "invalid_value") from None
    for name, is_refused in _extras(found, ""):
        if is_refused:
            raise refused(name)
        if not allow_unknown:
            raise wrong(f"the field {name} is unknown", name, "unknown_parameter")
    return found


def _is_field(part: int | str) -> bool:
    """Return false for the name of a union's type."""
    return isinstance(part, int) or not (part in ("str", "int", "bool") or set("[-") & set(part) or part[:1].isupper())


def _extras(model: Fields, place: str) -> Iterator[tuple[str, bool]]:
    """Yield fields that are not null and not supported, and whether the model refuses them by name."""
    for name, value in (model.model_extra or {}).items():
        if value is not None:
            yield place + name, name in model.refused_fields
    for name in type(model).model_fields:
        value = getattr(model, name)
        many = isinstance(value, list)
        for number, one in enumerate(value if many else [value]):
            if isinstance(one, Fields):
                yield from _extras(one, f"{place}{name}.{number}." if many else f"{place}{name}.")
