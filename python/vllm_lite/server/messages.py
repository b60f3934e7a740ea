"""``/v1/messages`` and ``/v1/messages/count_tokens``."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from vllm_lite.output_parser import OutputParser
from vllm_lite.outputs import CompletionOutput
from vllm_lite.server.blocks import Block, BlockReader, Change, Closed, Grown, Kind, Opened
from vllm_lite.server.body import check_nesting, decode
from vllm_lite.server.chat import make_chat_job
from vllm_lite.server.conversation import prompt_ids
from vllm_lite.server.errors import ApiError, MessagesErrorResponse, bad_request, show
from vllm_lite.server.generation import Job, Renderer
from vllm_lite.server.messages_protocol import (
    ContentBlock,
    CountTokensRequest,
    CountTokensResponse,
    InputMessage,
    MessagesDelta,
    MessagesEvent,
    MessagesRequest,
    MessagesResponse,
    MessagesTool,
    MessagesToolChoice,
    MessagesUsage,
    OutputBlock,
    StopReason,
    TextBlock,
    TextPart,
    ThinkingBlock,
    ToolUseBlock,
)
from vllm_lite.server.protocol import (
    ChatRequest,
    FunctionCall,
    JsonSchema,
    Message,
    NamedFunction,
    ResponseFormat,
    Tool,
    ToolCall,
    ToolChoice,
    ToolFunction,
    ToolMode,
    Usage,
)
from vllm_lite.server.sampling import refuse_fields, served_name, shared_fields
from vllm_lite.server.state import ServerState

# The names that the chat path gives to fields of this request.
_NAMES = {
    r"max_completion_tokens": "max_tokens",
    r"reasoning_effort": "output_config",
    r"response_format(\.json_schema)?": "output_config.format",
    r"continue_final_message": "messages",
    r"(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
    r"(tools\[\d+\])\.function": r"\1",
}

_decoder = msgspec.json.Decoder(MessagesRequest)
_count_decoder = msgspec.json.Decoder(CountTokensRequest)


def prepare(state: ServerState, body: bytes) -> tuple[Job, "MessagesRenderer"]:
    """Parses, checks, templates and tokenises a body; runs in a thread. Raises ``ApiError``."""
    request = decode(_decoder, body)
    refuse_fields(request)
    chat = to_chat(request)
    chat.max_completion_tokens = request.max_tokens
    if request.stop_sequences is not None:
        chat.stop = request.stop_sequences
    try:
        job, plan = make_chat_job(state, chat, "msg_")
    except ApiError as error:
        raise error.renamed(_NAMES) from error
    return job, MessagesRenderer(job, plan.parser())


def count_tokens(state: ServerState, body: bytes) -> CountTokensResponse:
    """How many tokens the same body's prompt has; runs in a thread. Raises ``ApiError``."""
    request = decode(_count_decoder, body)
    refuse_fields(request)
    served_name(state.engine, request.model)
    try:
        return CountTokensResponse(input_tokens=len(prompt_ids(state, to_chat(request))))
    except ApiError as error:
        raise error.renamed(_NAMES) from error


# -- the request as a conversation -----------------------------------------------------------------


def to_chat(request: CountTokensRequest) -> ChatRequest:
    messages: list[Message] = []
    if request.system:
        messages.append(Message(role="system", content=_text(request.system, "system")))
    names: dict[str, str] = {}  # of the tools, by use
    for index, message in enumerate(request.messages):
        for part in _messages(message, f"messages[{index}]", names):
            if messages and _is_one_turn(messages[-1], part):
                messages[-1].content = f"{messages[-1].content}\n{part.content}"
            else:
                messages.append(part)
    kwargs = dict(request.chat_template_kwargs or {})
    if request.thinking is not None:  # as templates of models that may think call it
        kwargs.setdefault("enable_thinking", request.thinking.type != "disabled")
    config = request.output_config
    last = messages[-1]
    # An assistant's message at the end is the beginning of the answer.
    go_on = last.role == "assistant" and bool(last.content) and not last.tool_calls
    return ChatRequest(
        **shared_fields(request),
        messages=messages,
        tools=_tools(request.tools or ()),
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=not (
            request.tool_choice and request.tool_choice.disable_parallel_tool_use
        ),
        response_format=_response_format(request),
        reasoning_effort=config.effort if config else None,
        chat_template_kwargs=kwargs,
        continue_final_message=go_on,
    )


