"""``/v1/responses``, without a store: every request brings the whole conversation."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from vllm_lite.output_parser import OutputParser
from vllm_lite.outputs import CompletionOutput
from vllm_lite.sampling_params import SamplingParams
from vllm_lite.server.blocks import Block, BlockReader, Change, Closed, Grown, Kind, Opened
from vllm_lite.server.body import check_nesting, decode
from vllm_lite.server.chat import make_chat_job
from vllm_lite.server.conversation import arguments_of, text_of
from vllm_lite.server.errors import ApiError, bad_request, show
from vllm_lite.server.generation import Job, Renderer
from vllm_lite.server.protocol import (
    AllowedTool,
    AllowedTools,
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
from vllm_lite.server.responses_protocol import (
    CallItem,
    IncompleteDetails,
    InputDetails,
    InputItem,
    Item,
    ItemStatus,
    MessageItem,
    OutputDetails,
    OutputText,
    ReasoningItem,
    ReasoningShown,
    ReasoningText,
    ResponsesAllowedTool,
    ResponsesEvent,
    ResponsesRequest,
    ResponsesResponse,
    ResponsesTool,
    ResponsesToolChoice,
    ResponsesUsage,
    TextFormat,
    TextShown,
)
from vllm_lite.server.sampling import refuse_fields, shared_fields
from vllm_lite.server.state import ServerState
from vllm_lite.server.tools import count_reasoning

# The names that the chat path gives to fields of this request.
_NAMES = {
    r"messages(\[\d+\])?": "input",
    r"max_completion_tokens": "max_output_tokens",
    r"reasoning_effort": "reasoning",
    r"response_format(\.json_schema)?": "text.format",
    r"(tools\[\d+\])\.function": r"\1",
}

_decoder = msgspec.json.Decoder(ResponsesRequest)


def prepare(state: ServerState, body: bytes) -> tuple[Job, "ResponsesRenderer"]:
    """Parses, checks, templates and tokenises a body; runs in a thread. Raises ``ApiError``."""
    request = decode(_decoder, body)
    refuse_fields(request)
    if "message.output_text.logprobs" in (request.include or ()):
        raise bad_request(
            "include: 'message.output_text.logprobs' is not supported by this server; leave it out",
            "include",
            "unsupported_parameter",
        )
    try:
        job, plan = make_chat_job(state, to_chat(request), "resp_")
    except ApiError as error:
        raise error.renamed(_NAMES) from error
    return job, ResponsesRenderer(state, job, request, plan.parser())


# -- the request as a conversation -----------------------------------------------------------------


def to_chat(request: ResponsesRequest) -> ChatRequest:
    reasoning = request.reasoning
    return ChatRequest(
        **shared_fields(request),
        messages=_messages(request),
        max_completion_tokens=request.max_output_tokens,
        tools=_tools(request),
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_response_format(request),
        reasoning_effort=reasoning.effort if reasoning else None,
        chat_template_kwargs=request.chat_template_kwargs,
    )


def _messages(request: ResponsesRequest) -> list[Message]:
    out: list[Message] = []
    if request.instructions:
        out.append(Message(role="system", content=request.instructions))
    if isinstance(request.input, str):
        return [*out, Message(role="user", content=request.input)]
    names: dict[str, str] = {}  # of the functions, by call
    turn: Message | None = None  # the assistant's, which may have several items
    for index, item in enumerate(request.input):
        where = f"input[{index}]"
        match item.type:
            case "function_call_output":
                turn = None
                call_id = _need(item, "call_id", where)
                text = text_of(_need(item, "output", where), f"{where}.output")
                name = names.get(call_id)
                out.append(Message(role="tool", content=text, tool_call_id=call_id, name=name))
                continue
            case "message" if item.role != "assistant":
                turn = None
                role = _need(item, "role", where)
                text = text_of(_need(item, "content", where), f"{where}.content")
                out.append(Message(role=role, content=text))
                continue
        if turn is None or (item.type == "reasoning" and turn.content is not None):
            turn = Message(role="assistant")
            out.append(turn)
        _add_to_turn(turn, item, where, names)
    return out


def _add_to_turn(turn: Message, item: InputItem, where: str, names: dict[str, str]) -> None:
    match item.type:
        case "message":
            text = text_of(_need(item, "content", where), f"{where}.content")
            turn.content = text if turn.content is None else f"{turn.content}\n{text}"
        case "reasoning":
            turn.reasoning_content = _reasoning_text(item)
        case "function_call":
            name = _need(item, "name", where)
            call_id = _need(item, "call_id", where)
            arguments = _need(item, "arguments", where)
            names[call_id] = name
            function = FunctionCall(name=name, arguments=arguments)
            function.arguments = arguments_of(function, f"{where}.arguments")
            call = ToolCall(id=call_id, function=function)
            turn.tool_calls = [*(turn.tool_calls or []), call]
        case _:
            raise bad_request(
                f"{where}.type: {show(item.type)} is not supported; send message, reasoning,"
                " function_call or function_call_output",
                f"{where}.type",
                "unsupported_parameter",
            )


def _need(item: InputItem, name: str, where: str) -> Any:
    value = getattr(item, name)
    if value is None:
        raise bad_request(
            f"{where}.{name}: missing; an item of type {item.type} needs it", f"{where}.{name}"
        )
    return value


def _reasoning_text(item: InputItem) -> str | None:
    """What was thought, or what is said about it. Encrypted, it is another server's to read."""
    if isinstance(item.content, str):
        return item.content
    parts = item.content or item.summary or []
    return "\n".join(part.text for part in parts if part.text is not None) or None


