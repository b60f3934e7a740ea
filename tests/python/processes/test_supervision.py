"""How the server starts, stops and fails. A tiny model: what is tested is the processes."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from leftovers import Leftovers
from processes.server_process import PACKAGE, ServerProcess, metrics, stream
from tiny_model import block_bytes
from waiting import PATIENCE, wait_until

Start = Callable[..., ServerProcess]


@pytest.fixture
def start(tiny_model: str, tmp_path: Path) -> Iterator[Start]:
    servers: list[ServerProcess] = []

    def make(*arguments: str, model: str = tiny_model, port: int = 0) -> ServerProcess:
        directory = tmp_path / str(len(servers))
        directory.mkdir()
        options = ("--threads", "1", "--max-model-len", "30000", *arguments)
        servers.append(ServerProcess(directory, model, *options, port=port))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def wait_port_free(port: int) -> None:
    # A process is seen as gone a moment before the kernel has closed its sockets.
    wait_until(lambda: can_bind(port))


def can_bind(port: int) -> bool:
    with socket.socket() as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind(("127.0.0.1", port))
        except OSError:
            return False
        attempt.listen()
        return True


# --- stopping -------------------------------------------------------------------------------------


@pytest.mark.case("SHD-01")
def test_sigterm_lets_streams_finish_and_a_second_one_does_not_wait(start: Start) -> None:
    server = start("--shutdown-grace", "600").wait_ready()
    with server.client() as client, ExitStack() as stack:
        running = [stack.enter_context(stream(client, max_tokens=1500)) for _ in range(3)]
        for events in running:
            next(events)
        with server.stand_still():
            server.signal(signal.SIGTERM)
            wait_port_free(server.port)  # at once, not when the streams have ended
        for events in running:
            received = list(events)
            assert received[-1] == "[DONE]"
            assert received[-2]["choices"][0]["finish_reason"] == "length"
    assert server.wait() == 0, server.log()

    server = start("--shutdown-grace", "600").wait_ready()
    with server.client() as client, stream(client, max_tokens=20000) as events:
        next(events)
        server.signal(signal.SIGTERM)
        wait_port_free(server.port)
        assert server.process.poll() is None
        server.signal(signal.SIGTERM)
        *_, last = events
        assert last["error"]["code"] == "service_unavailable"
        assert server.wait() == 0, server.log()


@pytest.mark.case("SHD-01")
def test_grace_time_ends_streams_with_an_error(start: Start) -> None:
    server = start("--shutdown-grace", "0.5").wait_ready()
    with server.client() as client, stream(client, max_tokens=20000) as events:
        next(events)
        server.signal(signal.SIGINT)
        *_, last = events
        assert last["error"]["code"] == "service_unavailable"
    assert server.wait() == 0, server.log()
    assert "Traceback" not in server.log()


@contextlib.contextmanager
def held_start(server: ServerProcess) -> Iterator[None]:
    """With the parent's three children. The worker is stopped at once, so that the start goes no
    further.
    """

    def has_worker() -> bool:
        assert server.process.poll() is None, server.log()
        return any("-m vllm_lite.worker " in line for line in server.left.processes().values())

    wait_until(has_worker)
    with server.stand_still():
        wait_until(lambda: len(server.left.processes()) == 4)
        yield


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_starting_ends_everything_quickly(start: Start, number: int) -> None:
    server = start()
    with held_start(server):
        server.signal(number)
    assert server.wait() == 0, server.log()
    assert server.url == "" and "Traceback" not in server.log()


def test_kill_of_the_parent_while_starting_leaves_nothing(start: Start) -> None:
    server = start()
    with held_start(server):
        assert server.left.files() != []
        server.process.kill()
    assert server.wait() == -signal.SIGKILL


# --- without a terminal ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "before",
    [
        "os.close(0)",
        "os.close(1)",
        "os.close(2)",
        "os.closerange(0, 3)",
        "r, w = os.pipe(); os.dup2(w, 1); os.close(r)",
        "r, w = os.pipe(); os.dup2(w, 2); os.close(r)",
    ],
    ids=["no stdin", "no stdout", "no stderr", "none", "unread stdout", "unread stderr"],
)
def test_standard_streams_may_be_missing(tiny_model: str, before: str) -> None:
    # Bound and not listened at, so that the server can have it and nobody else is given it.
    keeper = socket.socket()
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keeper.bind(("127.0.0.1", 0))
    port = keeper.getsockname()[1]
    code = (
        "import os, sys\n"
        f"{before}\n"
        f"os.execv(sys.executable, [sys.executable, '-m', 'vllm_lite.cli', 'serve', {tiny_model!r},"
        f" '--port', '{port}', '--threads', '1', '--max-model-len', '30000'])"
    )
    left = Leftovers()
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**left.environment, "PYTHONPATH": PACKAGE},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:

        def is_up() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).is_success
            return process.poll() is not None

        wait_until(is_up)
        process.terminate()
        _, errors = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        keeper.close()
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    left.assert_none()


def test_interrupt_while_the_program_is_being_loaded_is_quiet(tmp_path: Path) -> None:
    (tmp_path / "msgspec.py").write_text("raise KeyboardInterrupt")  # among the first imports
    done = subprocess.run(
        [sys.executable, "-m", "vllm_lite.cli", "serve"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{PACKAGE}"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


# --- dying ----------------------------------------------------------------------------------------


def test_kill_of_the_parent_ends_every_child(start: Start) -> None:
    server = start().wait_ready()
    with server.client() as client, stream(client, max_tokens=20000) as events:
        next(events)
        assert len(server.left.processes()) == 4
        server.process.kill()
        with pytest.raises(httpx.TransportError):
            list(events)
    assert server.wait() == -signal.SIGKILL
    wait_port_free(server.port)


@pytest.mark.case("HLT-03", "WRK-01")
@pytest.mark.parametrize(
    ("module", "role"),
    [("vllm_lite.worker", "worker"), ("vllm_lite.engine_core", "engine core")],
)
def test_kill_of_the_engine_ends_streams_with_an_error_and_the_server(
    start: Start, module: str, role: str
) -> None:
    server = start().wait_ready()
    with server.client() as client, ExitStack() as stack:
        running = [stack.enter_context(stream(client, max_tokens=20000)) for _ in range(3)]
        for events in running:
            next(events)
        server.kill_role(module)
        for events in running:
            *_, last = events
            assert f"the {role} was killed by SIGKILL" in last["error"]["message"]
    assert server.wait() == 1
    assert f"the {role} was killed by SIGKILL" in server.log()
    assert "Traceback" not in server.log()


@pytest.mark.case("HLT-03", "WRK-01")
def test_kill_of_the_engine_core_of_an_idle_server_is_noticed(start: Start) -> None:
    server = start().wait_ready()
    with server.client() as client:
        assert client.get("/health").status_code == 200
        server.kill_role("vllm_lite.engine_core")
        with contextlib.suppress(httpx.TransportError):  # the server has ended
            wait_until(lambda: client.get("/health").status_code != 200)
    assert server.wait() == 1
    assert "the engine core was killed by SIGKILL" in server.log()


def test_worker_that_hangs_counts_as_dead(start: Start) -> None:
    server = start("--step-timeout", "2").wait_ready()
    with server.client() as client, stream(client, max_tokens=20000) as events:
        next(events)
        os.kill(server.left.of_role("vllm_lite.worker"), signal.SIGSTOP)
        *_, last = events
        assert "the worker gave no result within 2000 ms" in last["error"]["message"]
    assert server.wait() == 1
    assert "the worker gave no result within 2000 ms" in server.log()


def test_kill_of_the_api_server_ends_the_server(start: Start) -> None:
    server = start().wait_ready()
    server.kill_role("vllm_lite.server")
    assert server.wait() == 1
    assert "the API server was killed by SIGKILL" in server.log()
    wait_port_free(server.port)


# --- not starting ---------------------------------------------------------------------------------


def run_cli(*arguments: str, model: str = "smollm2", path: str = PACKAGE) -> tuple[int, str]:
    """(exit code, stderr)."""
    done = subprocess.run(
        [sys.executable, "-m", "vllm_lite.cli", "serve", model, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.stdout == ""
    return done.returncode, done.stderr


@pytest.mark.case("CFG-03")
def test_port_in_use_is_noticed_before_loading(tmp_path: Path) -> None:
    for name in ("torch", "numpy", "tokenizers", "safetensors"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('something heavy was loaded')")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        path = f"{tmp_path}{os.pathsep}{PACKAGE}"
        code, errors = run_cli("--port", str(port), path=path)
    assert code == 1
    assert errors.count("\n") == 1 and f"127.0.0.1 port {port}" in errors and "in use" in errors


@pytest.mark.case("LEN-03")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-model-len", "9000"], ["max_model_len 9000", "8192"]),
        (["--max-num-seqs", "0"], ["max_num_seqs", "0"]),
        (["--max-num-seqs", "many"], ["--max-num-seqs", "many"]),
        (["--kv-cache-memory", "lots"], ["--kv-cache-memory", "lots"]),
        (["--block-size", "24"], ["block_size", "24"]),
        (["--no-such-option"], ["--no-such-option"]),
        (["--max-num-seq", "5"], ["--max-num-seq"]),
        (["--port", "70000"], ["--port", "70000"]),
        (["--host", "no.such.host.invalid"], ["no.such.host.invalid"]),
        (["--api-key", ""], ["api_keys"]),
        (["--shutdown-grace", "inf"], ["shutdown_grace", "inf", "1000000"]),
        (["--backlog", "99999999999"], ["backlog", "99999999999", "65535"]),
        (["--max-num-seqs", "2147483647"], ["max_num_seqs", "2147483647", "65535"]),
        (["--kv-cache-memory", "1000000G"], ["kv_cache_memory", "2147483647", "at most"]),
        (["--kv-cache-memory", "1K"], ["kv_cache_memory is 1024: set --kv-cache-memory to at"]),
        (["--max-model-len", "8192", "--kv-cache-memory", "100M"], ["8192", "104857600", "4544"]),
    ],
    ids=lambda value: value[0] if value[0].startswith("--") else "",
)
def test_bad_option_is_one_sentence(arguments: list[str], words: list[str]) -> None:
    code, errors = run_cli(*arguments)
    assert code == 1
    assert errors.count("\n") == 1, errors
    for word in ["vllm-lite serve: ", *words]:
        assert word in errors


def test_unknown_model_is_one_sentence(tmp_path: Path) -> None:
    code, errors = run_cli(model="no-such-model")
    assert code == 1 and errors.count("\n") == 1 and "'no-such-model' not found" in errors
    code, errors = run_cli(model=str(tmp_path))
    assert code == 1 and errors.count("\n") == 1 and "neither config.json nor" in errors


def test_failure_in_a_child_is_one_sentence_and_ends_the_others(
    start: Start, tiny_model: str, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in os.listdir(tiny_model):
        (broken / name).write_bytes((Path(tiny_model) / name).read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    server = start(model=str(broken))
    assert server.wait() == 1
    # Lines of the log are from children that were still starting.
    sentences = [x for x in server.log().splitlines() if not re.match(r"\d{4}-\d\d-\d\d ", x)]
    assert len(sentences) == 1 and "model.safetensors" in sentences[0], server.log()
    assert sentences[0].startswith("vllm-lite serve: the worker failed: ")


# --- options that show ----------------------------------------------------------------------------


def test_names_keys_and_memory_limit(start: Start) -> None:
    memory = block_bytes() * 1000
    server = start(
        "--served-model-name", "tiny", "alias",
        "--api-key", "first", "--api-key", "second",
        "--max-model-len", "15000", "--kv-cache-memory", str(memory), "--max-num-waiting", "2",
        "--max-num-seqs", "1", "--access-log",
    )  # fmt: skip
    server.wait_ready()
    assert "tiny at http://127.0.0.1:" in server.output
    with server.client() as client:
        assert client.get("/health").status_code == 200
        for route in ("/v1/models", "/metrics", "/version"):
            assert client.get(route).status_code == 401
        body: dict[str, Any] = {"prompt": "The", "max_tokens": 3, "model": "alias"}
        for key, status in (("first", 200), ("second", 200), ("third", 401)):
            headers = {"Authorization": f"Bearer {key}"}
            answer = client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == status
        client.headers["Authorization"] = "Bearer first"
        assert [m["id"] for m in client.get("/v1/models").json()["data"]] == ["tiny", "alias"]
        assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 15000
        client.get("/health?source=probe")
        answer = client.post("/v1/completions", json={**body, "n": 3})
        assert answer.status_code == 400 and "limit is 2 (max_num_waiting)" in answer.text
        check_full_queue(client, body)
        server.wait_idle(client)
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    access = [line for line in server.log().splitlines() if "HTTP/1.1" in line]
    assert any("/v1/completions" in line for line in access)
    assert not any("/health" in line or "/metrics" in line for line in access)


def check_full_queue(client: httpx.Client, body: dict[str, Any]) -> None:
    """429 before anything is sent, for a plain answer and for a stream of several samples."""
    with ThreadPoolExecutor(1) as pool:
        # It runs until the others have been refused, and is left then.
        with stream(client, max_tokens=14000) as running:
            next(running)
            two_wait = pool.submit(client.post, "/v1/completions", json={**body, "n": 2})
            wait_until(lambda: metrics(client)["vllm_lite:num_requests_waiting"] == 2)
            for extra in ({}, {"n": 2, "stream": True}):
                answer = client.post("/v1/completions", json={**body, **extra})
                assert answer.status_code == 429, answer.text
                assert "waiting queue is full (2 sequences)" in answer.json()["error"]["message"]
                assert answer.headers["retry-after"] == "1"
            assert next(running) != "[DONE]"
        assert two_wait.result().status_code == 200


def test_version_and_help_import_nothing_heavy() -> None:
    for arguments, expected in (
        (["--version"], "vllm-lite "),
        (["--help"], "usage: vllm-lite COMMAND"),
        (["serve", "--help"], "--kv-cache-memory"),
    ):
        code = (
            "import sys\n"
            "from vllm_lite.cli import main\n"
            f"sys.argv = ['vllm-lite', *{arguments}]\n"
            "try:\n    main()\n"
            "except SystemExit as end:\n    assert not end.code, end.code\n"
            "heavy = {'torch', 'numpy', 'transformers', 'fastapi', 'uvicorn', 'zmq'}\n"
            "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": PACKAGE},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout
