"""Runs the server on sockets that are already bound, and ends it in order.

First SIGTERM or SIGINT: the sockets close and new requests on open connections get 503; what runs
may finish within ``shutdown_grace`` seconds, then it is aborted (a stream gets an error event, a
plain request 503). Second signal: at once. ``serve`` returns in every case, so that the exit code
is the caller's.
"""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import uvicorn

from vllm_lite.server.app import create_app
from vllm_lite.server.connection import Connection
from vllm_lite.server.engine import EngineLike
from vllm_lite.server.options import ServerOptions
from vllm_lite.server.state import ServerState

logger = logging.getLogger("vllm_lite.server")

T = TypeVar("T")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# After an abort: for error events to leave, and for the engine to free what was aborted.
_FLUSH_SECONDS = 3.0
_SHORT_FLUSH_SECONDS = 0.2  # after a second signal
_GARBAGE_THRESHOLD = (
    20_000  # objects made and not freed until the collector looks at the young ones
)


def run(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` on uvloop."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def settle_garbage() -> None:
    """Tells the garbage collector that what is there now stays, and to look less often.

    It would go through the tokenizer and all modules whenever streams have made some objects, and
    hold up everybody for tens of milliseconds. For a process that only serves.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GARBAGE_THRESHOLD, 20, 100)


async def serve(engine: EngineLike, sockets: list[socket.socket], options: ServerOptions) -> None:
    """Serves until a signal or cancellation, drains, and closes the sockets.

    Signals are taken over only in the main thread. Cancellation counts as two signals.
    """
    app = create_app(engine, options)
    state: ServerState = app.state.server
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=options.access_log,
        backlog=options.backlog,
        server_header=False,
        date_header=False,  # the gateway writes it
        proxy_headers=False,
        timeout_keep_alive=max(1, round(options.keep_alive)),
        timeout_graceful_shutdown=round(options.shutdown_grace + 2 * _FLUSH_SECONDS) + 1,
    )
    server = _Server(config, state)
    try:
        await server.serve(sockets)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_SECONDS):
                await engine.drain()
        if server.cancelled:
            raise asyncio.CancelledError
    finally:
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        state.close()


class _Server(uvicorn.Server):
    """Uvicorn's server, which polls and raises signals again, without those two habits."""

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config)
        self._state = state
        self._asked = asyncio.Event()
        self.cancelled = False

    def stop(self) -> None:
        """What a signal does: drain at the first call, end at once at the second."""
        if self._asked.is_set():
            self._end_now()
            return
        logger.info(
            "shutting down: %d requests have %g s to finish; signal again to end them now",
            len(self._state.active),
            self._state.options.shutdown_grace,
        )
        self._state.draining = self.should_exit = True
        self._asked.set()
        asyncio.get_running_loop().call_later(self._state.options.shutdown_grace, self._abort)

    async def main_loop(self) -> None:
        try:
            await self._asked.wait()
        except asyncio.CancelledError:
            # Leave in order here, too: sockets closed, requests ended. serve() passes it on.
            self.cancelled = True
            self.stop()
            self._end_now()

    def _abort(self) -> None:
        if self._state.active:
            logger.warning("ending %d running requests", len(self._state.active))
        self._state.abort_all()
        self._leave_in(_FLUSH_SECONDS)

    def _end_now(self) -> None:
        self._abort()
        self._leave_in(_SHORT_FLUSH_SECONDS)

    def _leave_in(self, seconds: float) -> None:
        """Waits for error events to leave, but not for clients that do not read them."""
        asyncio.get_running_loop().call_later(seconds, setattr, self, "force_exit", True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