def _tools(request: ResponsesRequest) -> list[Tool] | None:
    for index, tool in enumerate(request.tools or ()):
        param = f"tools[{index}]"
        if tool.type != "function":
            raise bad_request(
                f"{param}.type: {show(tool.type)} is not supported; use 'function'",
                f"{param}.type",
                "unsupported_parameter",
            )
        if tool.name is None:
            raise bad_request(f"{param}.name: missing", f"{param}.name")
    return [_tool(tool) for tool in request.tools or ()] or None


def _tool(tool: ResponsesTool) -> Tool:
    function = ToolFunction(
        name=tool.name or "",
        description=tool.description,
        parameters=tool.parameters,
        strict=tool.strict,
    )
    return Tool(type="function", function=function)


def _tool_choice(choice: ToolMode | ResponsesToolChoice | None) -> ToolMode | ToolChoice | None:
    if not isinstance(choice, ResponsesToolChoice):
        return choice
    if choice.type == "function" and choice.name is not None:
        return ToolChoice(type="function", function=NamedFunction(name=choice.name))
    if choice.type == "allowed_tools" and choice.mode is not None and choice.tools is not None:
        return ToolChoice(
            type="allowed_tools",
            allowed_tools=AllowedTools(
                mode=choice.mode,
                tools=[_allowed(tool, index) for index, tool in enumerate(choice.tools)],
            ),
        )
    raise bad_request(
        f"tool_choice: {show(msgspec.to_builtins(choice))} is not supported; use 'none', 'auto',"
        ' \'required\', {"type": "function", "name": NAME} or {"type": "allowed_tools", "mode":'
        ' "auto" or "required", "tools": [{"type": "function", "name": NAME}]}',
        "tool_choice",
        "unsupported_parameter",
    )


def _allowed(tool: ResponsesAllowedTool, index: int) -> AllowedTool:
    if tool.type != "function" or tool.name is None:
        raise bad_request(
            f"tool_choice.tools[{index}]: {show(msgspec.to_builtins(tool))} is not supported; use"
            ' {"type": "function", "name": NAME}',
            f"tool_choice.tools[{index}]",
            "unsupported_parameter",
        )
    return AllowedTool(type="function", function=NamedFunction(name=tool.name))


def _response_format(request: ResponsesRequest) -> ResponseFormat | None:
    wanted = request.text.format if request.text else None
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        return ResponseFormat(type=wanted.type)
    if wanted.name is None or wanted.schema is None:
        raise bad_request("text.format: json_schema needs name and schema", "text.format")
    check_nesting(wanted.schema, "text.format.schema")
    schema = JsonSchema(name=wanted.name, schema=wanted.schema, strict=wanted.strict)
    return ResponseFormat(type="json_schema", json_schema=schema)


# -- the answer ------------------------------------------------------------------------------------


