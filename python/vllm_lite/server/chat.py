"""``/v1/chat/completions``."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import msgspec

from vllm_lite.output_parser import Content, Event, Reasoning, ToolArguments, ToolCallStart
from vllm_lite.outputs import CompletionOutput, PromptLogprobs
from vllm_lite.sampling_params import SamplingParams
from vllm_lite.server.body import decode
from vllm_lite.server.conversation import echoed_text, encode_conversation
from vllm_lite.server.errors import ApiError, bad_request
from vllm_lite.server.generation import Job, PromptResult, Renderer, make_job
from vllm_lite.server.logprobs import LogprobsWriter, prompt_list
from vllm_lite.server.protocol import (
    CallDelta,
    CalledFunction,
    CallMade,
    ChatChoice,
    ChatChunk,
    ChatLogprobs,
    ChatRequest,
    ChatResponse,
    ChunkChoice,
    CompletionTokensDetails,
    Delta,
    FunctionDelta,
    PromptLogprobsList,
    ResponseMessage,
    Usage,
)
from vllm_lite.server.sampling import (
    check_choices,
    check_prompt_logprobs,
    check_token_ids,
    for_prompts,
    output_length,
    refuse_unsupported,
    sampling_params,
    served_name,
)
from vllm_lite.server.state import ServerState
from vllm_lite.server.tools import OutputPlan, check_tools, count_reasoning, plan_output

_decoder = msgspec.json.Decoder(ChatRequest)


def prepare(state: ServerState, body: bytes) -> tuple[Job, "ChatRenderer"]:
    """Parses, checks, templates and tokenises a body; runs in a thread. Raises ``ApiError``."""
    request = decode(_decoder, body)
    job, plan = make_chat_job(state, request, "chatcmpl-")
    return job, ChatRenderer(state, job, request, plan)


def make_chat_job(state: ServerState, request: ChatRequest, prefix: str) -> tuple[Job, OutputPlan]:
    """What every endpoint with conversations does, once it has made a ``ChatRequest``."""
    engine = state.engine
    model = served_name(engine, request.model)
    refuse_unsupported(request)
    logprobs = _logprobs(request)
    check_choices(state, request, 1, "messages")
    tools = check_tools(request)
    token_ids = encode_conversation(state, request, tools)
    length = output_length(
        request,
        len(token_ids),
        engine.config.max_model_len,
        engine.model_config.generation_defaults.get("max_new_tokens"),
        "messages",
        may_be_zero=request.prompt_logprobs is not None,
    )
    check_token_ids(token_ids, engine.model_config.vocab_size, "messages")
    if request.prompt_logprobs is not None:
        check_prompt_logprobs(len(token_ids), request.prompt_logprobs, "prompt_logprobs")
    try:
        params = sampling_params(
            request, engine, logprobs=logprobs, prompt_logprobs=request.prompt_logprobs,
            max_tokens=length,
        )  # fmt: skip
    except ApiError as error:
        raise error.renamed({"logprobs": "top_logprobs"}) from error
    plan, params = plan_output(state, request, tools, token_ids, params)
    job = make_job(
        request, prefix, model=model, prompts=[token_ids], params=for_prompts(params, [length])
    )
    return job, plan


def _logprobs(request: ChatRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs is not None:
        raise bad_request("top_logprobs: needs logprobs true", "top_logprobs")
    return None


class ChatRenderer(Renderer):
    def __init__(
        self, state: ServerState, job: Job, request: ChatRequest, plan: OutputPlan
    ) -> None:
        self._job = job
        # None: there is nothing to look for, and texts go through as they are.
        self._parsers = None if plan.plain else [plan.parser() for _ in range(job.n)]
        self._called: set[int] = set()  # choices with calls
        # Pieces of reasoning, also where they are not shown; None: there can be none.
        self._thoughts: list[str] | None = [] if plan.reasoning is not None else None
        self._state = state
        self._shows_reasoning = request.include_reasoning is not False
        ids = bool(request.return_tokens_as_token_ids)
        self._usage_field: msgspec.UnsetType | None = None if job.include_usage else msgspec.UNSET
        self._echo = echoed_text(request)
        self._greeted: set[int] = set()  # choices whose role is out, and the echo with it
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
        self, choice: int, output: CompletionOutput, usage: Callable[[], Usage]
    ) -> Iterator[ChatChunk]:
        job = self._job
        shown_usage = usage() if job.continuous_usage else self._usage_field
        if choice not in self._greeted:
            self._greeted.add(choice)
            first = self._chunk(
                [ChunkChoice(index=choice, delta=Delta(role="assistant", content=self._echo))],
                shown_usage,
            )
            if job.return_token_ids and len(self._greeted) == 1:
                first.prompt_token_ids = job.prompts[0]
            yield first
        finished = output.finish_reason is not None
        tells_ids = self._writer is not None or job.return_token_ids
        says = bool(output.text)
        if self._parsers is None:
            delta = Delta(content=output.text) if says or not finished else Delta()
        else:
            events = self._events(choice, output)
            says = bool(events)
            delta = _delta(events)
        if says or finished or (tells_ids and output.token_ids):
            yield self._chunk(
                [
                    ChunkChoice(
                        index=choice,
                        delta=delta,
                        logprobs=self._logprobs(output) if output.token_ids else None,
                        finish_reason=self._reason(choice, output),
                        stop_reason=output.stop_reason if finished else msgspec.UNSET,
                        token_ids=output.token_ids if job.return_token_ids else msgspec.UNSET,
                    )
                ],
                shown_usage,
            )

    def ending(self, usage: Usage) -> Iterator[ChatChunk]:
        if self._job.include_usage:
            yield self._chunk([], self._with_reasoning(usage))

    def whole(self, outputs: Sequence[CompletionOutput], usage: Usage) -> ChatResponse:
        job = self._job
        choices = [
            ChatChoice(
                index=choice,
                message=self._message(choice, output),
                logprobs=self._logprobs(output),
                finish_reason=self._reason(choice, output) or "stop",
                stop_reason=output.stop_reason,
                token_ids=output.token_ids if job.return_token_ids else msgspec.UNSET,
            )
            for choice, output in enumerate(outputs)
        ]
        prompt_logprobs: PromptLogprobsList | msgspec.UnsetType = msgspec.UNSET
        if self._prompt_logprobs is not None and self._prompt_top is not None:
            prompt_logprobs = prompt_list(self._prompt_logprobs, self._prompt_top)
        return ChatResponse(
            id=job.id,
            created=job.created,
            model=job.model,
            choices=choices,
            usage=self._with_reasoning(usage),
            prompt_token_ids=job.prompts[0] if job.return_token_ids else msgspec.UNSET,
            prompt_logprobs=prompt_logprobs,
        )

    def _message(self, choice: int, output: CompletionOutput) -> ResponseMessage:
        if self._parsers is None:
            return ResponseMessage(content=self._echo + output.text)
        message = _message(self._events(choice, output))
        if self._echo:
            message.content = self._echo + (message.content or "")
        return message

    def _events(self, choice: int, output: CompletionOutput) -> list[Event]:
        """What the parser tells of a choice's next text, or of its last."""
        assert self._parsers is not None
        parser = self._parsers[choice]
        events = parser.feed(output.text)
        if output.finish_reason is not None:
            events += parser.finish()
        if any(isinstance(event, ToolCallStart) for event in events):
            self._called.add(choice)
        if self._thoughts is not None:
            self._thoughts += [event.text for event in events if isinstance(event, Reasoning)]
        if not self._shows_reasoning:
            events = [event for event in events if not isinstance(event, Reasoning)]
        return events

    def _with_reasoning(self, usage: Usage) -> Usage:
        """At the end: the number of tokens of reasoning is known then."""
        if self._thoughts is not None:
            count = count_reasoning(self._state, "".join(self._thoughts), usage)
            usage.completion_tokens_details = CompletionTokensDetails(reasoning_tokens=count)
        return usage

    def _reason(self, choice: int, output: CompletionOutput) -> str | None:
        if output.finish_reason == "stop" and choice in self._called:
            return "tool_calls"
        return output.finish_reason

    def _logprobs(self, output: CompletionOutput) -> ChatLogprobs | None:
        if self._writer is None:
            return None
        return self._writer.chat(output.token_ids, output.logprobs or [])

    def _chunk(
        self, choices: list[ChunkChoice], usage: Usage | msgspec.UnsetType | None
    ) -> ChatChunk:
        job = self._job
        return ChatChunk(
            id=job.id,
            created=job.created,
            model=job.model,
            choices=choices,
            usage=usage,
        )


