"""Bodies of ``/v1/messages``, Anthropic's shape.

Content blocks of a request are one type with the fields of all kinds, as are the events of a stream
and their deltas.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from vllm_lite.sampling_params import MAX_STOP_STRINGS
from vllm_lite.server.protocol import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    Ignored,
    Positive,
    SamplingFields,
    StopString,
    ToolName,
    Unsupported,
)


class TextPart(msgspec.Struct, kw_only=True):
    """Only ``text`` parts are supported."""

    type: str
    text: str | None = None


TextParts = Annotated[list[TextPart], Meta(max_length=MAX_PARTS)]


class ContentBlock(msgspec.Struct, kw_only=True):
    """Types text, tool_use, tool_result, thinking and redacted_thinking."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | TextParts | None = None
    thinking: str | None = None


Blocks = Annotated[list[ContentBlock], Meta(max_length=MAX_PARTS)]


class InputMessage(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class MessagesTool(msgspec.Struct, kw_only=True):
    """Only tools of the client."""

    name: ToolName
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class MessagesToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Ignored = None


class OutputFormat(msgspec.Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(SamplingFields, kw_only=True):
    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | TextParts | None = None
    tools: Annotated[list[MessagesTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    container: Unsupported = None
    mcp_servers: Unsupported = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: Positive
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str
    citations: None = None


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""  # nothing here is signed


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


OutputBlock = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesUsage(msgspec.Struct, kw_only=True):
    """The prompt's tokens are those of input_tokens and of cache_read_input_tokens together."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class MessagesResponse(msgspec.Struct, kw_only=True):
    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[OutputBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class MessagesDelta(msgspec.Struct, kw_only=True):
    type: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: StopReason | UnsetType = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class MessagesEvent(msgspec.Struct, kw_only=True):
    """One event of a stream; ``type`` says which of the other fields it has."""

    type: str
    message: MessagesResponse | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: OutputBlock | UnsetType = UNSET
    delta: MessagesDelta | UnsetType = UNSET
    usage: MessagesUsage | UnsetType = UNSET


class CountTokensResponse(msgspec.Struct, kw_only=True):
    input_tokens: int