class ResponsesRenderer(Renderer):
    named_events = True

    def __init__(
        self, state: ServerState, job: Job, request: ResponsesRequest, parser: OutputParser
    ) -> None:
        self._state = state
        self._job = job
        self._request = request
        self._reader = BlockReader(parser)
        self._ids: list[str] = []  # of the items
        self._number = 0  # events so far
        self._status: ItemStatus = "in_progress"

    def chunks(
        self, choice: int, output: CompletionOutput, usage: Callable[[], Usage]
    ) -> Iterator[ResponsesEvent]:
        if self._number == 0:
            for kind in ("created", "in_progress"):
                yield self._event(f"response.{kind}", response=self._response(None))
        for change in self._read(output):
            yield from self._tell(change)

    def ending(self, usage: Usage) -> Iterator[ResponsesEvent]:
        yield self._event(f"response.{self._status}", response=self._response(usage))

    def whole(self, outputs: Sequence[CompletionOutput], usage: Usage) -> ResponsesResponse:
        for _ in self._read(outputs[0]):
            pass
        return self._response(usage)

    def error(self, error: ApiError) -> ResponsesEvent:
        info = error.info
        return self._event("error", code=info.code, message=info.message, param=info.param)

    def _read(self, output: CompletionOutput) -> Iterator[Change]:
        if output.finish_reason is not None:
            self._status = "incomplete" if output.finish_reason == "length" else "completed"
        yield from self._reader.read(output.text, output.finish_reason)

    def _event(self, type: str, **fields: Any) -> ResponsesEvent:
        self._number += 1
        return ResponsesEvent(type=type, sequence_number=self._number - 1, **fields)

    def _tell(self, change: Change) -> Iterator[ResponsesEvent]:
        block = change.block
        at: dict[str, Any] = {"output_index": block.index}
        inside = at | {"item_id": self._id(block)}
        part_of: dict[str, Any] = inside | {"content_index": 0}
        is_text = block.kind is Kind.TEXT
        name = "output_text" if is_text else "reasoning_text"
        logprobs: dict[str, Any] = {"logprobs": []} if is_text else {}
        match change, block.kind:
            case Opened(), kind:
                item = self._item(block, "in_progress")
                yield self._event("response.output_item.added", item=item, **at)
                if kind is not Kind.CALL:
                    part = _part(kind, "")
                    yield self._event("response.content_part.added", part=part, **part_of)
            case Grown(_, text), Kind.CALL:
                yield self._event("response.function_call_arguments.delta", delta=text, **inside)
            case Grown(_, text), _:
                yield self._event(f"response.{name}.delta", delta=text, **part_of, **logprobs)
            case Closed(), kind:
                if kind is Kind.CALL:
                    yield self._event(
                        "response.function_call_arguments.done",
                        name=block.name,
                        arguments=block.text,
                        **inside,
                    )
                else:
                    part = _part(kind, block.text)
                    yield self._event(
                        f"response.{name}.done", text=block.text, **part_of, **logprobs
                    )
                    yield self._event("response.content_part.done", part=part, **part_of)
                yield self._event("response.output_item.done", item=self._item(block), **at)

    def _id(self, block: Block) -> str:
        if block.index == len(self._ids):
            self._ids.append(f"{_PREFIXES[block.kind]}_{secrets.token_hex(16)}")
        return self._ids[block.index]

    def _item(self, block: Block, status: ItemStatus | None = None) -> Item:
        """Without ``status``, of a block that has ended."""
        status = status or ("completed" if block.complete else "incomplete")
        item_id = self._id(block)
        if block.kind is Kind.CALL:
            return CallItem(
                id=item_id,
                status=status,
                call_id=block.call_id,
                name=block.name,
                arguments=block.text,
            )
        shown = status != "in_progress"
        if block.kind is Kind.REASONING:
            thought = [ReasoningText(text=block.text)] if shown else []
            return ReasoningItem(id=item_id, status=status, content=thought)
        said = [OutputText(text=block.text)] if shown else []
        return MessageItem(id=item_id, status=status, content=said)

    def _response(self, usage: Usage | None) -> ResponsesResponse:
        """``usage`` None: at the start of a stream."""
        job, request = self._job, self._request
        params = job.params[0]
        assert isinstance(params, SamplingParams)
        wanted = request.text.format if request.text else None
        effort = request.reasoning.effort if request.reasoning else None
        default_choice: ToolMode = "auto" if request.tools else "none"
        return ResponsesResponse(
            id=job.id,
            created_at=job.created,
            status=self._status,
            incomplete_details=IncompleteDetails() if self._status == "incomplete" else None,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            model=job.model,
            output=[self._item(block) for block in self._reader.blocks],
            parallel_tool_calls=request.parallel_tool_calls is not False,
            reasoning=ReasoningShown(effort=effort),
            temperature=params.temperature,
            text=TextShown(format=wanted or TextFormat(type="text")),
            tool_choice=request.tool_choice or default_choice,
            tools=request.tools or [],
            top_p=params.top_p,
            usage=self._usage(usage) if usage else None,
            user=request.user,
        )

    def _usage(self, usage: Usage) -> ResponsesUsage:
        return ResponsesUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputDetails(
                cached_tokens=usage.prompt_tokens_details.cached_tokens
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputDetails(
                reasoning_tokens=count_reasoning(self._state, self._reader.reasoning(), usage)
            ),
            total_tokens=usage.total_tokens,
        )


_PREFIXES = {Kind.TEXT: "msg", Kind.REASONING: "rs", Kind.CALL: "fc"}


def _part(kind: Kind, text: str) -> OutputText | ReasoningText:
    return OutputText(text=text) if kind is Kind.TEXT else ReasoningText(text=text)
