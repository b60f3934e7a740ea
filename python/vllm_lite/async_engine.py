"""The engine for asyncio: many requests, each an async iterator of outputs."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable

import zmq.asyncio

from vllm_lite.clients import ProcessClient
from vllm_lite.config import EngineConfig
from vllm_lite.engine import Engine
from vllm_lite.errors import EngineDeadError
from vllm_lite.messages import decode_outputs
from vllm_lite.outputs import RequestOutput
from vllm_lite.requests import Prompt
from vllm_lite.sampling_params import SamplingParams
from vllm_lite.stats import EngineStats

_Item = tuple[RequestOutput, Exception | None] | Exception


class AsyncLLMEngine:
    """An engine core and a worker in processes of their own, driven from one event loop.

    ``AsyncLLMEngine("smollm2", max_model_len=2048)``; vLLM's ``from_engine_args`` works too. Construction blocks until
    the engine is ready. All methods belong to the event loop that first calls ``generate``.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
        **options: object,
    ) -> None:
        self._attach(Engine(model, multiprocess=True, progress=progress, **options))

    @classmethod
    def from_engine_args(cls, args: EngineConfig) -> "AsyncLLMEngine":
        return cls(**{name: getattr(args, name) for name in args.__struct_fields__})

    @classmethod
    def over(cls, client: ProcessClient, config: EngineConfig) -> "AsyncLLMEngine":
        """For a process that did not start the engine itself."""
        engine = cls.__new__(cls)
        engine._attach(Engine.over(client, config))
        return engine

    def _attach(self, engine: Engine) -> None:
        self.engine = engine
        self.tokenizer = engine.tokenizer
        self.model_config = engine.model_config
        self.config = engine.config
        self._queues: dict[str, asyncio.Queue[_Item]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._dead: str | None = None
        self._ids = itertools.count()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Yields outputs of the kind that ``sampling_params.output_kind`` asks for.

        Leaving the iterator in any way before its end aborts the request. Raises ``ValueError`` for a bad request,
        ``QueueFullError`` if the waiting queue is full, ``EngineDeadError`` if the engine is gone and
        ``EngineError`` if this request failed.
        """
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        self._start_reader()
        request_id = f"request-{next(self._ids)}" if request_id is None else request_id
        self.engine.add_request(request_id, prompt, sampling_params, priority)
        queue: asyncio.Queue[_Item] = asyncio.Queue()
        self._queues[request_id] = queue
        self._idle.clear()
        finished = False
        try:
            while not finished:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                output, error = item
                finished = output.finished
                if error is not None:
                    raise error
                yield output
        finally:
            del self._queues[request_id]
            if not finished:
                self.engine.abort_request(request_id)
            if not self._queues:
                self._idle.set()

    async def abort(self, request_id: str) -> None:
        """Ends a request; whoever iterates over it gets ``RequestAborted``."""
        queue = self._queues.get(request_id)
        self.engine.abort_request(request_id)
        if queue is not None:
            queue.put_nowait(RequestAborted(f"request {request_id} was aborted"))

    def health(self) -> str | None:
        """None: healthy; else why not."""
        return self._dead

    def stats(self) -> EngineStats:
        return self.engine.stats()

    async def drain(self) -> None:
        """Returns when nothing is in flight."""
        await self._idle.wait()

    def declare_dead(self, reason: str) -> None:
        """The engine is gone: every request ends with ``EngineDeadError``, as does every new one."""
        self._dead = reason
        for queue in self._queues.values():
            queue.put_nowait(EngineDeadError(reason))

    def close(self) -> None:
        """Ends the engine's processes. Harmless when called again."""
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None
        if self._dead is None:
            self.declare_dead("the engine is closed")
        self.engine.close()

    # --- reading ----------------------------------------------------------------------------------

    def _start_reader(self) -> None:
        if self._reader is None:
            self._reader = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        client = self.engine.client
        assert isinstance(client, ProcessClient)
        pull = zmq.asyncio.Socket.from_socket(client.pull)
        while self._dead is None:
            try:
                # Wakes now and then only to see whether the engine is still alive.
                if await pull.poll(500):
                    self._dispatch(await pull.recv())
                client.check_alive()
            except EngineDeadError as error:
                self.declare_dead(str(error))

    def _dispatch(self, message: bytes) -> None:
        for output, error in self.engine.process(decode_outputs(message)):
            queue = self._queues.get(output.request_id)
            if queue is not None:
                queue.put_nowait((output, error))


class RequestAborted(Exception):
    """The request was ended by ``abort``."""
