"""An HTTP client for many streams in one event loop: it takes little time from what it measures."""

import asyncio
import json
import urllib.parse
from collections.abc import AsyncIterator
from typing import Any

import httptools


class HttpError(Exception):
    """An answer other than 200."""


class Server:
    """``url``: its root, http only. A connection per request, so that none waits for another."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"url: must begin with http:// and name a host, got {url!r}")
        self._host, self._port = parts.hostname, parts.port or 80
        self._prefix = parts.path.rstrip("/")
        self._head = f"Host: {parts.netloc}\r\nConnection: close\r\n"
        if api_key:
            self._head += f"Authorization: Bearer {api_key}\r\n"

    async def get(self, path: str) -> Any:
        return json.loads(b"".join([part async for part in self._request("GET", path, b"")]))

    async def events(self, path: str, body: Any) -> AsyncIterator[Any]:
        """The events of a stream as they come, without [DONE].

        Raises ``HttpError`` and ``OSError``; ``HttpError`` also for an error inside the stream.
        """
        rest = b""
        async for part in self._request("POST", path, json.dumps(body).encode()):
            *events, rest = (rest + part).split(b"\n\n")
            for event in events:
                data = event.removeprefix(b"data: ")
                if data == b"[DONE]":
                    return
                value = json.loads(data)
                if "error" in value:
                    raise HttpError(value["error"]["message"])
                yield value
        raise HttpError("the stream ended without [DONE]")

    async def _request(self, method: str, path: str, body: bytes) -> AsyncIterator[bytes]:
        """The parts of the body of a 200."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}"
            if body:
                head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            writer.write(head.encode() + b"\r\n" + body)
            answer = _Answer()
            parser = httptools.HttpResponseParser(answer)
            while not answer.complete:
                data = await reader.read(1 << 16)
                if not data:
                    break
                parser.feed_data(data)
                if answer.parts and parser.get_status_code() == 200:
                    yield answer.take()
            if parser.get_status_code() != 200:
                text = answer.take().decode(errors="replace")
                raise HttpError(f"{parser.get_status_code()}: {text[:300]}")
            if answer.parts:
                yield answer.take()
        finally:
            writer.close()


class _Answer:
    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.complete = False

    def on_body(self, data: bytes) -> None:
        self.parts.append(data)

    def on_message_complete(self) -> None:
        self.complete = True

    def take(self) -> bytes:
        data = b"".join(self.parts)
        self.parts.clear()
        return data
