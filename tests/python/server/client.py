"""An in-process client without sockets, a real server on a loopback port, and what they answer."""

import asyncio
import json
import threading
from typing import Any

import httpx

from server.fakes import FakeEngine
from vllm_lite.server.app import create_app
from vllm_lite.server.listener import bind
from vllm_lite.server.options import ServerOptions
from vllm_lite.server.run import run, serve
from waiting import PATIENCE


class Client:
    """Calls the application in process; an exception that leaves the application fails the test."""

    def __init__(self, engine: FakeEngine, options: ServerOptions | None = None) -> None:
        self.engine = engine
        self.app = create_app(engine, options)
        self.state = self.app.state.server

    def request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        async def go() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **kwargs)

        return asyncio.run(go())

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.request("GET", path, **kwargs)

    def post(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.request("POST", path, **kwargs)

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", json={"prompt": "abc"} | fields)

    def chat(self, **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "Hi"}]} | fields
        return self.post("/v1/chat/completions", json=body)

    def respond(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/responses", json={"input": "Hi"} | fields)

    def message(self, **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100} | fields
        return self.post("/v1/messages", json=body)


def named_events(response: httpx.Response) -> list[Any]:
    """The events of a stream without [DONE]; each has its type as its name."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("\n\n")
    out = []
    for block in response.text[:-2].split("\n\n"):
        name, data = block.split("\n")
        out.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {out[-1]['type']}"
    return out


def events(response: httpx.Response) -> list[Any]:
    """The events of a stream; the last must be [DONE], which is left out."""
    data = raw_events(response)
    assert data[-1] == "[DONE]"
    return [json.loads(event) for event in data[:-1]]


def raw_events(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("\n\n")
    blocks = response.text[:-2].split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


def refused(
    response: httpx.Response, status: int = 400, param: str | None = None, *words: str
) -> dict[str, Any]:
    """Asserts OpenAI's error shape and returns the error."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert len(error["message"]) < 1000
    assert isinstance(error["type"], str)
    if param is not None:
        assert error["param"] == param, error
    for word in words:
        assert word in error["message"], error
    return error


class LiveServer:
    """``serve`` in a thread with an event loop of its own."""

    def __init__(self, engine: FakeEngine, options: ServerOptions) -> None:
        self.engine = engine
        listener = bind("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, args=(listener, options), daemon=True)
        self._thread.start()
        assert self._ready.wait(PATIENCE)

    def _main(self, listener: Any, options: ServerOptions) -> None:
        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            self._task = asyncio.ensure_future(serve(self.engine, [listener], options))
            self._ready.set()
            await asyncio.gather(self._task, return_exceptions=True)

        run(main())

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
