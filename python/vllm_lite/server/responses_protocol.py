"""Bodies of ``/v1/responses``.

Input items are one type with the fields of all kinds, since OpenAI lets clients leave ``type`` out
of messages; so are the events of a stream, to keep the types few.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from vllm_lite.server.protocol import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    ContentPart,
    Effort,
    Ignored,
    Positive,
    SamplingFields,
    ToolMode,
    ToolName,
    Unsupported,
)

Metadata = Annotated[  # OpenAI's limits
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]
Parts = Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)]


class InputItem(msgspec.Struct, kw_only=True):
    """A message (also without type), function_call, function_call_output or reasoning."""

    type: str = "message"
    role: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    content: str | Parts | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Parts | None = None
    summary: Parts | None = None


class ResponsesTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Only functions."""

    type: str
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesAllowedTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: str
    name: str | None = None


class ResponsesToolChoice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A function by its name, or allowed_tools with mode and tools."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: (
        Annotated[list[ResponsesAllowedTool], Meta(min_length=1, max_length=MAX_TOOLS)] | None
    ) = None


class TextFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: Ignored = None


class ReasoningConfig(msgspec.Struct, kw_only=True):
    effort: Effort | None = None
    summary: Ignored = None


class ResponsesStreamOptions(msgspec.Struct, kw_only=True):
    include_obfuscation: Ignored = None


class ResponsesRequest(SamplingFields, kw_only=True):
    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    stream_options: ResponsesStreamOptions | None = None
    text: TextConfig | None = None
    tool_choice: ToolMode | ResponsesToolChoice | None = None
    tools: Annotated[list[ResponsesTool], Meta(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: Metadata | None = None

    include: list[str] | None = None  # what there is of these is told anyway
    max_tool_calls: Ignored = None  # calls are the client's to carry out

    background: Unsupported = None
    conversation: Unsupported = None
    previous_response_id: Unsupported = None
    prompt: Unsupported = None
    top_logprobs: Unsupported = None
    truncation: Unsupported = None


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[None] = []
    logprobs: list[None] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: str = "assistant"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: ItemStatus
    summary: list[None] = []
    content: list[ReasoningText]


class CallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


Item = MessageItem | ReasoningItem | CallItem


class InputDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int


class ResponsesUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, kw_only=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ReasoningShown(msgspec.Struct, kw_only=True):
    effort: Effort | None
    summary: None = None


class TextShown(msgspec.Struct, kw_only=True):
    format: TextFormat


class ResponsesResponse(msgspec.Struct, kw_only=True):
    """The answer, with what was asked for. ``store`` is always false: nothing is kept."""

    id: str
    object: str = "response"
    created_at: int
    status: ItemStatus
    background: bool = False
    error: None = None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: ReasoningShown
    store: bool = False
    temperature: float
    text: TextShown
    tool_choice: ToolMode | ResponsesToolChoice
    tools: list[ResponsesTool]
    top_p: float
    truncation: str = "disabled"
    usage: ResponsesUsage | None
    user: str | None


class ResponsesEvent(msgspec.Struct, kw_only=True):
    """One event of a stream; ``type`` says which of the other fields it has."""

    type: str
    sequence_number: int
    response: ResponsesResponse | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: Item | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[None] | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    code: str | UnsetType | None = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET
