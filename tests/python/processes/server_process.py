"""A real server process for tests."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx

import vllm_lite
from leftovers import Leftovers
from waiting import PATIENCE, held, wait_until

PACKAGE = str(Path(vllm_lite.__file__).parents[1])


class ServerProcess:
    """``vllm-lite serve`` with ``--port 0`` and the given arguments."""

    def __init__(self, directory: Path, *arguments: str, port: int = 0) -> None:
        self.left = Leftovers()
        self.errors = directory / "stderr"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vllm_lite.cli", "serve", "--port", str(port), *arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**self.left.environment, "PYTHONPATH": PACKAGE},
                cwd=directory,
                text=True,
            )
        self.output = ""
        self.url = ""
        self._announced = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if found := re.search(r" at (http://\S+)", line):
                self.url = found[1]
                self._announced.set()
        self._announced.set()

    def wait_ready(self) -> "ServerProcess":
        assert self._announced.wait(PATIENCE), self.log()
        assert self.url, self.log()
        return self

    def log(self) -> str:
        return self.errors.read_text()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE, trust_env=False, **options)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill_role(self, module: str) -> None:
        os.kill(self.left.of_role(module), signal.SIGKILL)

    def stand_still(self) -> AbstractContextManager[None]:
        """Until it is left no request gets on; the API server answers."""
        return held(self.left.of_role("vllm_lite.worker"))

    def wait(self) -> int:
        """The exit code. Nothing of the server may be left."""
        code = self.process.wait(PATIENCE)
        self.left.assert_none()
        return code

    def wait_idle(self, client: httpx.Client) -> None:
        """Until the engine core says that it holds no sequence and no block."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")

        def is_idle() -> bool:
            found = metrics(client)
            return all(found[f"vllm_lite:{name}"] == 0 for name in names)

        wait_until(is_idle)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def metrics(client: httpx.Client) -> dict[str, float]:
    """Values of the metrics without other labels than the model's."""
    found = {}
    for line in client.get("/metrics").raise_for_status().text.splitlines():
        if match := re.fullmatch(r"(\S+?)\{model_name=\"[^\"]*\"\} (\S+)", line):
            found[match[1]] = float(match[2])
    return found


@contextmanager
def stream(client: httpx.Client, **body: Any) -> Iterator[Iterator[dict[str, Any] | str]]:
    """A streamed completion's events; the last of a good one is "[DONE]"."""
    body = {"prompt": "The quick", "temperature": 0, "ignore_eos": True, "stream": True, **body}
    with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        yield events(response)


def events(response: httpx.Response) -> Iterator[dict[str, Any] | str]:
    for line in response.iter_lines():
        if line:
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)
