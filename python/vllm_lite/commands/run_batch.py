"""``vllm-lite run-batch``: a file of requests in OpenAI's batch format, answered without a server.

Each line goes through the application that ``serve`` serves, in process, so an answer, and an
error, is the one that the server would give.
"""

import asyncio
import codecs
import logging
import secrets
import sys
from collections import deque
from contextlib import ExitStack
from typing import IO, Any, cast

import msgspec
from tqdm import tqdm  # type: ignore[import-untyped]

from vllm_lite.arguments import add_engine_options, engine_config
from vllm_lite.model_files import DEFAULT_MODEL
from vllm_lite.settings import Parser, add_config, read

logger = logging.getLogger(__name__)

# Lines under way for each sequence that may run: one that takes long does not hold up the others.
_AHEAD = 4
_MOST_RETRIES = 600  # of a line that finds the queue full, a second or more apart


class BatchLine(msgspec.Struct, kw_only=True):
    """One line of the input."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


def make_parser() -> Parser:
    parser = Parser(
        "vllm-lite run-batch",
        "Answer a file of requests in OpenAI's batch format: one line for each, in their order.",
        "-i IN -o OUT",
        ("input", "output"),
    )
    add = parser.add_argument
    add("-i", "--input-file", dest="input", required=True, metavar="IN",
        help="lines with custom_id, method, url and body; -: standard input")  # fmt: skip
    add("-o", "--output-file", dest="output", required=True, metavar="OUT",
        help="overwritten; -: standard output")  # fmt: skip
    add("--model", metavar="MODEL",
        help=f"directory, .gguf file or hub id (default: {DEFAULT_MODEL})")  # fmt: skip
    add("--served-model-name", dest="served_model_names", nargs="+", default=[], metavar="NAME",
        help="names that requests may ask for (default: MODEL)")  # fmt: skip
    add_config(parser)
    add_engine_options(parser)
    return parser


def main(argv: list[str]) -> int:
    """1 if nothing could be run; lines with errors of their own count as answered."""
    try:
        values = read(make_parser(), argv).values
        with ExitStack() as files:
            lines: IO[bytes] = sys.stdin.buffer
            if values["input"] != "-":
                lines = files.enter_context(open(values["input"], "rb"))
            out: IO[bytes] = sys.stdout.buffer
            if values["output"] != "-":
                out = files.enter_context(open(values["output"], "wb"))
            done, failed = _run(values, lines, out)
    except (ValueError, OSError) as error:
        print(f"vllm-lite run-batch: {error}", file=sys.stderr)
        return 1
    print(f"{done} requests answered, {failed} of them with an error", file=sys.stderr)
    return 0


def _run(values: dict[str, Any], lines: IO[bytes], out: IO[bytes]) -> tuple[int, int]:
    from vllm_lite.async_engine import AsyncLLMEngine
    from vllm_lite.errors import EngineDeadError
    from vllm_lite.server.run import run

    config = engine_config(values)
    bar = tqdm(desc="loading weights", unit="B", unit_scale=True, dynamic_ncols=True, disable=None,
               leave=False)  # fmt: skip

    def progress(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    try:
        engine = AsyncLLMEngine(
            progress=progress,
            **{name: getattr(config, name) for name in config.__struct_fields__},
        )
    except EngineDeadError as error:
        raise ValueError(str(error)) from None
    finally:
        bar.close()
    try:
        counts = run(Batch(engine).run(lines, out))
        if (reason := engine.health()) is not None:
            raise ValueError(reason)
        return counts
    finally:
        engine.close()


class Batch:
    """``engine``: as the server's."""

    def __init__(self, engine: Any) -> None:
        from vllm_lite.server.app import create_app

        self._app = create_app(engine)
        self._window = _AHEAD * engine.config.max_num_seqs
        self._ids: set[str] = set()

    async def run(self, lines: IO[bytes], out: IO[bytes]) -> tuple[int, int]:
        """(lines, of them with an error). Answers are written as soon as their turn comes."""
        done = failed = 0
        under_way: deque[asyncio.Task[dict[str, Any]]] = deque()
        bar = tqdm(unit="request", dynamic_ncols=True, disable=None)

        async def write_first() -> None:
            nonlocal done, failed
            answer = await under_way.popleft()
            response = answer["response"]
            done += 1
            failed += response is None or response["status_code"] != 200
            out.write(msgspec.json.encode(answer) + b"\n")
            out.flush()
            bar.update()

        mark = codecs.BOM_UTF8  # some editors begin a file with it
        try:
            # In a thread: a pipe may let us wait, and answers go on meanwhile.
            while line := await asyncio.to_thread(lines.readline):
                line, mark = line.removeprefix(mark), b""
                if not line.strip():
                    continue
                if len(under_way) >= self._window:
                    await write_first()
                under_way.append(asyncio.create_task(self._answer(line)))
            while under_way:
                await write_first()
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
            bar.close()
        return done, failed

    async def _answer(self, text: bytes) -> dict[str, Any]:
        answer: dict[str, Any] = {
            "id": f"batch_req_{secrets.token_hex(16)}",
            "custom_id": None,
            "response": None,
            "error": None,
        }
        try:
            answer["custom_id"] = _custom_id(text)
            line = msgspec.json.decode(text, type=BatchLine)
            self._check(line)
        except (UnicodeDecodeError, RecursionError, ValueError) as error:  # msgspec's, too
            answer["error"] = {"code": "invalid_line", "message": str(error)}
            return answer
        try:
            answer["response"] = await self._respond(line.url, bytes(line.body))
        except Exception as error:
            logger.exception("line %s failed", line.custom_id)
            answer["error"] = {"code": "internal", "message": str(error)}
        return answer

    async def _respond(self, path: str, body: bytes) -> dict[str, Any]:
        """The application's answer; one that finds the queue full waits."""
        status, headers, data = await self._post(path, body)
        for _ in range(_MOST_RETRIES):
            if status != 429:
                break
            await asyncio.sleep(float(headers.get("retry-after", 1)))
            status, headers, data = await self._post(path, body)
        return {
            "status_code": status,
            "request_id": headers.get("x-request-id"),
            "body": msgspec.Raw(data),
        }

    def _check(self, line: BatchLine) -> None:
        if line.method != "POST":
            raise ValueError(f"method: must be POST, got {line.method!r:.80}")
        if not line.url.startswith("/"):
            raise ValueError(f"url: must be a path such as /v1/completions, got {line.url!r:.80}")
        if line.custom_id in self._ids:
            raise ValueError(f"custom_id: {line.custom_id!r:.80} stands in an earlier line, too")
        self._ids.add(line.custom_id)
        body = msgspec.json.decode(line.body)
        if isinstance(body, dict) and body.get("stream"):
            raise ValueError("body.stream: a batch has no streams; leave it out")

    async def _post(self, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Of the application: status, headers, body."""
        sent = False
        never = asyncio.Event()  # the client of a batch does not go away
        start: dict[str, Any] = {}
        parts: list[bytes] = []

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if sent:
                await never.wait()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            else:
                parts.append(message.get("body", b""))

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": None,
            "server": None,
        }
        await self._app(scope, cast(Any, receive), send)
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        return start["status"], headers, b"".join(parts)


def _custom_id(text: bytes) -> str | None:
    """Of a line that may lack all else; None if it has none."""
    line = msgspec.json.decode(text)
    found = line.get("custom_id") if isinstance(line, dict) else None
    return found if isinstance(found, str) else None