def _delta(events: Sequence[Event]) -> Delta:
    delta = Delta()
    if content := _joined(events, Content):
        delta.content = content
    if reasoning := _joined(events, Reasoning):
        delta.reasoning = delta.reasoning_content = reasoning
    calls = []
    for index, start, arguments in _calls(events):
        call = CallDelta(index=index, function=FunctionDelta(arguments=arguments))
        if start is not None:
            call.id, call.type, call.function.name = start.id, "function", start.name
        calls.append(call)
    if calls:
        delta.tool_calls = calls
    return delta


def _message(events: Sequence[Event]) -> ResponseMessage:
    """``content`` is null where there is something else in its place."""
    message = ResponseMessage(content=_joined(events, Content) or (None if events else ""))
    if reasoning := _joined(events, Reasoning):
        message.reasoning = message.reasoning_content = reasoning
    calls = [
        CallMade(id=start.id, function=CalledFunction(name=start.name, arguments=arguments))
        for _, start, arguments in _calls(events)
        if start is not None
    ]
    if calls:
        message.tool_calls = calls
    return message


def _joined(events: Sequence[Event], kind: type[Content] | type[Reasoning]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def _calls(events: Sequence[Event]) -> Iterator[tuple[int, ToolCallStart | None, str]]:
    """(index, its start if that is among the events, its arguments) of each call."""
    of_calls = (event for event in events if isinstance(event, (ToolCallStart, ToolArguments)))
    for index, run in groupby(of_calls, key=lambda event: event.index):
        start, arguments = None, []
        for event in run:
            if isinstance(event, ToolCallStart):
                start = event
            else:
                arguments.append(event.text)
        yield index, start, "".join(arguments)
