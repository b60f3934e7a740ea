"""``python -m vllm_lite.serve MODEL``: the serving parent. Starts API server, engine core and
worker, watches them, and ends them in order.

It binds the address before anything is loaded, so that a port in use is noticed at once, and
imports nothing heavy itself.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator

import msgspec
from tqdm import tqdm  # type: ignore[import-untyped]

from vllm_lite import log
from vllm_lite.arguments import engine_config, serve_parser, server_options
from vllm_lite.channel import ChannelClosed, Child, open_standard_fds
from vllm_lite.chat_template import load_chat_template
from vllm_lite.config import EngineConfig, ResolvedConfig
from vllm_lite.errors import EngineDeadError
from vllm_lite.model_config import ModelConfig, load_model_config
from vllm_lite.model_files import ModelFiles, find_model
from vllm_lite.processes import EngineProcesses, poll_readable, wait_ready, why_it_ended
from vllm_lite.server.listener import bind
from vllm_lite.server.options import ServerOptions
from vllm_lite.settings import read, unknown_variables

logger = logging.getLogger("vllm_lite.serve")

# What the API server may take beyond the grace time: to send last events, and to free what was
# aborted.
_GRACE_MARGIN = 10.0  # seconds
_AT_ONCE = 2.0  # after a second signal
_LAST_WORDS = 5.0  # for error events after the engine has died


def main(argv: list[str] | None = None) -> int:
    """Serves until a signal ends it; returns the exit code."""
    open_standard_fds()
    # None where the program was started without them.
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    try:
        log.configure("serve")
        parser = serve_parser()
        settings = read(parser, argv)
        config, options = engine_config(settings.values), server_options(settings.values)
        listener = bind(settings.values["host"], settings.values["port"], options.backlog)
        for sentence in unknown_variables(parser, os.environ):
            logger.warning("%s", sentence)
        files = find_model(config.model)
        model_config = load_model_config(files)
        # The same checks as in the children, before any of them is started.
        resolved = config.resolve(model_config)
        if config.chat_template is not None:
            load_chat_template(config.chat_template)
        logger.info("configuration: %s", settings.describe())
    except (ValueError, OSError) as error:
        print(f"vllm-lite serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    with _signal_pipe() as signals:
        supervisor = _Supervisor(config, options, listener, signals)
        try:
            return supervisor.run(files, model_config, resolved)
        except EngineDeadError as error:
            print(f"vllm-lite serve: {error}", file=sys.stderr)
            return 1
        finally:
            supervisor.stop()


class _Supervisor:
    """``signals`` becomes readable when a signal asks to stop: one byte each."""

    def __init__(
        self, config: EngineConfig, options: ServerOptions, listener: socket.socket, signals: int
    ) -> None:
        self._config = config
        self._options = options
        self._listener = listener
        self._signals = signals
        self._processes: EngineProcesses | None = None
        self._api: Child | None = None

    def run(self, files: ModelFiles, model_config: ModelConfig, resolved: ResolvedConfig) -> int:
        config = self._config
        logger.info("starting %s (%s)", config.served_model_names[0], files.path)
        began = time.monotonic()
        host, port = self._listener.getsockname()[:2]
        processes = EngineProcesses(config, files, model_config, resolved)
        self._processes = processes
        socket_fd = self._listener.fileno()
        self._api = Child("API server", "vllm_lite.server", (socket_fd,), processes.directory)
        # From now on the socket is the API server's alone: when it closes it, the port is free.
        self._listener.close()
        try:
            self._api.channel.send(
                {
                    "config": msgspec.to_builtins(config),
                    "model_path": str(files.path),
                    "options": msgspec.to_builtins(self._options),
                    "socket_fd": socket_fd,
                    "engine_address": processes.address,
                    "own_address": processes.client_address(0),
                }
            )
        except ChannelClosed:
            raise EngineDeadError(self._api.describe_exit()) from None
        # Shows nothing where no terminal would draw it.
        with tqdm(desc="loading weights", unit="B", unit_scale=True, dynamic_ncols=True,
                  disable=None, leave=False) as bar:  # fmt: skip

            def update(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            children = [*processes.children, self._api]
            if not wait_ready(children, update, self._signals):
                logger.info("stopped while starting")
                return 0
        processes.remove_directory()
        try:
            self._api.channel.send({"event": "start"})
        except ChannelClosed:
            raise EngineDeadError(why_it_ended(self._api)) from None
        logger.info("ready after %.1f s", time.monotonic() - began)
        self._announce(f"http://{f'[{host}]' if ':' in host else host}:{port}")
        return self._watch(processes, self._api)

    def _announce(self, url: str) -> None:
        name = self._config.served_model_names[0]
        key = " -H 'Authorization: Bearer KEY'" if self._options.api_keys else ""
        _say(
            f"serving {name} at {url} - try:\n"
            f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d "
            f'\'{{"model": "{name}", "max_tokens": 100, '
            f'"messages": [{{"role": "user", "content": "Hello!"}}]}}\''
        )

    def _watch(self, processes: EngineProcesses, api: Child) -> int:
        """Until a signal comes or a child ends, and then until the API server has ended."""
        engine = {child.channel.fileno(): child for child in processes.children}
        api_fd = api.channel.fileno()
        deadline: float | None = None
        stopping = False
        code = 0
        while True:
            timeout = None if deadline is None else deadline - time.monotonic()
            readable = poll_readable([self._signals, api_fd, *engine], timeout)
            # A child's end of its channel closes when it dies; after "ready" it says nothing else.
            if api_fd in readable:
                if stopping:
                    return code
                logger.error("%s; stopping", why_it_ended(api))
                return 1
            if not readable:
                logger.error("the API server does not stop; killing it")
                return 1
            if self._signals in readable:
                os.read(self._signals, 1)
                if not stopping:
                    logger.info("stopping when all requests are done; signal again to stop now")
                    deadline = time.monotonic() + self._options.shutdown_grace + _GRACE_MARGIN
                else:
                    deadline = time.monotonic() + _AT_ONCE
                stopping = True
                api.process.terminate()
            for fd in [fd for fd in readable if fd in engine]:
                # Every stream is to end with an error instead of a cut connection.
                reason = why_it_ended(engine[fd])
                engine.clear()
                logger.error("%s; stopping", reason)
                code = 1
                deadline = time.monotonic() + _LAST_WORDS
                with contextlib.suppress(ChannelClosed):
                    api.channel.send({"event": "engine_dead", "reason": reason})
                if not stopping:
                    api.process.terminate()
                stopping = True
                break

    def stop(self) -> None:
        if self._api is not None:
            self._api.stop()
        if self._processes is not None:
            self._processes.stop()


def _say(text: str) -> None:
    """Prints to standard output, if anybody reads it."""
    try:
        print(text, flush=True)
    except OSError:
        # What could not be written would be tried again at the program's end.
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), sys.stdout.fileno())


@contextlib.contextmanager
def _signal_pipe() -> Iterator[int]:
    """A descriptor that gets a byte for every SIGTERM and SIGINT.

    No exception out of the handler: it could come between two lines that belong together.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    numbers = (signal.SIGTERM, signal.SIGINT)
    previous = {number: signal.signal(number, lambda *_: None) for number in numbers}
    previous_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, handler in previous.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


if __name__ == "__main__":
    sys.exit(main())
