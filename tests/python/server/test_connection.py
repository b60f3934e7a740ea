"""What a connection bears: endless heads, stalled bodies, requests before their turn."""

import asyncio
import json
import logging
import re
import socket
import time

import pytest

from server.client import LiveServer
from server.fakes import FakeEngine, Script
from server.test_live import LONG, call, post
from vllm_lite.server import connection
from vllm_lite.server.connection import MAX_HEAD_BYTES, Connection
from vllm_lite.server.options import ServerOptions
from waiting import PATIENCE, wait_until

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n"
BODY = b'{"prompt":"a","max_tokens":1}'


def open_socket(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


def flood(client: socket.socket, data: bytes, times: int) -> None:
    """Sends it so many times, or until the server has had enough."""
    try:
        for _ in range(times):
            client.sendall(data)
    except OSError:
        pass


def read_all(client: socket.socket) -> bytes:
    received = b""
    try:
        while data := client.recv(65536):
            received += data
    except ConnectionResetError:
        pass
    return received


def statuses(received: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", received)]


def refusal(received: bytes) -> dict[str, object]:
    """The error in the one answer, after which the connection has ended."""
    head, _, body = received.partition(b"\r\n\r\n")
    assert len(statuses(received)) == 1
    assert b"connection: close" in head.lower() and b"application/json" in head
    error: dict[str, object] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"GET /", b"a" * 100_000),
        (HEALTH + b"X: ", b"a" * 100_000),
        (HEALTH, b"X: a\r\n" * 10_000),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;", b"a" * 100_000),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX: ", b"a" * 100_000),
    ],
    ids=["url", "header", "headers", "chunk extension", "trailer"],
)
def test_an_endless_head_is_refused(live: LiveServer, begin: bytes, more: bytes) -> None:
    with open_socket(live.port) as client:
        client.sendall(begin)
        flood(client, more, 400)
        received = read_all(client)
    assert statuses(received) in ([431], [])  # the kernel may drop it for a client that only sends
    assert call(live.port, "GET", "/health")[0] == 200


def test_the_bound_of_a_head_is_exact(live: LiveServer) -> None:
    end = b"Connection: close\r\n\r\n"
    fits = (
        HEALTH + b"X: " + b"a" * (MAX_HEAD_BYTES - len(HEALTH + b"X: \r\n" + end)) + b"\r\n" + end
    )
    with open_socket(live.port) as client:
        client.sendall(fits)
        assert statuses(read_all(client)) == [200]
    with open_socket(live.port) as client:
        client.sendall(fits.replace(b"X: ", b"X: a"))
        error = refusal(read_all(client))
    assert error["code"] == "request_header_fields_too_large"
    assert str(MAX_HEAD_BYTES) in str(error["message"])


@pytest.mark.parametrize("size", [1, 5, 100_000])
def test_a_chunked_body_may_be_long_whatever_its_chunks(live: LiveServer, size: int) -> None:
    body = BODY + b" " * 300_000
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    with open_socket(live.port) as client:
        client.sendall(HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n")
        client.sendall(chunks + b"0\r\n\r\n")
        assert statuses(read_all(client)) == [200]


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\r\n\r\n",
        b"GET /health HTTP/1.1\r\nbad header\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"Content-Length: 29\r\nContent-Length: 30\r\n\r\n" + BODY,
    ],
)
def test_what_is_not_http_gets_an_error_in_the_usual_shape(live: LiveServer, data: bytes) -> None:
    with open_socket(live.port) as client:
        client.sendall(data)
        received = read_all(client)
    assert statuses(received) == [400]
    assert "HTTP/1.1" in str(refusal(received)["message"])


def test_requests_one_after_another_share_a_connection(live: LiveServer) -> None:
    with open_socket(live.port) as client:
        for _ in range(3):
            client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
            received = b""
            while b"}}}" not in received:
                received += client.recv(65536)
            assert statuses(received) == [200]


