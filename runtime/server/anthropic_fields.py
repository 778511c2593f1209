"""The fields of /v1/messages: Anthropic's, those of our own that chats have, and the ones that are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from redraft.runtime.server.fields import Fields, Many, StopTexts
from redraft.runtime.server.translation import TranslatedRequest


class CacheControl(Fields):
    """A mark up to which a prompt may be cached. This server caches all prompts as long as it has space."""

    type: Literal["ephemeral"]
    ttl: Literal["5m"] | None = None


class TextBlock(Fields):
    """A text."""

    refused_fields = frozenset({"citations"})

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class ThinkingBlock(Fields):
    """The reasoning of an earlier answer. This server signs none."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(Fields):
    """A call of a tool in an earlier answer."""

    refused_fields = frozenset({"caller", "toolset_name"})

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolResultBlock(Fields):
    """What a tool returned."""

    refused_fields = frozenset({"toolset_name"})

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Many[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class OtherBlock(Fields):
    """A block of a type that is not supported."""

    type: Literal["text", "thinking", "tool_use", "tool_result"]


_BLOCKS = {"text": "Text", "thinking": "Thinking", "tool_use": "ToolUse", "tool_result": "ToolResult"}


def _kind_of_block(block: object) -> str:
    """Return the tag of a block's type. Errors leave it out, since it begins with a capital letter."""
    kind = block.get("type") if isinstance(block, dict) else None
    return _BLOCKS.get(kind, "Other") if isinstance(kind, str) else "Other"


Block = Annotated[
    Annotated[TextBlock, Tag("Text")]
    | Annotated[ThinkingBlock, Tag("Thinking")]
    | Annotated[ToolUseBlock, Tag("ToolUse")]
    | Annotated[ToolResultBlock, Tag("ToolResult")]
    | Annotated[OtherBlock, Tag("Other")],
    Discriminator(_kind_of_block),
]


class AnthropicMessage(Fields):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Many[Block]


class AnthropicTool(Fields):
    """A tool that the model may call. `input_schema` is a JSON schema."""

    refused_fields = frozenset({"allowed_callers", "defer_loading", "eager_input_streaming", "input_examples"})

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None


class AnthropicToolChoice(Fields):
    """Whether the model must call a tool, and which one."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Fields):
    """`thinking`. The model decides about its reasoning, so that no budget is accepted."""

    refused_fields = frozenset({"budget_tokens", "display"})

    type: Literal["adaptive", "disabled"]


class OutputFormat(Fields):
    """A JSON schema of the answer, which is always enforced."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Fields):
    """`output_config`."""

    refused_fields = frozenset({"effort"})

    format: OutputFormat | None = None


class Metadata(Fields):
    """`metadata`. Requests of users come in turns."""

    user_id: str | None = None


class PromptFields(Fields):
    """Fields that decide the prompt."""

    model: str
    messages: Annotated[Many[AnthropicMessage], Field(min_length=1)]
    system: str | Many[TextBlock] | None = None
    tools: Many[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(PromptFields, TranslatedRequest):
    """The body of /v1/messages."""

    refused_fields = frozenset({
        "container", "context_management", "diagnostics", "inference_geo", "mcp_servers", "speed", "user_profile_id",
        "workspace_id",
    })  # fmt: skip

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: StopTexts | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


class CountTokensRequest(PromptFields):
    """The body of /v1/messages/count_tokens."""

    refused_fields = frozenset({"context_management", "mcp_servers", "speed", "user_profile_id", "workspace_id"})
