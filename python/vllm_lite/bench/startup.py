"""How soon, how idle, how large: seconds until ready, CPU share while idle, installed size."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path

from vllm_lite.arguments import add_model
from vllm_lite.bench import add_output, report
from vllm_lite.model_files import DEFAULT_MODEL
from vllm_lite.settings import Parser, add_config, add_to, read

_TICKS = os.sysconf("SC_CLK_TCK")  # per second of CPU time


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure_server(model: str, idle_seconds: float, limit: float) -> tuple[float, float, float]:
    """Of a server and its children: seconds until ready, idle CPU in % of a core, resident MB.

    Pages that several processes share count once, those shared with others in part.
    """
    port = free_port()
    start = time.perf_counter()
    server = subprocess.Popen(
        [sys.executable, "-m", "vllm_lite.serve", model, "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        url = f"http://127.0.0.1:{port}/health"
        while True:
            # The port listens before the model is loaded; the answer comes when all is ready.
            try:
                with urllib.request.urlopen(url, timeout=limit) as response:
                    if response.status == 200:
                        break
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                pass
            if server.poll() is not None:
                raise ValueError(f"the server exited with code {server.returncode}")
            if time.perf_counter() - start > limit:
                raise ValueError(f"the server was not ready within {limit} s")
            time.sleep(0.01)
        ready = time.perf_counter() - start
        family = _family(server.pid)
        time.sleep(1.0)
        before = _cpu_seconds(family)
        time.sleep(idle_seconds)
        after = _cpu_seconds(family)
        return ready, 100 * (after - before) / idle_seconds, _resident_bytes(family) / 1e6
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def _family(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            found += _family(int(child))
    return found


def _cpu_seconds(pids: Iterable[int]) -> float:
    ticks = 0
    for pid in pids:
        # The name, in parentheses, may hold anything; user and system time are fields 14 and 15.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS


def _resident_bytes(pids: Iterable[int]) -> int:
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += 1024 * int(line.split()[1])
    return total


def measure_version() -> float:
    """Seconds of `vllm-lite --version`, best of five."""
    command = [sys.executable, "-m", "vllm_lite.cli", "--version"]
    times = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    return min(times)


def installed_packages() -> dict[str, int]:
    """Bytes of vllm-lite and everything it needs (extras aside), as installed here."""
    sizes: dict[str, int] = {}
    wanted = ["vllm-lite"]
    while wanted:
        name = wanted.pop().lower().replace("_", "-")
        if name in sizes:
            continue
        try:
            files = distribution(name).files or []
        except PackageNotFoundError:
            continue  # wanted on other machines only
        paths = (Path(str(file.locate())) for file in files)
        sizes[name] = sum(os.path.getsize(path) for path in paths if path.is_file())
        for text in requires(name) or []:
            if not re.search(r";.*\bextra\b", text):
                wanted.append(re.split(r"[^A-Za-z0-9._-]", text, maxsplit=1)[0])
    return sizes


def make_parser() -> Parser:
    parser = Parser(
        "vllm-lite bench startup",
        "A server's seconds until ready, its CPU while idle, and its memory.",
        "[MODEL]",
    )
    add_model(parser)
    add_config(parser)
    add = add_to(parser, "measurement", None)
    add(
        "--idle-seconds",
        "over which the idle CPU is taken",
        type=float,
        default=10.0,
        metavar="SECONDS",
    )
    add("--limit", "seconds to wait for the server", type=float, default=120.0, metavar="SECONDS")
    add_output(parser)
    return parser


def main(argv: list[str]) -> int:
    values = read(make_parser(), argv).values
    model = values["model"] or DEFAULT_MODEL
    ready, idle, resident = measure_server(model, values["idle_seconds"], values["limit"])
    sizes = installed_packages()
    figures = {
        "ready_s": round(ready, 2),
        "idle_cpu_percent": round(idle, 2),
        "version_s": round(measure_version(), 3),
        "installed_mb": round(sum(sizes.values()) / 1e6),
        "packages": len(sizes),
        "resident_mb": round(resident),
    }
    text = "\n".join(f"{name}: {value}" for name, value in figures.items())
    report(figures, text, values["output_json"])
    return 0
