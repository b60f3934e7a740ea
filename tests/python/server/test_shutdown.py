"""SIGTERM and SIGINT with requests running, in a process of their own."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

BODY = json.dumps({"prompt": "a", "max_tokens": 10, "ignore_eos": True, "stream": True})
PLAIN = json.dumps({"prompt": "a", "max_tokens": 10, "ignore_eos": True})


class Process:
    def __init__(self, delay: float, grace: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "server.serve_fake", str(delay), str(grace)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        deadline = time.monotonic() + 20
        while self.get("/health") != 200:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def get(self, path: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request("GET", path)
        return connection.getresponse().status

    def begin(self, body: str) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("POST", "/v1/completions", body)
        return connection

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def ends(self, within: float) -> None:
        """Exit code 0, in time, with the port free and no complaint on stderr."""
        out, err = self.process.communicate(timeout=within)
        assert self.process.returncode == 0, err
        assert "drained" in out
        assert "Traceback" not in err, err
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", self.port))


@pytest.fixture
def start() -> Iterator[type[Process]]:
    started: list[Process] = []

    class Started(Process):
        def __init__(self, delay: float, grace: float) -> None:
            started.append(self)
            super().__init__(delay, grace)

    yield Started
    for process in started:
        process.process.kill()
        process.process.communicate()


@pytest.mark.case("SHD-01")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_running_requests_finish_and_new_ones_are_refused(
    start: type[Process], number: int
) -> None:
    server = start(0.1, 20)
    idle = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    idle.connect()
    streams = [server.begin(BODY) for _ in range(4)]
    answers = [stream.getresponse() for stream in streams]
    plain = server.begin(PLAIN)
    time.sleep(0.2)
    server.signal(number)
    time.sleep(0.2)
    with pytest.raises(OSError):
        server.begin(BODY).getresponse()
    for answer in answers:
        assert answer.read().endswith(b"data: [DONE]\n\n")
    response = plain.getresponse()
    assert response.status == 200
    assert json.loads(response.read())["choices"][0]["finish_reason"] == "length"
    server.ends(15)


@pytest.mark.case("SHD-01")
def test_after_the_grace_time_the_rest_gets_an_error(start: type[Process]) -> None:
    server = start(1.0, 0.5)
    stream, plain = server.begin(BODY), server.begin(PLAIN)
    answer = stream.getresponse()
    server.signal(signal.SIGTERM)
    last = answer.read().split(b"\n\n")[-2]
    assert b'"error"' in last and b"shutting down" in last
    response = plain.getresponse()
    assert response.status == 503
    assert json.loads(response.read())["error"]["code"] == "service_unavailable"
    server.ends(10)


@pytest.mark.case("SHD-01")
def test_a_second_signal_ends_at_once(start: type[Process]) -> None:
    server = start(1.0, 60)
    answer = server.begin(BODY).getresponse()
    deaf = server.begin(BODY)  # never reads
    server.signal(signal.SIGTERM)
    time.sleep(0.3)
    assert server.process.poll() is None
    began = time.monotonic()
    server.signal(signal.SIGTERM)
    assert b'"error"' in answer.read()
    server.ends(10)
    assert time.monotonic() - began < 6
    deaf.close()


def test_an_idle_server_leaves_quickly_and_uses_no_processor_time(start: type[Process]) -> None:
    server = start(0.1, 60)
    idle = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    idle.connect()
    status = Path(f"/proc/{server.process.pid}/status")

    def woken() -> int:
        line = next(x for x in status.read_text().splitlines() if x.startswith("voluntary_ctxt"))
        return int(line.split()[1])

    time.sleep(0.2)
    before = woken()
    time.sleep(1.0)
    assert woken() - before <= 3, "the idle server polls"
    server.signal(signal.SIGTERM)
    server.ends(5)


def test_leaving_clients_do_not_hold_up_the_end(start: type[Process]) -> None:
    server = start(0.2, 30)
    stream = server.begin(BODY)
    answer = stream.getresponse()
    server.signal(signal.SIGTERM)
    threading.Timer(0.2, lambda: (answer.close(), stream.close())).start()
    server.ends(10)


def test_a_body_that_is_still_coming_is_not_waited_for(start: type[Process]) -> None:
    server = start(0.1, 30)
    waiting = []
    for sent in (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1000\r\n\r\n{", b"GET /"):
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        connection.sendall(sent)
        waiting.append(connection)
    time.sleep(0.2)
    server.signal(signal.SIGTERM)
    for connection in waiting:
        assert connection.recv(4096).startswith(b"HTTP/1.1 503")
    server.ends(5)
