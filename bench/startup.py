"""How soon, how idle, how large: seconds until ready, CPU share while idle, installed size.

python bench/startup.py --json
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.metadata import distribution, requires
from pathlib import Path

import psutil
from packaging.requirements import Requirement


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
                raise SystemExit(f"the server exited with code {server.returncode}")
            if time.perf_counter() - start > limit:
                raise SystemExit(f"the server was not ready within {limit} s")
            time.sleep(0.01)
        ready = time.perf_counter() - start
        parent = psutil.Process(server.pid)
        family = [parent, *parent.children(recursive=True)]
        time.sleep(1.0)
        before = sum(sum(process.cpu_times()[:2]) for process in family)
        time.sleep(idle_seconds)
        after = sum(sum(process.cpu_times()[:2]) for process in family)
        resident = sum(process.memory_full_info().pss for process in family) / 1e6
        return ready, 100 * (after - before) / idle_seconds, resident
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def measure_version() -> float:
    """Seconds of `vllm-lite --version`, best of five."""
    command = [str(Path(sys.executable).with_name("vllm-lite")), "--version"]
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
        files = distribution(name).files or []
        paths = (Path(str(file.locate())) for file in files)
        sizes[name] = sum(os.path.getsize(path) for path in paths if path.is_file())
        for text in requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                wanted.append(requirement.name)
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--idle-seconds", type=float, default=10.0)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds to wait for the server")
    parser.add_argument("--json", action="store_true", help="one JSON line instead of text")
    args = parser.parse_args()
    ready, idle, resident = measure_server(args.model, args.idle_seconds, args.limit)
    sizes = installed_packages()
    figures = {
        "ready_s": round(ready, 2),
        "idle_cpu_percent": round(idle, 2),
        "version_s": round(measure_version(), 3),
        "installed_mb": round(sum(sizes.values()) / 1e6),
        "packages": len(sizes),
        "resident_mb": round(resident),
    }
    print(json.dumps(figures) if args.json else "\n".join(f"{k}: {v}" for k, v in figures.items()))


if __name__ == "__main__":
    main()