def _is_one_turn(message: Message, then: Message) -> bool:
    """Texts of one role after the other are one message, which templates want to alternate."""
    return message.role == then.role != "tool" and not (
        message.tool_calls
        or then.tool_calls
        or message.content is None
        or then.content is None
        or then.reasoning_content
    )


def _messages(message: InputMessage, where: str, names: dict[str, str]) -> list[Message]:
    """One of Anthropic's as OpenAI's: results of tools are messages of their own there."""
    if isinstance(message.content, str):
        return [Message(role=message.role, content=message.content)]
    out: list[Message] = []
    texts: list[str] = []
    turn = Message(role=message.role)

    def end_turn() -> None:
        nonlocal texts, turn
        if texts:
            turn.content = "\n".join(texts)
        if texts or turn.tool_calls or turn.reasoning_content:
            out.append(turn)
        texts, turn = [], Message(role=message.role)

    for index, block in enumerate(message.content):
        at = f"{where}.content[{index}]"
        match block.type, message.role:
            case "text", _:
                texts.append(_need(block, "text", at))
            case "tool_result", "user":
                end_turn()
                use_id = _need(block, "tool_use_id", at)
                text = _text(block.content or "", f"{at}.content")
                name = names.get(use_id)
                out.append(Message(role="tool", content=text, tool_call_id=use_id, name=name))
            case "tool_use", "assistant":
                name = names[_need(block, "id", at)] = _need(block, "name", at)
                function = FunctionCall(name=name, arguments=block.input or {})
                turn.tool_calls = [
                    *(turn.tool_calls or []),
                    ToolCall(id=block.id, function=function),
                ]
            case "thinking", "assistant":
                turn.reasoning_content = (turn.reasoning_content or "") + _need(
                    block, "thinking", at
                )
            case "redacted_thinking", "assistant":
                pass  # another server's to read
            case _:
                raise _unsupported(block, at, f"in a message of role {message.role}")
    end_turn()
    if not out:
        raise bad_request(f"{where}.content: empty", f"{where}.content")
    return out


