"""``/v1/chat/completions``."""

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from vllm_lite.chat_template import check_nesting
from vllm_lite.outputs import CompletionOutput, PromptLogprobs
from vllm_lite.sampling_params import SamplingParams
from vllm_lite.server.errors import bad_request, from_decode_error, show
from vllm_lite.server.generation import Job, PromptResult
from vllm_lite.server.logprobs import LogprobsWriter, prompt_list
from vllm_lite.server.protocol import (
    ChatChoice,
    ChatChunk,
    ChatLogprobs,
    ChatRequest,
    ChatResponse,
    ChunkChoice,
    Delta,
    Message,
    PromptLogprobsList,
    ResponseMessage,
    ToolCall,
    Usage,
)
from vllm_lite.server.sampling import (
    check_choices,
    check_token_ids,
    for_prompts,
    output_length,
    refuse_unsupported,
    sampling_params,
    served_name,
)
from vllm_lite.server.state import ServerState

# What the server itself hands to the template; chat_template_kwargs may not take their place.
_RESERVED_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_dict",
        "return_tensors",
        "special_tokens",
        "template",
        "tokenize",
        "tokenizer",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)

_decoder = msgspec.json.Decoder(ChatRequest)


def prepare(state: ServerState, body: bytes) -> tuple[Job, "ChatRenderer"]:
    """Parses, checks, templates and tokenises a body; runs in a thread. Raises ``ApiError``."""
    try:
        request = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise from_decode_error(error, body) from error
    engine = state.engine
    model = served_name(engine, request.model)
    refuse_unsupported(request)
    _refuse_tool_use(request)
    logprobs = _logprobs(request)
    check_choices(state, request, 1, "messages")
    token_ids = _encode(state, request)
    length = output_length(
        request,
        len(token_ids),
        engine.config.max_model_len,
        engine.model_config.generation_defaults.get("max_new_tokens"),
        "messages",
        may_be_zero=request.prompt_logprobs is not None,
    )
    check_token_ids(token_ids, engine.model_config.vocab_size, "messages")
    params = sampling_params(
        request, engine, logprobs=logprobs, prompt_logprobs=request.prompt_logprobs,
        max_tokens=length,
    )  # fmt: skip
    options = request.stream_options
    job = Job(
        id=f"chatcmpl-{secrets.token_hex(16)}",
        model=model,
        created=int(time.time()),
        prompts=[token_ids],
        params=for_prompts(params, [length]),
        priority=request.priority or 0,
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
    )
    return job, ChatRenderer(state, job, bool(request.return_tokens_as_token_ids))


