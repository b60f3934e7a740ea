"""A real server on a loopback port: clients that leave or read slowly, big bodies, openai."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from server.client import LiveServer
from server.fakes import FakeEngine, Script
from vllm_lite.errors import EngineError, QueueFullError
from vllm_lite.server.listener import bind
from vllm_lite.server.options import ServerOptions
from waiting import PATIENCE, wait_until

KEY = {"Authorization": "Bearer secret"}


def post(port: int, path: str, body: dict[str, Any]) -> socket.socket:
    """Sends a request and leaves the connection open, unread."""
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
    connection.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data)
    return connection


def call(port: int, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request(method, path, body, KEY)
    response = connection.getresponse()
    out = response.status, json.loads(response.read())
    connection.close()
    return out


LONG = {"prompt": "a", "max_tokens": 200, "ignore_eos": True}


@pytest.mark.case("ABT-01")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [1, 3])
def test_a_client_that_leaves_aborts_its_request(
    live: LiveServer, stream: bool, prompts: int
) -> None:
    live.engine.script = Script(held_at=1)
    connection = post(
        live.port, "/v1/completions", LONG | {"stream": stream, "prompt": ["a"] * prompts}
    )
    wait_until(lambda: live.engine.running == prompts)
    if stream:
        assert b"data: " in connection.recv(4096)
    connection.close()
    wait_until(lambda: live.engine.running == 0)
    assert len(live.engine.aborted) == prompts
    assert call(live.port, "GET", "/health")[0] == 200


@pytest.mark.case("ABT-06")
def test_a_client_that_leaves_drops_the_inputs_that_are_left(live: LiveServer) -> None:
    live.engine.config.max_num_waiting = 8  # so many at once, the others after them
    live.engine.script = Script(held_at=0)
    connection = post(live.port, "/v1/embeddings", {"input": [[i] for i in range(64)]})
    wait_until(lambda: live.engine.running == 8)
    connection.close()
    wait_until(lambda: live.engine.running == 0)
    live.engine.script.held_at = None
    assert call(live.port, "GET", "/load")[1] == {"server_load": 0}
    assert len(live.engine.calls) == 8


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token_aborts(live: LiveServer, stream: bool) -> None:
    live.engine.script = Script(held_at=0)
    connection = post(live.port, "/v1/completions", LONG | {"stream": stream})
    wait_until(lambda: live.engine.running == 1)
    connection.close()
    wait_until(lambda: live.engine.running == 0)


@pytest.mark.case("ABT-01")
@pytest.mark.parametrize("prompts", [1, 2])
def test_a_slow_reader_is_aborted_when_it_leaves_with_full_buffers(
    live: LiveServer, prompts: int
) -> None:
    live.engine.script = Script("x" * 60, ends=False)
    live.engine.config.max_model_len = 200_000
    fields = {"prompt": ["a"] * prompts, "max_tokens": 150_000, "stream": True}
    connection = post(live.port, "/v1/completions", LONG | fields)
    wait_until(lambda: live.engine.running == prompts)
    wait_until(lambda: live.engine.produced > 0)
    seen = [-1, 0]
    while seen[-1] != seen[-2]:  # until the server's and the kernel's buffers are full
        time.sleep(0.3)
        seen.append(live.engine.produced)
    assert 0 < seen[-1] < 150_000, "the server buffered everything"
    connection.close()
    wait_until(lambda: live.engine.running == 0)


@pytest.mark.case("STR-05")
def test_many_streams_each_give_the_plain_text(live: LiveServer) -> None:
    live.engine.script = Script("The quick brown fox, naïve → 日本語.", delay=0.001)
    client = openai.OpenAI(base_url=live.url + "/v1", api_key="secret", max_retries=0)

    def one(index: int) -> str:
        parts = []
        for chunk in client.completions.create(
            model="fake", prompt="a", stream=True, max_tokens=100
        ):
            parts.append(chunk.choices[0].text)
            if index % 2:
                time.sleep(0.002)
        return "".join(parts)

    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(one, range(16)))
    assert set(texts) == {live.engine.script.text}
    assert live.engine.aborted == []


def test_tokens_leave_as_they_come(live: LiveServer) -> None:
    live.engine.script = Script(held_at=1)
    connection = post(live.port, "/v1/completions", LONG | {"stream": True})
    received = connection.recv(65536)
    while b"data: " not in received:
        received += connection.recv(65536)
    assert b"[DONE]" not in received
    connection.close()


@pytest.mark.case("HLT-01")
def test_health_is_answered_while_a_big_prompt_is_tokenised(live: LiveServer) -> None:
    tokenizer = live.engine.tokenizer
    tokenizer.may_end.clear()
    live.engine.script.delay = 0.01
    body = json.dumps({"prompt": "a" * 20_000_000}).encode()
    status: list[int] = []
    sender = threading.Thread(
        target=lambda: status.append(call(live.port, "POST", "/v1/completions", body)[0])
    )
    streams = [
        post(live.port, "/v1/completions", LONG | {"stream": True, "prompt": [1]})
        for _ in range(16)
    ]
    sender.start()
    try:
        wait_until(lambda: tokenizer.is_encoding)
        for _ in range(10):
            assert call(live.port, "GET", "/health")[0] == 200
        assert tokenizer.is_encoding
    finally:
        tokenizer.may_end.set()
        sender.join()
    assert status == [400]  # longer than the model's context
    for stream in streams:
        stream.close()


@pytest.mark.case("HLT-01")
def test_oversized_bodies_are_refused_before_they_are_sent(live: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", live.port), timeout=PATIENCE) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
        connection.sendall(head + b"Content-Length: 10000000000\r\n\r\n{")
        assert connection.recv(4096).startswith(b"HTTP/1.1 413")


@pytest.mark.case("API-10")
def test_openai_client_chat(live: LiveServer) -> None:
    client = openai.OpenAI(base_url=live.url + "/v1", api_key="other", max_retries=0)
    messages: Any = [{"role": "user", "content": "Hi"}]
    whole = client.chat.completions.create(
        model="fake", messages=messages, logprobs=True, top_logprobs=2, n=2
    )
    assert [c.message.content for c in whole.choices] == ["Hello, world"] * 2
    assert whole.choices[0].message.refusal is None
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage and whole.usage.completion_tokens == 24
    assert whole.usage.prompt_tokens_details
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    assert whole.choices[0].logprobs and whole.choices[0].logprobs.content
    assert whole.choices[0].logprobs.content[0].token == "H"

    chunks = list(
        client.chat.completions.create(
            model="fake",
            messages=messages,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"min_p": 0.1, "ignore_eos": False},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Hello, world"
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens == 12
    assert live.engine.calls[-1].params.min_p == 0.1
    with client.chat.completions.stream(model="fake", messages=messages) as stream:
        assert stream.get_final_completion().choices[0].message.content == "Hello, world"


@pytest.mark.case("API-10")
def test_openai_client_completions(live: LiveServer) -> None:
    client = openai.OpenAI(base_url=live.url + "/v1", api_key="secret", max_retries=0)
    whole = client.completions.create(model="fake", prompt=["a", "b"], logprobs=1)
    assert [c.text for c in whole.choices] == ["Hello, world"] * 2
    assert whole.choices[0].logprobs and whole.choices[0].logprobs.tokens
    chunks = list(client.completions.create(model="fake", prompt="a", stream=True))
    assert "".join(c.choices[0].text for c in chunks) == "Hello, world"
    assert [model.id for model in client.models.list()] == ["fake", "alias"]
    assert client.models.retrieve("alias").id == "alias"


@pytest.mark.case("STR-03")
def test_openai_client_raises_the_right_errors(live: LiveServer) -> None:
    client = openai.OpenAI(base_url=live.url + "/v1", api_key="secret", max_retries=0)

    def ask(**fields: Any) -> Any:
        return client.completions.create(**({"model": "fake", "prompt": "a"} | fields))

    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=live.url + "/v1", api_key="no", max_retries=0).models.list()
    with pytest.raises(openai.BadRequestError) as caught:
        ask(temperature=7)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        ask(model="other")
    live.engine.script = Script(start_error=QueueFullError("full"))
    with pytest.raises(openai.RateLimitError):
        ask(stream=True)
    live.engine.script = Script(error_at=5, error=EngineError("worker died"))
    received = []
    with pytest.raises(openai.APIError, match="worker died"):
        for chunk in ask(stream=True):
            received.append(chunk.choices[0])
    assert "".join(c.text for c in received) == "Hello"
    assert all(c.finish_reason is None for c in received)


@pytest.fixture
def other_port() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.mark.case("CFG-03")
def test_a_taken_port_is_an_error_at_once(other_port: int) -> None:
    with pytest.raises(OSError, match=f"port {other_port}.*choose another"):
        bind("127.0.0.1", other_port)
    with bind("127.0.0.1", 0) as listener, pytest.raises(OSError, match="cannot listen"):
        bind("127.0.0.1", listener.getsockname()[1])


def test_the_server_can_be_cancelled_and_frees_its_port(engine: FakeEngine) -> None:
    engine.script = Script(held_at=1)
    server = LiveServer(engine, ServerOptions())
    connection = post(server.port, "/v1/completions", LONG | {"stream": True})
    wait_until(lambda: engine.running == 1)
    server.close()
    assert engine.running == 0
    bind("127.0.0.1", server.port).close()
    connection.close()