def _text(content: str | list[TextPart], where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, block in enumerate(content):
        at = f"{where}[{index}]"
        if block.type != "text":
            raise _unsupported(block, at, "here")
        texts.append(_need(block, "text", at))
    return "\n".join(texts)


def _unsupported(block: ContentBlock | TextPart, where: str, place: str) -> ApiError:
    return bad_request(
        f"{where}.type: {show(block.type)} is not supported {place}",
        f"{where}.type",
        "unsupported_parameter",
    )


def _need(block: ContentBlock | TextPart, name: str, where: str) -> Any:
    value = getattr(block, name)
    if value is None:
        raise bad_request(
            f"{where}.{name}: missing; a block of type {block.type} needs it", f"{where}.{name}"
        )
    return value


def _tools(tools: Sequence[MessagesTool]) -> list[Tool] | None:
    out = []
    for index, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            param = f"tools[{index}].type"
            raise bad_request(
                f"{param}: {show(tool.type)} is not supported; use 'custom'",
                param,
                "unsupported_parameter",
            )
        function = ToolFunction(
            name=tool.name,
            description=tool.description,
            parameters=tool.input_schema,
            strict=tool.strict,
        )
        out.append(Tool(type="function", function=function))
    return out or None


def _tool_choice(choice: MessagesToolChoice | None) -> ToolMode | ToolChoice | None:
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise bad_request("tool_choice.name: missing", "tool_choice.name")
        return ToolChoice(type="function", function=NamedFunction(name=choice.name))
    return "required" if choice.type == "any" else choice.type


def _response_format(request: CountTokensRequest) -> ResponseFormat | None:
    wanted = request.output_config.format if request.output_config else None
    if wanted is None:
        return None
    check_nesting(wanted.schema, "output_config.format.schema")
    schema = JsonSchema(name="output", schema=wanted.schema, strict=True)
    return ResponseFormat(type="json_schema", json_schema=schema)


# -- the answer ------------------------------------------------------------------------------------


class MessagesRenderer(Renderer):
    named_events = True

    def __init__(self, job: Job, parser: OutputParser) -> None:
        self._job = job
        self._reader = BlockReader(parser)
        self._started = False
        self._stop_reason: StopReason | None = None
        self._stop_sequence: str | None = None

    def chunks(
        self, choice: int, output: CompletionOutput, usage: Callable[[], Usage]
    ) -> Iterator[MessagesEvent]:
        if not self._started:
            self._started = True
            yield MessagesEvent(type="message_start", message=self._message(usage()))
        for change in self._read(output):
            yield from _tell(change)

    def ending(self, usage: Usage) -> Iterator[MessagesEvent]:
        assert self._stop_reason is not None
        delta = MessagesDelta(stop_reason=self._stop_reason, stop_sequence=self._stop_sequence)
        yield MessagesEvent(type="message_delta", delta=delta, usage=_usage(usage))
        yield MessagesEvent(type="message_stop")

    def whole(self, outputs: Sequence[CompletionOutput], usage: Usage) -> MessagesResponse:
        for _ in self._read(outputs[0]):
            pass
        return self._message(usage)

    def error(self, error: ApiError) -> MessagesErrorResponse:
        return error.for_messages()

    def _read(self, output: CompletionOutput) -> Iterator[Change]:
        yield from self._reader.read(output.text, output.finish_reason)
        if output.finish_reason == "length":
            self._stop_reason = "max_tokens"
        elif output.finish_reason is not None:
            self._stop_reason = "end_turn"
            if self._reader.has_calls():
                self._stop_reason = "tool_use"
            elif isinstance(output.stop_reason, str):
                self._stop_reason, self._stop_sequence = "stop_sequence", output.stop_reason

    def _message(self, usage: Usage) -> MessagesResponse:
        """At the start of a stream without content and reason."""
        return MessagesResponse(
            id=self._job.id,
            model=self._job.model,
            content=[_block(block) for block in self._reader.blocks],
            stop_reason=self._stop_reason,
            stop_sequence=self._stop_sequence,
            usage=_usage(usage),
        )


def _tell(change: Change) -> Iterator[MessagesEvent]:
    index = change.block.index
    match change, change.block.kind:
        case Opened(block), _:
            shown = _block(block)
            yield MessagesEvent(type="content_block_start", index=index, content_block=shown)
        case Grown(_, text), kind:
            if kind is Kind.TEXT:
                delta = MessagesDelta(type="text_delta", text=text)
            elif kind is Kind.REASONING:
                delta = MessagesDelta(type="thinking_delta", thinking=text)
            else:
                delta = MessagesDelta(type="input_json_delta", partial_json=text)
            yield MessagesEvent(type="content_block_delta", index=index, delta=delta)
        case Closed(), _:
            yield MessagesEvent(type="content_block_stop", index=index)


def _block(block: Block) -> OutputBlock:
    if block.kind is Kind.TEXT:
        return TextBlock(text=block.text)
    if block.kind is Kind.REASONING:
        return ThinkingBlock(thinking=block.text)
    try:
        arguments = msgspec.json.decode(block.text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):  # none yet, cut off, or the model's mistake
        arguments = {}
    return ToolUseBlock(id=block.call_id, name=block.name, input=arguments)


def _usage(usage: Usage) -> MessagesUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessagesUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
    )
