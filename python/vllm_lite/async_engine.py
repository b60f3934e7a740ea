"""The engine for asyncio: many requests, each an async iterator of outputs."""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, Self, cast

from vllm_lite.clients import ProcessClient
from vllm_lite.config import EngineConfig
from vllm_lite.engine import AnyOutput, Engine, Params
from vllm_lite.errors import EngineDeadError
from vllm_lite.model_files import ModelFiles
from vllm_lite.outputs import PoolingRequestOutput, RequestOutput
from vllm_lite.pooling_params import PoolingParams
from vllm_lite.requests import Prompt
from vllm_lite.sampling_params import RequestOutputKind, SamplingParams
from vllm_lite.stats import EngineStats

logger = logging.getLogger(__name__)

# From the engine core, until others in the event loop get their turn. A stream's become one output,
# so that a loop that is behind gets less work, not more.
_MESSAGES_AT_ONCE = 16


class _Mailbox:
    """What one request has given and its iterator has not taken: never more than one output.

    New deltas are joined to those that wait; any other output has all that the one before it has.
    """

    def __init__(self, is_delta: bool) -> None:
        self._is_delta = is_delta
        self._output: AnyOutput | None = None
        self._error: Exception | None = None
        # Set while the iterator waits. A future costs half of what an Event does, for every token.
        self._waiting: asyncio.Future[None] | None = None

    def put(self, output: AnyOutput) -> None:
        waiting = self._output
        if (
            self._is_delta
            and isinstance(waiting, RequestOutput)
            and isinstance(output, RequestOutput)
        ):
            waiting.append(output)
        else:
            self._output = output
        self._wake()

    def fail(self, error: Exception) -> None:
        """Raised once the output that waits has been taken."""
        self._error = error
        self._wake()

    async def get(self) -> AnyOutput:
        if self._output is None and self._error is None:
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        output, self._output = self._output, None
        if output is None:
            assert self._error is not None
            raise self._error
        return output

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class AsyncLLMEngine:
    """An engine core and a worker in processes of their own, driven from one event loop.

    ``AsyncLLMEngine("smollm2", max_model_len=2048)``; vLLM's ``from_engine_args`` works too.
    Construction blocks until the engine is ready. One event loop at a time: a new one may take over
    when nothing is running.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> None:
        self._attach(Engine(model, multiprocess=True, progress=progress, **options))

    @classmethod
    def from_engine_args(cls, args: EngineConfig) -> Self:
        return cls(**{name: getattr(args, name) for name in args.__struct_fields__})

    @classmethod
    def over(cls, client: ProcessClient, config: EngineConfig, files: ModelFiles) -> Self:
        """For a process that did not start the engine itself."""
        engine = cls.__new__(cls)
        engine._attach(Engine.over(client, config, files))
        return engine

    def _attach(self, engine: Engine) -> None:
        assert isinstance(engine.client, ProcessClient)
        self.engine = engine
        self.tokenizer = engine.tokenizer
        self.model_config = engine.model_config
        self.config = engine.config
        self._client = engine.client
        self._mailboxes: dict[str, _Mailbox] = {}
        self._last_news = 0.0  # of the engine core, or of requests after none
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watched_fds: list[int] = []
        self._idle = asyncio.Event()
        self._idle.set()
        self._dead: str | None = None
        self._ids = itertools.count()

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields outputs of the kind that ``sampling_params.output_kind`` asks for.

        The request goes on while nobody takes its outputs: what waits is one output, with deltas
        joined, and so never more than the whole answer. Leaving the iterator in any way before its
        end aborts the request.

        Raises ``ValueError`` for a bad request, ``QueueFullError`` if the waiting queue is full,
        ``EngineDeadError`` if the engine is gone and ``EngineError`` if this request failed.
        """
        # Not a generator around it: it would cost every token of every stream.
        outputs = self._run(prompt, sampling_params, request_id, priority)
        return cast(AsyncGenerator[RequestOutput, None], outputs)

    def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Yields one output, the prompt's vector. Errors are those of ``generate``."""
        outputs = self._run(prompt, pooling_params, request_id, priority)
        return cast(AsyncGenerator[PoolingRequestOutput, None], outputs)

    async def _run(
        self,
        prompt: Prompt,
        params: Params,
        request_id: str | None,
        priority: int,
    ) -> AsyncGenerator[AnyOutput, None]:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        self.engine.check_usable()
        self._use_running_loop()
        request_id = f"request-{next(self._ids)}" if request_id is None else request_id
        self.engine.add_request(request_id, prompt, params, priority)
        if not self._mailboxes:
            self._last_news = time.monotonic()
        is_delta = (
            isinstance(params, SamplingParams) and params.output_kind is RequestOutputKind.DELTA
        )
        mailbox = _Mailbox(is_delta)
        self._mailboxes[request_id] = mailbox
        self._idle.clear()
        finished = False
        try:
            while not finished:
                output = await mailbox.get()
                finished = output.finished
                yield output
        finally:
            # After abort() the id may already be another request's.
            if self._mailboxes.get(request_id) is mailbox:
                self._forget(request_id)
                if not finished:
                    self.engine.abort_request(request_id)

    async def abort(self, request_id: str) -> None:
        """Ends a request: its iterator gives what there is, finish_reason "abort", and stops."""
        output = self.engine.end_request(request_id)
        mailbox = self._mailboxes.get(request_id)
        if output is None or mailbox is None:
            return
        self._forget(request_id)
        mailbox.put(output)

    def health(self) -> str | None:
        """None: healthy; else why not.

        An engine core that gives no news of its work for longer than a step may take
        (``step_timeout``) is not healthy, though it may come back.
        """
        if self._dead is None and (reason := self._client.death_reason()) is not None:
            self.declare_dead(reason)
        silence = time.monotonic() - self._last_news
        if self._dead is None and self._mailboxes and silence > self.config.step_timeout:
            return f"the engine core has given no news for {silence:.0f} s, with requests running"
        return self._dead

    def stats(self) -> EngineStats:
        return self.engine.stats()

    async def drain(self) -> None:
        """Returns when nothing is in flight."""
        await self._idle.wait()

    def declare_dead(self, reason: str) -> None:
        """The engine is gone: every request, also every new one, ends with ``EngineDeadError``."""
        if self._dead is not None:
            return
        self._dead = reason
        self._leave_loop()
        for mailbox in self._mailboxes.values():
            mailbox.fail(EngineDeadError(reason))

    def close(self) -> None:
        """Ends the engine's processes. Harmless when called again."""
        self.declare_dead("the engine is closed")
        self.engine.close()

    def _forget(self, request_id: str) -> None:
        del self._mailboxes[request_id]
        if not self._mailboxes:
            self._idle.set()

    # --- reading ----------------------------------------------------------------------------------

    def _use_running_loop(self) -> None:
        """Makes the running event loop call us when there is news, or when the engine dies."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None:
            if self._mailboxes and not self._loop.is_closed():
                raise RuntimeError("the engine has requests that run in another event loop")
            self._leave_loop()
            # What a closed loop left behind: nobody waits for it.
            self.engine.abort_request(list(self._mailboxes))
            self._mailboxes.clear()
        # An event belongs to the loop that first waits for it.
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop = loop
        self._watched_fds = [self._client.fileno(), *self._client.death_fds()]
        for fd in self._watched_fds:
            loop.add_reader(fd, self._read)
        loop.call_soon(self._read)

    def _leave_loop(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            for fd in self._watched_fds:
                self._loop.remove_reader(fd)
        self._loop = None

    def _read(self) -> None:
        """Takes what has arrived; the descriptor does not become readable for the rest."""
        if self._dead is not None or self._loop is None:
            return
        try:
            for _ in range(_MESSAGES_AT_ONCE):
                news = self._client.receive_now()
                if news is None:
                    break
                self._last_news = time.monotonic()
                for output, error in self.engine.process(news):
                    mailbox = self._mailboxes.get(output.request_id)
                    if mailbox is None:
                        continue
                    if error is None:
                        mailbox.put(output)
                    else:
                        mailbox.fail(error)
            else:
                self._loop.call_soon(self._read)  # after the others' turn
            self._client.check_alive()
        except EngineDeadError as error:
            self.declare_dead(str(error))
        except Exception as error:
            logger.exception("the engine's news cannot be read")
            self.declare_dead(f"the engine's news cannot be read: {error}")
