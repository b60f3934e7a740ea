"""``python -m vllm_lite.serve MODEL``: the serving parent. Starts API server, engine core and worker, watches them, and
ends them in order.

It binds the address before anything is loaded, so that a port in use is noticed at once, and imports nothing heavy itself.
"""

import argparse
import select
import signal
import socket
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
from tqdm import tqdm

from vllm_lite.channel import ChannelClosed, Child
from vllm_lite.config import EngineConfig, parse_bytes
from vllm_lite.errors import EngineDeadError
from vllm_lite.model_config import load_model_config
from vllm_lite.model_files import DEFAULT_MODEL, find_model
from vllm_lite.processes import EngineProcesses, receive_status, why_it_ended
from vllm_lite.server.options import ServerOptions


class _Stop(Exception):
    """SIGTERM or SIGINT arrived."""


def main(argv: list[str] | None = None) -> int:
    """Serves until a signal ends it; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        config, options = _configs(arguments)
        listener = _bind(arguments.host, arguments.port)
    except (ValueError, OSError, msgspec.ValidationError) as error:
        print(f"vllm-lite serve: {error}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, _on_signal)
    signal.signal(signal.SIGINT, _on_signal)
    with listener, tempfile.TemporaryDirectory(prefix="vllm_lite-") as directory:
        supervisor = _Supervisor(config, options, listener, Path(directory))
        try:
            return supervisor.run()
        except EngineDeadError as error:
            print(f"vllm-lite serve: {error}", file=sys.stderr)
            return 1
        except _Stop:
            return 0
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            supervisor.stop()


class _Supervisor:
    def __init__(
        self, config: EngineConfig, options: ServerOptions, listener: socket.socket, directory: Path
    ) -> None:
        self._config = config
        self._options = options
        self._listener = listener
        self._directory = directory
        self._processes: EngineProcesses | None = None
        self._api: Child | None = None

    def run(self) -> int:
        config = self._config
        print(f"starting {config.model}", flush=True)
        client_address = f"ipc://{self._directory / 'client-0'}"
        self._processes = EngineProcesses(config, self._directory, [client_address])
        self._api = Child("API server", "vllm_lite.server", (self._listener.fileno(),))
        self._api.channel.send(
            {
                "config": msgspec.to_builtins(config),
                "options": msgspec.to_builtins(self._options),
                "socket_fd": self._listener.fileno(),
                "engine_address": self._processes.address,
                "own_address": client_address,
            }
        )
        with tqdm(desc="loading weights", unit="B", unit_scale=True, dynamic_ncols=True) as bar:

            def update(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            self._processes.wait_ready(update)
        self._api.channel.send({"event": "start"})
        while receive_status(self._api)["event"] != "ready":
            pass
        self._announce()
        return self._watch()

    def _announce(self) -> None:
        resolved = self._config.resolve(load_model_config(find_model(self._config.model)))
        host, port = self._listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        name = self._config.served_model_names[0]
        gigabytes = resolved.num_blocks * resolved.block_bytes / 2**30
        print(
            f"dtype {resolved.dtype}, max_model_len {resolved.max_model_len}, KV cache {gigabytes:.2f} GiB "
            f"({resolved.num_blocks * self._config.block_size} tokens)\n"
            f"serving {name} at {url} - try:\n"
            f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d "
            f'\'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}\'',
            flush=True,
        )

    def _watch(self) -> int:
        assert self._processes is not None and self._api is not None
        children = {child.channel.fileno(): child for child in [*self._processes.children, self._api]}
        try:
            # A child's end of its channel closes when it dies; after "ready" an API server says nothing.
            readable, _, _ = select.select(list(children), [], [])
        except _Stop:
            return self._stop_gracefully()
        dead = children[readable[0]]
        reason = why_it_ended(dead)
        print(f"vllm-lite serve: {reason}; stopping", file=sys.stderr, flush=True)
        if dead is not self._api:
            # Let every stream end with an error instead of a cut connection.
            try:
                self._api.channel.send({"event": "engine_dead", "reason": reason})
                self._api.process.terminate()
                self._api.process.wait(5)
            except (ChannelClosed, TimeoutError, _Stop):
                pass
            except Exception as error:  # subprocess.TimeoutExpired
                print(f"vllm-lite serve: {error}", file=sys.stderr)
        return 1

    def _stop_gracefully(self) -> int:
        """Lets the API server finish what runs. A second signal ends it at once."""
        assert self._api is not None
        print("stopping: finishing what runs (signal again to stop at once)", flush=True)
        self._api.process.terminate()
        try:
            self._api.process.wait(self._options.shutdown_grace + 10)
        except _Stop:
            self._api.process.kill()
        return 0

    def stop(self) -> None:
        if self._api is not None:
            self._api.stop()
        if self._processes is not None:
            self._processes.stop()


def _on_signal(_signal: int, _frame: FrameType | None) -> None:
    raise _Stop


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    listener.listen(1024)
    return listener


def _configs(arguments: argparse.Namespace) -> tuple[EngineConfig, ServerOptions]:
    values: dict[str, Any] = vars(arguments)
    engine = {name: values[name] for name in EngineConfig.__struct_fields__ if name in values}
    config = EngineConfig(**engine)
    # The same checks as in the children, before any of them is started.
    config.resolve(load_model_config(find_model(config.model)))
    options = ServerOptions(
        api_keys=tuple(arguments.api_keys),
        max_body_bytes=arguments.max_body_bytes,
        shutdown_grace=arguments.shutdown_grace,
    )
    return config, options


def _parser() -> argparse.ArgumentParser:
    default = EngineConfig()
    server_default = ServerOptions()
    parser = argparse.ArgumentParser(prog="vllm-lite serve", description="Serve a model over OpenAI's HTTP API.")
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL",
                        help="directory, .gguf file or hub id (default: %(default)s)")  # fmt: skip
    http = parser.add_argument_group("HTTP")
    http.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    http.add_argument("--port", type=int, default=8000, help="0 chooses a free one (default: %(default)s)")
    http.add_argument("--api-key", dest="api_keys", action="append", default=[], metavar="KEY",
                      help="require this key on every route but /health; may be repeated")  # fmt: skip
    http.add_argument("--served-model-name", dest="served_model_names", nargs="+", default=[], metavar="NAME",
                      help="names the model answers to (default: MODEL)")  # fmt: skip
    http.add_argument("--max-body-bytes", type=parse_bytes, default=server_default.max_body_bytes, metavar="BYTES",
                      help="largest request body (default: %(default)s)")  # fmt: skip
    http.add_argument("--shutdown-grace", type=float, default=server_default.shutdown_grace, metavar="SECONDS",
                      help="time that running requests get at SIGTERM (default: %(default)s)")  # fmt: skip
    model = parser.add_argument_group("model")
    model.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default=default.dtype,
                       help="auto: the checkpoint's; bfloat16 for a quantised one (default: %(default)s)")  # fmt: skip
    model.add_argument("--max-model-len", type=int, metavar="TOKENS", help="prompt + output (default: the model's limit)")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--max-num-seqs", type=int, default=default.max_num_seqs, metavar="N",
                        help="sequences that run at once (default: %(default)s)")  # fmt: skip
    engine.add_argument("--max-num-batched-tokens", type=int, default=default.max_num_batched_tokens, metavar="N",
                        help="tokens in one step (default: %(default)s)")  # fmt: skip
    engine.add_argument("--max-num-waiting", type=int, default=default.max_num_waiting, metavar="N",
                        help="bound of the waiting queue (default: %(default)s)")  # fmt: skip
    engine.add_argument("--kv-cache-memory", type=parse_bytes, metavar="BYTES",
                        help="memory of the KV cache, such as 512M or 4G (default: 1G)")  # fmt: skip
    engine.add_argument("--block-size", type=int, default=default.block_size, metavar="TOKENS",
                        help="tokens in a KV block (default: %(default)s)")  # fmt: skip
    engine.add_argument("--no-prefix-caching", dest="enable_prefix_caching", action="store_false",
                        help="do not share the KV of equal prompt beginnings")  # fmt: skip
    engine.add_argument("--scheduling-policy", choices=["fcfs", "priority"], default=default.scheduling_policy,
                        help="order of requests (default: %(default)s)")  # fmt: skip
    engine.add_argument("--num-threads", type=int, metavar="N", help="threads of the worker (default: all cores)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
