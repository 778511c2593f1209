"""The fields of /v1/responses: OpenAI's, those of our own that chats have, and the ones that are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from redraft.errors import UsageError
from redraft.runtime.server.fields import Fields, Many, No, StopText, StopTexts, kind_of_choice
from redraft.runtime.server.messages import call_arguments
from redraft.runtime.server.translation import TranslatedRequest

Status = Literal["in_progress", "completed", "incomplete"]
_Empty = Annotated[list[Any], Field(max_length=0)]


def _of_an_object(text: str) -> str:
    """Refuse arguments that are no JSON object, since chat templates take objects."""
    try:
        call_arguments("arguments", text)
    except UsageError:
        raise PydanticCustomError("json_object", "Input should be a JSON object as a text") from None
    return text


class ResponsePart(Fields):
    """A part of a message's content, of the client or of an earlier answer."""

    refused_fields = frozenset({"prompt_cache_breakpoint"})

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: _Empty | None = None
    logprobs: list[Any] | None = None


class ResponseMessage(Fields):
    """A message of the conversation."""

    refused_fields = frozenset({"phase"})

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Many[ResponsePart]
    id: str | None = None
    status: Status | None = None


class ResponseCall(Fields):
    """A call of a function in an earlier answer; `arguments` is JSON."""

    refused_fields = frozenset({"async", "caller", "namespace"})

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Annotated[str, AfterValidator(_of_an_object)]
    id: str | None = None
    status: Status | None = None


class ResponseCallOutput(Fields):
    """What a function returned."""

    refused_fields = frozenset({"caller"})

    type: Literal["function_call_output"]
    call_id: str
    output: str | Many[ResponsePart]
    id: str | None = None
    status: Status | None = None


class ReasoningPart(Fields):
    """Text of an earlier answer's reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ResponseReasoning(Fields):
    """The reasoning of an earlier answer. This server makes no summaries, and reads none."""

    refused_fields = frozenset({"encrypted_content"})

    type: Literal["reasoning"]
    id: str | None = None
    summary: _Empty | None = None
    content: Many[ReasoningPart] | None = None
    status: Status | None = None


class OtherItem(Fields):
    """An item of a type that is not supported."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"]


_ITEMS = {
    "message": "Message", "function_call": "Call", "function_call_output": "CallOutput", "reasoning": "Reasoning",
    None: "Message",
}  # fmt: skip


def _kind_of_item(item: object) -> str:
    """Return the tag of an item's type. Errors leave it out, since it begins with a capital letter."""
    kind = item.get("type") if isinstance(item, dict) else ""
    return _ITEMS.get(kind, "Other") if kind is None or isinstance(kind, str) else "Other"


Item = Annotated[
    Annotated[ResponseMessage, Tag("Message")]
    | Annotated[ResponseCall, Tag("Call")]
    | Annotated[ResponseCallOutput, Tag("CallOutput")]
    | Annotated[ResponseReasoning, Tag("Reasoning")]
    | Annotated[OtherItem, Tag("Other")],
    Discriminator(_kind_of_item),
]


class ResponseTool(Fields):
    """A function that the model may call. `parameters` is a JSON schema."""

    refused_fields = frozenset({"allowed_callers", "async", "defer_loading", "output_schema"})

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenTool(Fields):
    """The function that the model must call."""

    type: Literal["function"]
    name: str


class AllowedTools(Fields):
    """The functions of which the model may call some, or must with the mode `required`."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Many[ChosenTool]


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("Word")]
    | Annotated[ChosenTool, Tag("NamedTool")]
    | Annotated[AllowedTools, Tag("AllowedToolChoice")],
    Discriminator(kind_of_choice),
]


class TextFormat(Fields):
    """The form of the answer's text. A JSON schema is always enforced, strict or not."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(Fields):
    """`text`."""

    refused_fields = frozenset({"verbosity"})

    format: TextFormat | None = None


class ReasoningOptions(Fields):
    """`reasoning`. The model and its chat template decide about it, so that only their own choice is accepted."""

    refused_fields = frozenset({"effort", "generate_summary", "summary"})

    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class ResponseStreamOptions(Fields):
    """`stream_options`."""

    include_obfuscation: No | None = None


class ResponsesRequest(TranslatedRequest):
    """The body of /v1/responses. This server keeps no answers, so a request has its whole conversation."""

    refused_fields = frozenset({
        "access_programs", "background_options", "context_management", "conversation", "image", "max_tool_calls",
        "moderation", "previous_response_id", "prompt", "prompt_cache_options", "prompt_cache_retention",
    })  # fmt: skip

    input: str | Annotated[Many[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: StopText | StopTexts | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: Many[Literal["message.output_text.logprobs"]] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Many[ResponseTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    background: No | None = None
    store: No | None = None
    service_tier: Literal["auto", "default"] | None = None
    truncation: Literal["disabled"] | None = None