@pytest.mark.parametrize(
    "sent", [b"GET /", HEAD, HEAD + b"Content-Length: 1000\r\n\r\n{"], ids=["url", "head", "body"]
)
def test_a_request_that_does_not_go_on_times_out(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(connection, "STALL_SECONDS", 0.3)
    with open_socket(live.port) as client:
        client.sendall(sent)
        assert refusal(read_all(client))["code"] == "request_timeout"


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Connection]:
    """Those made since; their periods end when the test says so, not by a clock."""
    monkeypatch.setattr(connection, "STALL_SECONDS", 10_000.0)
    made: list[Connection] = []
    begin = Connection.connection_made

    def connection_made(self: Connection, transport: asyncio.Transport) -> None:
        made.append(self)
        begin(self, transport)

    monkeypatch.setattr(Connection, "connection_made", connection_made)
    return made


def end_period(connection: Connection) -> None:
    def end() -> None:
        if connection._timer is not None:
            connection._check_progress()

    connection.loop.call_soon_threadsafe(end)


def test_stalled_and_trickling_bodies_give_their_room_back(
    engine: FakeEngine, connections: list[Connection]
) -> None:
    size = 1 << 20
    options = ServerOptions(max_body_bytes=size, max_pending_body_bytes=2 * size)
    server = LiveServer(engine, options)
    request = BODY + b" " * 100_000
    stalled = [open_socket(server.port) for _ in range(2)]
    for client in stalled:
        client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % size + b" " * (size - 1000))
    # A third while they come in would be what is refused, or have one of them refused.
    wait_until(lambda: len(connections) == 2)
    state = connections[0].app.state.server
    wait_until(lambda: state.pending_body_bytes == 2 * (size - 1000))
    assert call(server.port, "POST", "/v1/completions", request)[0] == 429

    def are_refused() -> bool:
        flood(stalled[0], b" ", 1)
        for held in connections[:2]:
            end_period(held)
        return all(held._deaf for held in connections[:2])

    wait_until(are_refused)
    for client in stalled:
        assert refusal(read_all(client))["code"] == "request_timeout"
        client.close()
    assert call(server.port, "POST", "/v1/completions", request)[0] == 200
    server.close()


def test_a_slow_but_steady_body_is_waited_for(
    live: LiveServer, connections: list[Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LEAST_BYTES", 4)
    with open_socket(live.port) as client:
        client.sendall(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY))
        wait_until(lambda: len(connections) == 1 and connections[0]._timer is not None)
        for start in range(0, 24, 4):
            client.sendall(BODY[start : start + 4])
            wait_until(lambda: connections[0]._received == 4)
            end_period(connections[0])
            wait_until(lambda: connections[0]._received == 0)
        client.sendall(BODY[24:])
        assert statuses(read_all(client)) == [200]


def test_an_early_error_does_not_wait_for_the_body(live: LiveServer) -> None:
    with open_socket(live.port) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n{")
        assert statuses(read_all(client)) == [401]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "second",
    [HEALTH + b"\r\n", HEAD + b"Content-Length: 33554432\r\n\r\n" + b" " * 1_000_000],
    ids=["health", "big"],
)
def test_a_client_that_leaves_with_a_second_request_out_is_noticed(
    live: LiveServer,
    connections: list[Connection],
    caplog: pytest.LogCaptureFixture,
    stream: bool,
    second: bytes,
) -> None:
    live.engine.script = Script(held_at=1)
    with post(live.port, "/v1/completions", LONG | {"stream": stream}) as client:
        wait_until(lambda: live.engine.running == 1)
        client.sendall(second)
        wait_until(lambda: connections[0]._deaf)  # it has come
        assert live.engine.running == 1
    wait_until(lambda: live.engine.running == 0)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_second_request_before_its_turn_ends_the_connection_after_the_first(
    live: LiveServer,
) -> None:
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    with open_socket(live.port) as client:
        client.sendall(request + HEALTH + b"\r\n")
        received = read_all(client)
    assert statuses(received) == [200]
    assert b"connection: close" in received
    assert b'"finish_reason":"length"' in received


def test_clients_that_leave_at_any_moment_leave_no_complaint(
    live: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    live.engine.script = Script(delay=0.001)
    for step in range(60):
        fields = LONG | {"max_tokens": 20, "stream": step % 2 == 0}
        with post(live.port, "/v1/completions", fields) as client:
            if step % 3 == 0:  # a reset instead of an orderly end
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            if step % 5 == 0:
                client.sendall(HEALTH + b"\r\n")
            time.sleep(step * 0.001)
    wait_until(lambda: live.engine.running == 0)
    assert not [record.message for record in caplog.records if record.levelno >= logging.WARNING]
