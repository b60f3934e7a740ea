"""An engine that runs: its processes started, its workloads timed, its CPU and memory watched."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from threading import Timer
from typing import IO, Any, Self

import psutil

from peers.engines import Engine
from peers.install import last_line
from vllm_lite.bench.serve import Request, percentiles, send
from workloads import Workload

START_LIMIT = 600.0  # seconds until ready
WORKLOAD_LIMIT = 1200.0
_WARM_UP = [Request(list(range(100, 164)), 8), Request(list(range(200, 232)), 8)]

Figures = dict[str, Any]


class Running:
    """A context manager. ``ready_seconds`` is from the start of the process to its being ready.

    RuntimeError says what went wrong, with the last line of the engine's log.
    """

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self._log = log
        # Sessions of their own, so that a stop reaches all that they start.
        start = time.perf_counter()
        with log.open("w") as output:
            self._process = subprocess.Popen(
                command, env={**os.environ, **environment}, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if self._answers else output, stderr=output,
                start_new_session=True, text=True,
            )  # fmt: skip
        try:
            self._wait_until_ready()
            self.ready_seconds = time.perf_counter() - start
            self._run(_WARM_UP)
        except BaseException:
            self.close()
            raise

    _answers = False

    def _wait_until_ready(self) -> None:
        raise NotImplementedError

    def _run(self, requests: list[Request]) -> Figures:
        """Figures with ``seconds`` and ``output_tokens`` of each request."""
        raise NotImplementedError

    def measure(self, workload: Workload) -> Figures:
        before = _cpu_seconds(self._process.pid)
        figures = self._run(workload.requests)
        after = _cpu_seconds(self._process.pid)
        wanted = [request.max_tokens for request in workload.requests]
        if figures["output_tokens"] != wanted:
            raise RuntimeError(
                f"{sum(wanted)} tokens were asked for, {sum(figures['output_tokens'])} came"
            )
        figures["output_tokens"] = sum(wanted)
        figures["output_tokens_per_s"] = sum(wanted) / figures["seconds"]
        figures["foreign_cpu_share"] = foreign_share(before, after)
        figures["resident_mb"] = _resident_bytes(self._process.pid) / 1e6
        return figures

    def close(self) -> None:
        for signal_number, limit in ((signal.SIGTERM, 20.0), (signal.SIGKILL, None)):
            try:
                os.killpg(self._process.pid, signal_number)
            except ProcessLookupError:
                break
            try:
                self._process.wait(limit)
            except subprocess.TimeoutExpired:
                continue
        self._process.wait()

    def _failure(self, what: str) -> RuntimeError:
        return RuntimeError(f"{what}; last line: {last_line(self._log)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RunningDriver(Running):
    """Speaks drivers/protocol.py over the standard streams."""

    _answers = True

    def _wait_until_ready(self) -> None:
        self._read(START_LIMIT)

    def _run(self, requests: list[Request]) -> Figures:
        batch = [{"prompt": r.prompt, "max_tokens": r.max_tokens} for r in requests]
        pipe: IO[str] = self._process.stdin  # type: ignore[assignment]
        try:
            pipe.write(json.dumps(batch) + "\n")
            pipe.flush()
        except BrokenPipeError as error:
            raise self._failure("the engine ended") from error
        return self._read(WORKLOAD_LIMIT)

    def _read(self, limit: float) -> Figures:
        timer = Timer(limit, os.killpg, (self._process.pid, signal.SIGKILL))
        timer.start()
        line = self._process.stdout.readline()  # type: ignore[union-attr]
        timer.cancel()
        if not line:
            raise self._failure(f"the engine ended, or gave no answer for {limit:.0f} s")
        return dict(json.loads(line))


class RunningServer(Running):
    """An OpenAI server; requests are streamed to it at their arrivals."""

    def __init__(
        self, command: list[str], environment: dict[str, str], log: Path, port: int
    ) -> None:
        self._url = f"http://127.0.0.1:{port}"
        super().__init__(command, environment, log)

    def _wait_until_ready(self) -> None:
        deadline = time.perf_counter() + START_LIMIT
        while time.perf_counter() < deadline:
            try:
                with urllib.request.urlopen(f"{self._url}/health", timeout=START_LIMIT):
                    return
            except OSError:  # not listening yet, or still loading (503)
                pass
            if self._process.poll() is not None:
                raise self._failure(f"the server ended with code {self._process.returncode}")
            time.sleep(0.02)
        raise self._failure(f"the server was not ready within {START_LIMIT:.0f} s")

    def _run(self, requests: list[Request]) -> Figures:
        try:
            results, seconds = asyncio.run(
                asyncio.wait_for(send(self._url, requests), WORKLOAD_LIMIT)
            )
        except Exception as error:
            raise self._failure(f"{type(error).__name__}: {error}") from error
        errors = [result["error"] for result in results if "error" in result]
        if errors:
            raise self._failure(f"{len(errors)} requests failed: {errors[0]}")
        return {
            "seconds": seconds,
            "output_tokens": [result["output_tokens"] for result in results],
            "ttft_ms": percentiles([result["ttft"] for result in results]),
            "itl_ms": percentiles([gap for result in results for gap in result["itl"]]),
        }


def start(
    engine: Engine, model: Path, threads: int, log: Path, serving: bool = False
) -> RunningDriver | RunningServer:
    port = _free_port()
    values = {"MODEL": str(model), "THREADS": str(threads), "PORT": str(port)}
    over_http = serving or not engine.driver
    template = engine.server if over_http else engine.driver
    command = [values.get(word, word) for word in template]
    environment = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", **engine.environment}
    if over_http:
        return RunningServer(command, environment, log, port)
    return RunningDriver(command, environment, log)


def foreign_share(before: tuple[float, float, float], after: tuple[float, float, float]) -> float:
    """Of the machine's CPU time between two ``_cpu_seconds``: what neither we nor the engine used.

    Time that a hypervisor took away counts as foreign, too.
    """
    wall, busy, own = (later - earlier for earlier, later in zip(before, after, strict=True))
    return max(0.0, busy - own) / (wall * (psutil.cpu_count() or 1))


def _cpu_seconds(pid: int) -> tuple[float, float, float]:
    """Wall clock, the machine's busy CPU seconds, those of this process and the engine's."""
    machine = psutil.cpu_times()
    busy = machine.user + machine.system + machine.nice + machine.irq + machine.softirq
    own = sum(_over_family(pid, lambda process: sum(process.cpu_times()[:2])))
    mine = psutil.Process().cpu_times()
    return time.perf_counter(), busy + machine.steal, own + mine.user + mine.system


def _resident_bytes(pid: int) -> float:
    """Shared pages counted once."""
    return sum(_over_family(pid, lambda process: process.memory_full_info().pss))


def _over_family(pid: int, measure: Any) -> list[float]:
    values = []
    leader = psutil.Process(pid)
    for process in [leader, *leader.children(recursive=True)]:
        try:
            values.append(float(measure(process)))
        except psutil.NoSuchProcess:
            continue
    return values


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
