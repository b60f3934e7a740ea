"""SIGTERM and SIGINT with requests running, in a process of their own."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from waiting import PATIENCE, wait_until

BODY = json.dumps({"prompt": "a", "max_tokens": 10, "ignore_eos": True, "stream": True})
PLAIN = json.dumps({"prompt": "a", "max_tokens": 10, "ignore_eos": True})
LONG = 10 * PATIENCE  # a grace time that nothing here waits for


class Process:
    """Requests get one token, the others after ``let_go``."""

    def __init__(self, grace: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "server.serve_fake", str(grace)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        wait_until(lambda: self.get("/health") == {"status": "ok"})

    def get(self, path: str) -> Any:
        connection = self.connect()
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())

    def connect(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        connection.connect()
        return connection

    def begin(self, body: str) -> http.client.HTTPConnection:
        connection = self.connect()
        connection.request("POST", "/v1/completions", body)
        return connection

    def wait_running(self, number: int) -> None:
        wait_until(lambda: self.get("/load") == {"server_load": number})

    def wait_closed(self) -> None:
        """Until a signal has closed the port."""

        def is_closed() -> bool:
            try:
                self.connect().close()
            except ConnectionRefusedError:
                return True
            except ConnectionResetError:
                pass  # it was in the queue as the port was closed
            return False

        wait_until(is_closed)

    def let_go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def ends(self) -> None:
        """Exit code 0, with the port free and no complaint on stderr."""
        out, err = self.process.communicate(timeout=PATIENCE)
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
        def __init__(self, grace: float) -> None:
            started.append(self)
            super().__init__(grace)

    yield Started
    for process in started:
        process.process.kill()
        process.process.communicate()


@pytest.mark.case("SHD-01")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_running_requests_finish_and_new_ones_are_refused(
    start: type[Process], number: int
) -> None:
    server = start(LONG)
    idle = server.connect()
    streams = [server.begin(BODY) for _ in range(4)]
    answers = [stream.getresponse() for stream in streams]
    plain = server.begin(PLAIN)
    server.wait_running(5)
    server.signal(number)
    server.wait_closed()
    server.let_go()
    for answer in answers:
        assert answer.read().endswith(b"data: [DONE]\n\n")
    response = plain.getresponse()
    assert response.status == 200
    assert json.loads(response.read())["choices"][0]["finish_reason"] == "length"
    server.ends()
    idle.close()


@pytest.mark.case("SHD-01")
def test_after_the_grace_time_the_rest_gets_an_error(start: type[Process]) -> None:
    server = start(0.5)
    stream, plain = server.begin(BODY), server.begin(PLAIN)
    answer = stream.getresponse()
    server.wait_running(2)
    server.signal(signal.SIGTERM)
    last = answer.read().split(b"\n\n")[-2]
    assert b'"error"' in last and b"shutting down" in last
    response = plain.getresponse()
    assert response.status == 503
    assert json.loads(response.read())["error"]["code"] == "service_unavailable"
    server.ends()


@pytest.mark.case("SHD-01")
def test_a_second_signal_ends_at_once(start: type[Process]) -> None:
    server = start(LONG)
    answer = server.begin(BODY).getresponse()
    deaf = server.begin(BODY)  # never reads
    server.wait_running(2)
    server.signal(signal.SIGTERM)
    server.wait_closed()
    assert server.process.poll() is None
    server.signal(signal.SIGTERM)
    assert b'"error"' in answer.read()
    server.ends()
    deaf.close()


def test_an_idle_server_leaves_quickly_and_uses_no_processor_time(start: type[Process]) -> None:
    server = start(LONG)
    idle = server.connect()
    status = Path(f"/proc/{server.process.pid}/status")

    def woken() -> int:
        line = next(x for x in status.read_text().splitlines() if x.startswith("voluntary_ctxt"))
        return int(line.split()[1])

    def sleeps() -> bool:
        before = woken()
        time.sleep(1.0)
        return woken() - before <= 3

    wait_until(sleeps)  # one that polls never does
    server.signal(signal.SIGTERM)
    server.ends()
    idle.close()


def test_leaving_clients_do_not_hold_up_the_end(start: type[Process]) -> None:
    server = start(LONG)
    stream = server.begin(BODY)
    answer = stream.getresponse()
    server.signal(signal.SIGTERM)
    server.wait_closed()
    answer.close()
    stream.close()
    server.ends()


def test_a_body_that_is_still_coming_is_not_waited_for(start: type[Process]) -> None:
    server = start(LONG)
    waiting = []
    for sent in (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1000\r\n\r\n{", b"GET /"):
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
        connection.sendall(sent)
        waiting.append(connection)
    server.get("/health")  # comes after them, so they have been read
    server.signal(signal.SIGTERM)
    for connection in waiting:
        assert connection.recv(4096).startswith(b"HTTP/1.1 503")
    server.ends()
