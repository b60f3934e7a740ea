"""Runs one generation request and writes its answer, streamed or whole.

The whole life of an answer is in ``GenerationResponse``: it starts the engine's generators, picks
the status from what comes first, and closes the generators as soon as the client goes away, which
aborts the request.
"""

import asyncio
import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from vllm_lite.errors import EngineError
from vllm_lite.outputs import CompletionOutput, PromptLogprobs, RequestOutput
from vllm_lite.pooling_params import PoolingParams
from vllm_lite.sampling_params import SamplingParams
from vllm_lite.server.connection import WRITE_PART
from vllm_lite.server.errors import (
    ApiError,
    ErrorResponse,
    from_exception,
    internal_error,
    unavailable,
)
from vllm_lite.server.protocol import GenerationRequest, PromptTokensDetails, Usage
from vllm_lite.server.state import ServerState

logger = logging.getLogger("vllm_lite.server")

# Above this many tokens and alternatives an answer is rendered in a thread, off the event loop.
_LARGE_ANSWER = 4096
# How long a client that does not read may hold up the last error event.
_LAST_WORDS = 1.0

_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


T = TypeVar("T")


class Job(msgspec.Struct, kw_only=True):
    """A checked request: one engine request per prompt, ``params[i].n`` choices each.

    ``id`` is what the answer calls it. A client may choose it, so that the engine gets another.
    """

    id: str
    model: str
    created: int
    prompts: list[list[int]]
    params: list[SamplingParams | PoolingParams]
    priority: int
    stream: bool
    cache_salt: str = ""  # empty: none
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False

    @property
    def n(self) -> int:
        params = self.params[0]
        return params.n if isinstance(params, SamplingParams) else 1


# What is computed of a prompt itself: its tokens' log-probabilities, or a vector.
PromptResult = PromptLogprobs | list[float]


def make_job(
    request: GenerationRequest,
    prefix: str,
    *,
    model: str,
    prompts: list[list[int]],
    params: list[SamplingParams | PoolingParams],
) -> Job:
    """``prefix``: of the answer's id, which says what kind of object it is."""
    options = request.stream_options
    return Job(
        id=prefix + (request.request_id or secrets.token_hex(16)),
        model=model,
        created=int(time.time()),
        prompts=prompts,
        params=params,
        priority=request.priority or 0,
        cache_salt=request.cache_salt or "",
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        return_token_ids=bool(request.return_token_ids),
    )


class Renderer(ABC):
    """An endpoint's shapes. ``choice`` counts over all prompts: prompt x n + sample."""

    # Server-sent events carry their ``type`` as name, and no [DONE] follows the last.
    named_events = False

    def prompt(self, index: int, result: PromptResult) -> None:
        """Of the job's prompt ``index``; comes before its choices."""
        raise AssertionError("nothing was to be computed of a prompt")

    @abstractmethod
    def chunks(
        self, choice: int, output: CompletionOutput, usage: Callable[[], Usage]
    ) -> Iterator[msgspec.Struct]:
        """Events for what is new; none when there is nothing to tell. ``usage()``: up to here."""

    @abstractmethod
    def ending(self, usage: Usage) -> Iterator[msgspec.Struct]:
        """Events after the last choice has ended."""

    @abstractmethod
    def whole(self, outputs: Sequence[CompletionOutput], usage: Usage) -> msgspec.Struct:
        """The plain answer; ``outputs`` in the order of choices."""

    def error(self, error: ApiError) -> msgspec.Struct:
        """A stream's last event when the engine fails."""
        return ErrorResponse(error=error.info)


