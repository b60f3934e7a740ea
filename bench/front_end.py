"""The API server alone: many streams from a mock engine core, real clients, no model.

    python bench/front_end.py --streams 256 --tokens 200 [--rate 100]

The server, the stack of server/run.py over AsyncLLMEngine, is a process of its own. This one is
the clients and a mock engine core, which speaks the protocol of messages.py over ZeroMQ and gives
every stream one token per step, in one message as the real one does: ``--rate`` steps a second, or,
if that is 0, a step as soon as all clients have the tokens of the one before. Then no two tokens
share an event however busy the machine is, and the server's CPU time per token is what a token
costs: 25,600 tokens/s on one core leave 39 µs. ``loop_cpu`` is the CPU time that the event loop
spent between two looks of a timer that wants to look every 5 ms: how long, on a core of its own,
others waited, plus up to 5 ms.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable
from typing import Any

import zmq

from vllm_lite.messages import (
    AddRequest,
    CoreStats,
    EngineOutputs,
    Hello,
    SequenceOutput,
    ToEngineCore,
    TokenLogprobs,
    decode_to_engine_core,
    encode,
)

TEXTS = [" the", " quick", " brown", " fox", " jumps", " over", " a", ' "lazy"', " dög", ",\n"]
PROBE_SECONDS = 0.005


# --- mock engine core ---------------------------------------------------------------------------


class MockCore:
    """Token t of a sequence has the id t % 100 and the text TEXTS[t % 10]. Runs in a thread."""

    def __init__(self, address: str, client_address: str, rate: float) -> None:
        self._context = zmq.Context()
        self._pull = self._context.socket(zmq.PULL)
        self._push = self._context.socket(zmq.PUSH)
        for side in (self._pull, self._push):
            side.setsockopt(zmq.SNDHWM, 0)
            side.setsockopt(zmq.RCVHWM, 0)
            side.setsockopt(zmq.LINGER, 0)
        self._pull.bind(address)
        self._push.connect(client_address)
        self._rate = rate
        # (key, sample) to [tokens given, tokens wanted, number of logprobs]
        self._running: dict[tuple[int, int], list[int]] = {}
        self.crowd = 1  # sequences to wait for before the first step
        self.may_step = threading.Semaphore(1)  # without a rate: released when a step has arrived
        self._closing = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        self.may_step.release()
        self._thread.join()
        self._context.destroy()

    def _run(self) -> None:
        due = 0.0
        num_steps = 0
        while not self._closing:
            stepping = len(self._running) > 0 and (num_steps > 0 or self._is_crowded())
            while self._pull.poll(0 if stepping else 50):
                self._take(decode_to_engine_core(self._pull.recv()))
                stepping = stepping or self._is_crowded()
                if self._is_crowded() and not num_steps:
                    due = time.monotonic()
                    break
            if not stepping:
                continue
            if self._rate:
                due += 1 / self._rate
                time.sleep(max(0.0, due - time.monotonic()))
            elif not self.may_step.acquire(timeout=60):
                raise RuntimeError("a step did not arrive")
            num_steps += 1
            outputs = self._step()
            stats = CoreStats(len(self._running), 0, 1, 100, num_steps=num_steps)
            self._push.send(encode(EngineOutputs(outputs, stats)))
            if not self._running:
                num_steps = 0

    def _is_crowded(self) -> bool:
        return len(self._running) >= self.crowd

    def _take(self, message: ToEngineCore) -> None:
        if isinstance(message, Hello):
            self._push.send(encode(EngineOutputs([], CoreStats())))
        elif isinstance(message, AddRequest):
            for sample in range(message.n):
                state = [0, message.max_tokens, message.num_logprobs]
                self._running[message.key, sample] = state
        else:
            for key, sample in list(self._running):
                if key in message.keys:
                    del self._running[key, sample]

    def _step(self) -> list[SequenceOutput]:
        outputs = []
        for (key, sample), state in list(self._running.items()):
            token, wanted, top = state
            state[0] += 1
            reason = "length" if state[0] == wanted else None
            logprobs = None
            if top >= 0:
                logprobs = [TokenLogprobs(-0.5, 1, [*range(top)], [-0.5 - i for i in range(top)])]
            text = TEXTS[token % len(TEXTS)]
            outputs.append(
                SequenceOutput(key, sample, [token % 100], text, reason, None, logprobs, 0, None)
            )
            if reason is not None:
                del self._running[key, sample]
        return outputs


# --- server -------------------------------------------------------------------------------------


def server(address: str, own_address: str, model: str) -> None:
    """Writes its port; at SIGTERM its figures as one JSON line."""
    from vllm_lite.async_engine import AsyncLLMEngine
    from vllm_lite.clients import ProcessClient
    from vllm_lite.config import EngineConfig
    from vllm_lite.model_files import find_model
    from vllm_lite.server.listener import bind
    from vllm_lite.server.options import ServerOptions
    from vllm_lite.server.run import run, serve, settle_garbage

    client = ProcessClient(address, own_address)
    client.wait_connected()
    engine = AsyncLLMEngine.over(client, EngineConfig(model=model), find_model(model))
    listener = bind("127.0.0.1", 0)
    looks = array("d"), array("d")  # lag, CPU

    async def main() -> None:
        loop = asyncio.get_running_loop()
        last = time.thread_time()

        def look(due: float) -> None:
            nonlocal last
            cpu = time.thread_time()
            looks[0].append(loop.time() - due)
            looks[1].append(cpu - last)
            last = cpu
            loop.call_later(PROBE_SECONDS, look, loop.time() + PROBE_SECONDS)

        look(loop.time())
        begin = time.process_time()

        def mark() -> None:
            nonlocal begin
            begin = time.process_time()
            for values in looks:
                del values[:]

        def show() -> None:
            figures = {"cpu_seconds": time.process_time() - begin}
            for name, values in zip(("loop_lag", "loop_cpu"), looks, strict=True):
                cuts = statistics.quantiles(values, n=100, method="inclusive")
                figures[f"{name}_p99_ms"] = round(1000 * cuts[98], 2)
                figures[f"{name}_max_ms"] = round(1000 * max(values), 2)
            print(json.dumps(figures), flush=True)

        loop.add_signal_handler(signal.SIGUSR1, mark)
        loop.add_signal_handler(signal.SIGUSR2, show)
        print(listener.getsockname()[1], flush=True)
        await serve(engine, [listener], ServerOptions(shutdown_grace=0))  # type: ignore[arg-type]

    settle_garbage()
    run(main())


# --- clients ------------------------------------------------------------------------------------


class _Stream(asyncio.Protocol):
    """Sends one request, counts its events, and closes at [DONE]. ``told``: called for news."""

    def __init__(self, request: bytes, told: Callable[[int], None]) -> None:
        self._request = request
        self._told = told
        self._last = b""
        self.bytes = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.bytes += len(data)
        text = self._last + data
        self._told(text.count(b"\ndata: ") - self._last.count(b"\ndata: "))
        self._last = data[-16:]
        if b"[DONE]" in text:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


def request_bytes(path: str, fields: dict[str, Any]) -> bytes:
    body: dict[str, Any] = {"stream": True, "ignore_eos": True, **fields}
    if path.endswith("chat/completions"):
        body["messages"] = [{"role": "user", "content": "Hello"}]
    else:
        body["prompt"] = [1, 2, 3]
    data = json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    ).encode() + data


class Stack:
    """Mock engine core and server, started. A context manager."""

    def __init__(self, model: str, rate: float = 0.0) -> None:
        self._directory = tempfile.TemporaryDirectory()
        addresses = [f"ipc://{self._directory.name}/{name}" for name in ("core", "client")]
        self._core = MockCore(addresses[0], addresses[1], rate)
        command = [sys.executable, __file__, "--server", *addresses, model]
        self.server = subprocess.Popen(command, text=True, stdout=subprocess.PIPE)
        self.port = int(self._line())

    def _line(self) -> str:
        assert self.server.stdout is not None
        line = self.server.stdout.readline()
        if not line:
            raise RuntimeError("the server has ended")
        return line

    def begin(self) -> None:
        """The server's figures count from here."""
        self.server.send_signal(signal.SIGUSR1)

    def figures(self) -> dict[str, float]:
        self.server.send_signal(signal.SIGUSR2)
        figures: dict[str, float] = json.loads(self._line())
        return figures

    def measure(self, path: str, streams: int, tokens: int, **fields: Any) -> dict[str, float]:
        """Of ``streams`` at once, ``tokens`` each, from when all of them have their first."""
        request = request_bytes(path, {"max_tokens": tokens, **fields})
        self._core.crowd = streams
        events, size, seconds = asyncio.run(self._load(request, streams, "chat" in path))
        figures = self.figures()
        total = streams * (tokens - 1)
        return {
            "streams": streams,
            "tokens_per_s": round(total / seconds),
            "events_per_token": round(events / total, 3),
            "bytes_per_token": round(size / total, 1),
            "cpu_us_per_token": round(1e6 * figures["cpu_seconds"] / total, 1),
            "cpu_share": round(figures["cpu_seconds"] / seconds, 3),
            **{name: value for name, value in figures.items() if name.startswith("loop")},
        }

    async def _load(self, request: bytes, streams: int, chat: bool) -> tuple[int, int, float]:
        """(events, bytes, seconds) after the first step."""
        loop = asyncio.get_running_loop()
        events = 0
        # Of all that have come until the end of a step: roles, and one event each.
        expected = streams * (2 if chat else 1)
        first = expected
        start = 0.0

        def told(count: int) -> None:
            nonlocal events, expected, start
            events += count
            if events >= expected:
                if not start:
                    self.begin()
                    start = time.perf_counter()
                expected += streams
                self._core.may_step.release()

        made = await asyncio.gather(
            *(
                loop.create_connection(lambda: _Stream(request, told), "127.0.0.1", self.port)
                for _ in range(streams)
            )
        )
        await asyncio.gather(*(protocol.done for _, protocol in made))
        size = sum(protocol.bytes for _, protocol in made)
        return events - first, size, time.perf_counter() - start

    def __enter__(self) -> "Stack":
        return self

    def __exit__(self, *_: object) -> None:
        self.server.terminate()
        self.server.wait(10)
        self._core.close()
        self._directory.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="whose tokenizer and template are used")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--rate", type=float, default=0, help="steps/s; 0: see above")
    parser.add_argument("--path", default="/v1/chat/completions")
    parser.add_argument("--fields", type=json.loads, default={}, help="JSON: of the requests")
    args = parser.parse_args()
    with Stack(args.model, args.rate) as stack:
        print(json.dumps(stack.measure(args.path, args.streams, args.tokens, **args.fields)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--server"]:
        server(*sys.argv[2:])
        os._exit(0)
    main()
