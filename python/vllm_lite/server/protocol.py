"""Request and response bodies, in OpenAI's shapes with vLLM's extensions.

Every optional request field takes null for "left out". Types and ranges stand in the annotations,
so that decoding checks them and ``/openapi.json`` tells the same. Unknown fields are ignored, as
OpenAI does; fields that are known but not supported are declared too (``Unsupported``), so that
they can be refused by name.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from vllm_lite.sampling_params import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LENGTH_PENALTY,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_SAMPLES,
    MAX_SEED,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
    MIN_SEED,
)

Unsupported = Annotated[Any, Meta(description="Not supported: only null or the value for 'off'.")]
Ignored = Annotated[Any, Meta(description="Accepted; makes no difference here.")]
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
NonNegative = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-MAX_PENALTY, le=MAX_PENALTY)]
BadWord = Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
# What X-Request-Id may be, too (gateway).
RequestId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:+=@/-]{1,128}$(?!\n)")]
Salt = Annotated[str, Meta(min_length=1, max_length=1024)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# OpenAI's characters; Anthropic's length.
ToolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,128}$(?!\n)")]
MAX_MESSAGES = 4096
MAX_PARTS = 4096  # of one message
MAX_TOOLS = 1024
MAX_DOCUMENTS = 1024


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Exactly one of them: what the whole output must be."""

    json: dict[str, Any] | str | None = None  # a JSON schema
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    disable_additional_properties: Unsupported = None
    disable_any_whitespace: Unsupported = None
    structural_tag: Unsupported = None
    whitespace_pattern: Unsupported = None


class JsonSchema(msgspec.Struct, kw_only=True):
    name: str
    schema: dict[str, Any] | None = None  # left out: any JSON
    description: str | None = None
    strict: bool | None = None  # the output always fits the schema


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """What every endpoint that generates takes."""

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # -1 and 0: off
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=MIN_SEED, le=MAX_SEED)] | None = None
    repetition_penalty: (
        Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] | None
    ) = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        dict[NonNegative, Annotated[float, Meta(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]] | None
    ) = None
    allowed_token_ids: Annotated[list[NonNegative], Meta(min_length=1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[NonNegative], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: NonNegative | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    user: str | None = None
    priority: Int32 | None = None  # lower runs first
    request_id: RequestId | None = None  # part of the answer's id
    cache_salt: Salt | None = None  # requests with different salts share no KV

    metadata: Ignored = None
    prompt_cache_key: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None
    store: Ignored = None


class GenerationRequest(SamplingFields, kw_only=True):
    """What both of OpenAI's older generation endpoints take."""

    max_tokens: NonNegative | None = None  # 0 with echo or prompt_logprobs alone
    max_completion_tokens: NonNegative | None = None  # wins over max_tokens
    n: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] | None = None
    stream_options: StreamOptions | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # -1: to fit
    truncation_side: Literal["left", "right"] | None = None  # where tokens go: left
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    prediction: Ignored = None
    session_id: Ignored = None
    stream_interval: Ignored = None  # events are joined where a client reads slowly

    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    # What the output must be. One of these at most; the last four are vLLM's older names.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None

    best_of: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] | None = None  # n or more; not streamed
    use_beam_search: bool | None = None  # of width n; not streamed
    length_penalty: Annotated[float, Meta(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)] | None = (
        None
    )
    early_stopping: bool | Literal["never"] | None = None
    ec_transfer_params: Unsupported = None
    kv_transfer_params: Unsupported = None
    logits_processors: Unsupported = None
    logprob_token_ids: Unsupported = None
    repetition_detection: Unsupported = None
    spaces_between_special_tokens: Unsupported = None
    structural_tag: Unsupported = None
    thinking_token_budget: Unsupported = None
    vllm_xargs: Unsupported = None
    watermarking: Unsupported = None


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None  # the prompt's text and log-probabilities come first

    prompt_embeds: Unsupported = None
    suffix: Unsupported = None


class ContentPart(msgspec.Struct, kw_only=True):
    """Only text is supported: ``text``, ``input_text`` and ``output_text``, and ``refusal``."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    name: str
    arguments: str | dict[str, Any]  # a JSON object, as text or itself


class ToolCall(msgspec.Struct, kw_only=True):
    function: FunctionCall
    id: str | None = None
    type: str | None = None


class Message(msgspec.Struct, kw_only=True):
    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)] | None = None
    refusal: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same by vLLM's newer name
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None


class ToolFunction(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    type: str
    function: ToolFunction


ToolMode = Literal["none", "auto", "required"]


class NamedFunction(msgspec.Struct, kw_only=True):
    name: str


class AllowedTool(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(msgspec.Struct, kw_only=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class ToolChoice(msgspec.Struct, kw_only=True):
    """With the field that its type names."""

    type: Literal["function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None  # answers begin with the last message, if it is the assistant's
    add_special_tokens: bool | None = None
    chat_template: Annotated[str, Meta(max_length=1 << 16)] | None = None  # if the operator allows
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[dict[str, Any]], Meta(max_length=MAX_DOCUMENTS)] | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None  # false: it is left out of the answer
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolMode | ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    audio: Unsupported = None
    function_call: Unsupported = None
    functions: Unsupported = None
    media_io_kwargs: Unsupported = None
    mm_processor_kwargs: Unsupported = None
    modalities: Unsupported = None
    verbosity: Ignored = None
    web_search_options: Unsupported = None


# The values, beside null, that ask nothing of a feature that is not there.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "thinking_token_budget": (-1,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}


def unsupported_fields(request_type: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(f.name for f in msgspec.structs.fields(request_type) if f.type is Unsupported)


# -- responses -------------------------------------------------------------------------------------


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    # Of chat, at its end, where reasoning is told apart.
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """One entry per token in each list; null for the first of an echoed prompt. ``text_offset``:
    characters of the choice's own text.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, kw_only=True):
    logprob: float
    rank: int | None
    decoded_token: str | None


# Of the prompt's tokens in order: by token id, the prompt's own first; null for the first token.
PromptLogprobsList = list[dict[int, PromptLogprob] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the stop string or token id that matched; null for EOS
    prompt_token_ids: list[int] | UnsetType = UNSET  # with return_token_ids, in the first chunk
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobsList | UnsetType = UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    """Whole answer or stream chunk: ``usage`` is left out of chunks unless asked for."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str  # a JSON object


class CallMade(msgspec.Struct, kw_only=True):
    id: str
    type: str = "function"
    function: CalledFunction


class ResponseMessage(msgspec.Struct, kw_only=True):
    """The fields with reasoning, which say the same, and calls: only where there are any."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[CallMade] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ResponseMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET  # with return_token_ids


class ChatResponse(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobsList | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class CallDelta(msgspec.Struct, kw_only=True):
    """``id``, ``type`` and the name come with the first of each index."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta


class Delta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET  # in the chunk that finishes
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # in the first chunk


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "vllm_lite"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


class HealthResponse(msgspec.Struct, kw_only=True):
    status: str = "ok"


class VersionResponse(msgspec.Struct, kw_only=True):
    version: str


class LoadResponse(msgspec.Struct, kw_only=True):
    server_load: int
