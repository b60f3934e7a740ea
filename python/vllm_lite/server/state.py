"""What the routes of one server share."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import msgspec

from vllm_lite.metrics import Metrics
from vllm_lite.server.engine import EngineLike
from vllm_lite.server.logprobs import TokenTexts
from vllm_lite.server.options import ServerOptions

T = TypeVar("T")


class Abortable(Protocol):
    def abort(self) -> None: ...


class ServerState:
    """``draining``: new requests get 503. ``stopped``: running ones are ended, too."""

    def __init__(self, engine: EngineLike, options: ServerOptions) -> None:
        self.engine = engine
        self.options = options
        self.metrics = Metrics(engine.config.served_model_names[0], engine.stats)
        self.encoder = msgspec.json.Encoder()
        self.token_texts = TokenTexts(engine.tokenizer)
        self.created = int(time.time())
        self.draining = False
        self.stopped = False
        self.active: set[Abortable] = set()
        self.pending_body_bytes = 0
        self._threads = ThreadPoolExecutor(options.threads, thread_name_prefix="vllm-lite-http")

    async def offload(self, work: Callable[[], T]) -> T:
        """Runs ``work`` in a thread, so that the event loop answers others meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def abort_all(self) -> None:
        self.draining = self.stopped = True
        for response in list(self.active):
            response.abort()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