def _logprobs(request: ChatRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs is not None:
        raise bad_request("top_logprobs: needs logprobs true", "top_logprobs")
    return None


def _refuse_tool_use(request: ChatRequest) -> None:
    """Tools may be shown to the model, but not asked for: calls in its answer are not parsed."""
    for index, tool in enumerate(request.tools or ()):
        if tool.type != "function":
            param = f"tools[{index}].type"
            raise bad_request(f"{param}: {show(tool.type)} is not supported; use 'function'", param)
        _check_nesting(tool.function.parameters, f"tools[{index}].function.parameters")
    choice = request.tool_choice
    if (request.tools and choice != "none") or choice not in (None, "none", "auto"):
        name = "tools" if choice is None else "tool_choice"
        raise bad_request(
            f"{name}: tool calling is not supported by this server; leave tools out or set"
            " tool_choice to 'none'",
            name,
            "unsupported_parameter",
        )


def _encode(state: ServerState, request: ChatRequest) -> list[int]:
    """The token ids of the conversation, through the model's chat template."""
    kwargs = request.chat_template_kwargs or {}
    reserved = _RESERVED_KWARGS & kwargs.keys()
    if reserved:
        raise bad_request(
            f"chat_template_kwargs: {', '.join(sorted(reserved))} cannot be set there",
            "chat_template_kwargs",
        )
    _check_nesting(kwargs, "chat_template_kwargs")
    go_on = bool(request.continue_final_message)
    if go_on and request.add_generation_prompt:
        raise bad_request(
            "continue_final_message: cannot be true together with add_generation_prompt",
            "continue_final_message",
        )
    prompt = (
        request.add_generation_prompt if request.add_generation_prompt is not None else not go_on
    )
    try:
        token_ids = state.engine.tokenizer.encode_chat(
            [_for_template(message, index) for index, message in enumerate(request.messages)],
            tools=[msgspec.to_builtins(tool) for tool in request.tools] if request.tools else None,
            add_generation_prompt=prompt,
            continue_final_message=go_on,
            template_kwargs=kwargs,
        )
    except ValueError as error:  # the template refuses this conversation, or there is no template
        raise bad_request(f"messages: {error}", "messages") from error
    if not token_ids:
        raise bad_request("messages: the chat template makes an empty prompt of them", "messages")
    return token_ids


def _check_nesting(value: object, param: str) -> None:
    try:
        check_nesting(value, param)
    except ValueError as error:
        raise bad_request(str(error), param) from error


def _for_template(message: Message, index: int) -> dict[str, Any]:
    """A message as templates expect it.

    One text (parts are joined by newlines), and the arguments of calls as objects.
    """
    where = f"messages[{index}]"
    out: dict[str, Any] = {"role": message.role, "content": _text(message, where)}
    for name in ("name", "reasoning_content", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            out[name] = value
    if message.tool_calls:
        out["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{position}]")
            for position, call in enumerate(message.tool_calls)
        ]
    return out


def _text(message: Message, where: str) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role != "assistant":
            raise bad_request(
                f"{where}.content: missing; only the assistant's may be left out", where
            )
        return ""
    texts = []
    for position, part in enumerate(message.content):
        param = f"{where}.content[{position}]"
        if part.type != "text":
            raise bad_request(
                f"{param}.type: {show(part.type)} is not supported; only 'text' parts are",
                f"{param}.type",
                "unsupported_parameter",
            )
        if part.text is None:
            raise bad_request(f"{param}.text: missing", f"{param}.text")
        texts.append(part.text)
    return "\n".join(texts)


def _tool_call(call: ToolCall, where: str) -> dict[str, Any]:
    arguments = call.function.arguments
    param = f"{where}.function.arguments"
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise bad_request(f"{param}: not a JSON object: {error}", param) from error
    _check_nesting(arguments, param)
    out: dict[str, Any] = {
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }
    if call.id is not None:
        out["id"] = call.id
    return out


class ChatRenderer:
    def __init__(self, state: ServerState, job: Job, ids: bool) -> None:
        self._job = job
        self._usage_field: msgspec.UnsetType | None = None if job.include_usage else msgspec.UNSET
        self._greeted: set[int] = set()  # choices whose role is out
        self._prompt_logprobs: PromptLogprobs | None = None
        params = job.params[0]
        assert isinstance(params, SamplingParams)
        self._prompt_top = params.prompt_logprobs
        top = params.logprobs
        # Chat log-probabilities keep no state between pieces: one writer serves all choices.
        self._writer = (
            LogprobsWriter(state.token_texts, top, ids=ids, skip_special=True)
            if top is not None
            else None
        )

    def prompt(self, index: int, result: PromptResult) -> None:
        assert isinstance(result, PromptLogprobs)
        self._prompt_logprobs = result

    def chunks(
        self, choice: int, output: CompletionOutput, usage: Usage | None
    ) -> Iterator[ChatChunk]:
        if choice not in self._greeted:
            self._greeted.add(choice)
            yield self._chunk(
                [ChunkChoice(index=choice, delta=Delta(role="assistant", content=""))], usage
            )
        finished = output.finish_reason is not None
        if output.text or finished or (self._writer and output.token_ids):
            shown = output.text or not finished
            yield self._chunk(
                [
                    ChunkChoice(
                        index=choice,
                        delta=Delta(content=output.text) if shown else Delta(),
                        logprobs=self._logprobs(output) if output.token_ids else None,
                        finish_reason=output.finish_reason,
                        stop_reason=output.stop_reason if finished else msgspec.UNSET,
                    )
                ],
                usage,
            )

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        return self._chunk([], usage)

    def whole(self, outputs: Sequence[CompletionOutput], usage: Usage) -> ChatResponse:
        job = self._job
        choices = [
            ChatChoice(
                index=choice,
                message=ResponseMessage(content=output.text),
                logprobs=self._logprobs(output),
                finish_reason=output.finish_reason or "stop",
                stop_reason=output.stop_reason,
            )
            for choice, output in enumerate(outputs)
        ]
        prompt_logprobs: PromptLogprobsList | msgspec.UnsetType = msgspec.UNSET
        if self._prompt_logprobs is not None and self._prompt_top is not None:
            prompt_logprobs = prompt_list(self._prompt_logprobs, self._prompt_top)
        return ChatResponse(
            id=job.id, created=job.created, model=job.model, choices=choices, usage=usage,
            prompt_logprobs=prompt_logprobs,
        )  # fmt: skip

    def _logprobs(self, output: CompletionOutput) -> ChatLogprobs | None:
        if self._writer is None:
            return None
        return self._writer.chat(output.token_ids, output.logprobs or [])

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | None) -> ChatChunk:
        job = self._job
        return ChatChunk(
            id=job.id,
            created=job.created,
            model=job.model,
            choices=choices,
            usage=usage or self._usage_field,
        )
