"""What the routes of one server share."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import msgspec

from vllm_lite.metrics import Metrics
from vllm_lite.output_formats import (
    AUTO,
    NONE,
    REASONING_FORMATS,
    TOOL_FORMATS,
    detect_reasoning_format,
    detect_tool_format,
)
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
        templates = _templates(engine)
        self.tool_format = _chosen(options.tool_call_parser, detect_tool_format(templates))
        self.reasoning_format = _chosen(
            options.reasoning_parser, detect_reasoning_format(templates)
        )
        # Of these two, whose marks are among the tokens that are hidden by default.
        formats = ((self.tool_format, TOOL_FORMATS), (self.reasoning_format, REASONING_FORMATS))
        self.hidden_marks = {
            name
            for name, known in formats
            if name is not None and any(_is_hidden(engine, mark) for mark in known[name].markers())
        }
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


def _templates(engine: EngineLike) -> list[str]:
    templates = engine.tokenizer.chat_template
    if isinstance(templates, str):
        return [templates]
    return list((templates or {}).values())


def _chosen(option: str, detected: str | None) -> str | None:
    return {AUTO: detected, NONE: None}.get(option, option)


def _is_hidden(engine: EngineLike, mark: str) -> bool:
    tokenizer = engine.tokenizer
    ids = tokenizer.encode(mark, add_special_tokens=False)
    return mark not in tokenizer.decode(ids, skip_special_tokens=True)