class GenerationResponse(Response):
    """An ASGI answer. In a stream an engine's error is the last event; no ``[DONE]`` follows it."""

    def __init__(self, state: ServerState, job: Job, renderer: Renderer) -> None:
        self.background = None
        self._state = state
        self._path = ""
        self._job = job
        self._renderer = renderer
        self._started = False  # the status line is out
        self._complete = False  # the last byte is out or on its way
        self._has_output = False
        self._aborted = False
        self._work: asyncio.Task[None] | None = None
        self._write_part: Callable[[bytes], bool] = lambda _: False
        self._prompt_tokens = sum(map(len, job.prompts))
        # Of prompts without samples there may be more than may wait.
        limit = min(state.options.max_choices, state.engine.config.max_num_waiting)
        self._running = asyncio.Semaphore(limit)
        self._n = job.n
        self._cached = [0] * len(job.prompts)
        self._generated = 0

    def abort(self) -> None:
        """Ends the request with an error that says the server stops."""
        self._aborted = True
        if self._work is not None:
            self._work.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._path = scope["path"]
        if self._state.stopped:  # the grace time ended while the request was being parsed
            await self._last_words(send, _shutting_down())
            return
        self._write_part = scope.get(WRITE_PART, self._write_part)
        self._work = asyncio.create_task(self._run(send))
        gone = asyncio.create_task(_disconnected(receive))
        self._state.active.add(self)
        try:
            await asyncio.wait({self._work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            self._work.cancel()
            await asyncio.gather(self._work, gone, return_exceptions=True)
            self._state.active.discard(self)
        if self._aborted and not self._complete:
            await self._last_words(send, _shutting_down())

    async def _run(self, send: Send) -> None:
        try:
            if self._job.stream:
                await self._stream(send)
            else:
                await self._plain(send)
        except OSError:
            return  # the connection broke while sending
        except Exception as exception:
            known = from_exception(exception, started=self._has_output)
            if known is None:
                logger.exception("request %s failed", self._job.id)
            await self._last_words(send, known or internal_error())

    async def _last_words(self, send: Send, error: ApiError) -> None:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(_LAST_WORDS):
                await self._send_error(send, error)

    async def _stream(self, send: Send) -> None:
        async with aclosing(self._outputs()) as outputs:
            async for prompt_index, output in outputs:
                self._count(prompt_index, output)
                if output.prompt_logprobs is None:
                    events = self._events(prompt_index, output)
                else:
                    events = await self._state.offload(partial(self._events, prompt_index, output))
                if events or not self._started:
                    await self._send_events(send, events, more=True)
        ending = partial(self._frame, self._renderer.ending(self._usage()))
        # It may count what was generated anew.
        is_large = self._generated > _LARGE_ANSWER
        last = await self._state.offload(ending) if is_large else ending()
        if not self._renderer.named_events:
            last += b"data: [DONE]\n\n"
        await self._send_events(send, last, more=False)

    def _events(self, prompt_index: int, output: RequestOutput) -> bytes:
        if output.prompt_logprobs is not None:
            self._renderer.prompt(prompt_index, output.prompt_logprobs)
        events = b""
        for sample in output.outputs:
            choice = prompt_index * self._n + sample.index
            events += self._frame(self._renderer.chunks(choice, sample, self._usage))
        return events

    def _frame(self, events: Iterable[msgspec.Struct]) -> bytes:
        encode = self._state.encoder.encode
        if not self._renderer.named_events:
            return b"".join(b"data: " + encode(event) + b"\n\n" for event in events)
        return b"".join(
            b"event: " + event.type.encode() + b"\ndata: " + encode(event) + b"\n\n"  # type: ignore[attr-defined]
            for event in events
        )

    async def _plain(self, send: Send) -> None:
        n = self._n
        choices: list[CompletionOutput | None] = [None] * (len(self._job.prompts) * n)
        async with aclosing(self._outputs()) as outputs:
            async for prompt_index, output in outputs:
                self._count(prompt_index, output)
                if output.prompt_logprobs is not None:
                    self._renderer.prompt(prompt_index, output.prompt_logprobs)
                for sample in output.outputs:
                    choices[prompt_index * n + sample.index] = sample
        complete = [choice for choice in choices if choice is not None]  # _one() has checked
        usage = self._usage()

        def render() -> bytes:
            return self._state.encoder.encode(self._renderer.whole(complete, usage))

        body = await self._state.offload(render) if self._weight() > _LARGE_ANSWER else render()
        await self._send_body(send, 200, body)

    def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Outputs of all prompts as they come, each with its prompt's index."""
        prompts = len(self._job.prompts)
        if prompts == 1:
            return self._one(0)
        return merge([self._one(index) for index in range(prompts)])

    def _weight(self) -> int:
        """Tokens, alternatives and numbers that the whole answer tells of, roughly."""
        params = self._job.params[0]
        if isinstance(params, PoolingParams):
            return len(self._job.prompts) * self._state.engine.model_config.hidden_size
        weight = self._generated * (1 + (params.logprobs or 0))
        if params.prompt_logprobs is not None:
            weight += self._prompt_tokens * (1 + params.prompt_logprobs)
        return weight

    def _start(self, index: int, request_id: str) -> AsyncGenerator[RequestOutput, None]:
        job, params = self._job, self._job.params[index]
        if isinstance(params, PoolingParams):
            return self._pool(index, params, request_id)
        prompt: list[int] | Mapping[str, object] = job.prompts[index]
        if job.cache_salt:
            prompt = {"prompt_token_ids": job.prompts[index], "cache_salt": job.cache_salt}
        return self._state.engine.generate(prompt, params, request_id, job.priority)

    async def _pool(
        self, index: int, params: PoolingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """Gives the renderer the prompt's vector; what is left is an output without a token."""
        job = self._job
        prompt = job.prompts[index]
        async with aclosing(
            self._state.engine.encode(prompt, params, request_id, job.priority)
        ) as outputs:
            async for output in outputs:
                if output.error is not None:
                    raise EngineError(f"the engine ended the request: {output.error}")
                self._renderer.prompt(index, output.outputs.data)
                done = CompletionOutput(0, "", [], finish_reason="stop")
                cached = output.num_cached_tokens
                yield RequestOutput(request_id, None, prompt, [done], True, cached)

    async def _one(self, index: int) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        job = self._job
        request_id = f"{job.id}-{secrets.token_hex(8)}"
        watch = self._state.metrics.watch(len(job.prompts[index]), job.stream)
        reason: str | None = "abort"
        has_output = False
        finished: list[str] = []
        try:
            async with self._running, aclosing(self._start(index, request_id)) as outputs:
                async for output in outputs:
                    self._has_output = True
                    has_output = True
                    watch.output(output)
                    for sample in output.outputs:
                        if sample.finish_reason in ("abort", "error"):
                            raise EngineError(
                                f"the engine ended the request: {sample.finish_reason}"
                            )
                        if sample.finish_reason is not None:
                            finished.append(sample.finish_reason)
                    yield index, output
            if len(finished) != self._n:
                raise EngineError(f"the engine finished {len(finished)} of {self._n} samples")
            reason = finished[-1]
        except Exception as error:
            # Before any output all but an EngineError means that the engine did not take it.
            reason = "error" if has_output or isinstance(error, EngineError) else None
            raise
        finally:
            if reason is not None:
                watch.finish(reason)

    def _count(self, prompt_index: int, output: RequestOutput) -> None:
        cached = self._cached
        cached[prompt_index] = max(cached[prompt_index], output.num_cached_tokens)
        for sample in output.outputs:
            self._generated += len(sample.token_ids)

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._generated,
            total_tokens=self._prompt_tokens + self._generated,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached)),
        )

    async def _send_error(self, send: Send, error: ApiError) -> None:
        if not self._started:
            body = error.body(self._path)
            await self._send_body(send, error.status, body, error.headers)
        elif not self._complete:
            await self._send_events(send, self._frame([self._renderer.error(error)]), more=False)

    async def _send_events(self, send: Send, events: bytes, *, more: bool) -> None:
        if not self._started:
            self._started = True
            start: Message = {"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS}
            await send(start)
        elif more and self._write_part(events):
            return
        self._complete = not more
        await send({"type": "http.response.body", "body": events, "more_body": more})

    async def _send_body(
        self, send: Send, status: int, body: bytes, headers: dict[str, str] | None = None
    ) -> None:
        self._started = self._complete = True
        raw = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *((name.encode(), value.encode()) for name, value in (headers or {}).items()),
        ]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body", "body": body, "more_body": False})


async def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Items of all sources in the order they come; the first exception ends it and closes all.

    The queue is bounded, so a slow reader slows the sources instead of filling memory.
    """
    queue: asyncio.Queue[tuple[T] | Exception | None] = asyncio.Queue(maxsize=len(sources))

    async def pump(source: AsyncGenerator[T, None]) -> None:
        end: Exception | None = None
        try:
            async with aclosing(source):
                async for item in source:
                    await queue.put((item,))
        except Exception as error:
            end = error
        await queue.put(end)

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
        left = len(tasks)
        while left:
            entry = await queue.get()
            if entry is None:
                left -= 1
            elif isinstance(entry, Exception):
                raise entry
            else:
                yield entry[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _shutting_down() -> ApiError:
    return unavailable("the server is shutting down; send the request again")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
