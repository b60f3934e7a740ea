"""``vllm-lite collect-env``: what a bug report should say about the machine and what is installed.

Every part stands alone: what is missing is said in its place, and the others go on.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vllm_lite.cores import cores, num_available_cores
from vllm_lite.settings import ENVIRONMENT_PREFIX

_PACKAGES = (
    "vllm-lite", "torch", "numpy", "transformers", "tokenizers", "safetensors", "jinja2", "fastapi",
    "uvicorn", "uvloop", "httptools", "pyzmq", "msgspec", "prometheus-client", "llguidance",
    "pyyaml", "tqdm",
)  # fmt: skip
_CPU_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni",
              "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")  # fmt: skip
_CGROUP = Path("/sys/fs/cgroup")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="vllm-lite collect-env", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="JSON in place of text")
    found = collect()
    if parser.parse_args(argv).json:
        print(json.dumps(found, indent=2))
        return 0
    for title, part in found.items():
        print(f"{title}:")
        for name, value in part.items():
            print(f"  {name}: {value}")
    return 0


def collect() -> dict[str, dict[str, Any]]:
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "system": _system,
        "packages": _packages,
        "cpu": _cpu,
        "memory": _memory,
        "container": _container,
        "torch": _torch,
        "gpu": _gpu,
        "build": _build,
        "environment": _environment,
    }
    found = {}
    for title, part in parts.items():
        try:
            found[title] = part()
        except Exception as error:
            found[title] = {"error": f"{type(error).__name__}: {error}"}
    return found


def _system() -> dict[str, Any]:
    names = {}
    for line in Path("/etc/os-release").read_text().splitlines():
        name, _, value = line.partition("=")
        names[name] = value.strip('"')
    libc = " ".join(platform.libc_ver())
    return {
        "os": names.get("PRETTY_NAME"),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "libc": libc,
        "python": f"{platform.python_version()} ({sys.executable})",
    }


def _packages() -> dict[str, Any]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _cpu() -> dict[str, Any]:
    info = {}
    for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        info[name.strip()] = value.strip()
    flags = info.get("flags", "").split()
    return {
        "model": info.get("model name"),
        "logical CPUs": os.cpu_count(),
        "physical cores that may be used": len(cores()),
        "cores within the control group's limit": num_available_cores(),
        "features": " ".join(flag for flag in _CPU_FLAGS if flag in flags),
    }


def _memory() -> dict[str, Any]:
    info = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        info[name] = value.strip()
    return {name: info.get(name) for name in ("MemTotal", "MemAvailable", "SwapTotal")}


def _container() -> dict[str, Any]:
    """The limits of this process's control group; "max" is none."""
    found: dict[str, Any] = {}
    for name in ("memory.max", "cpu.max", "pids.max"):
        path = _CGROUP / name
        found[name] = path.read_text().strip() if path.is_file() else "not set"
    shared = os.statvfs("/dev/shm")
    found["/dev/shm"] = f"{shared.f_frsize * shared.f_blocks >> 20} MiB"
    return found


def _torch() -> dict[str, Any]:
    import torch

    return {
        "version": torch.__version__,
        "CUDA of the build": torch.version.cuda or "none",
        "CUDA available": torch.cuda.is_available(),
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def _gpu() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {"devices": "none"}
    found: dict[str, Any] = {}
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        found[str(index)] = (
            f"{device.name}, sm_{device.major}{device.minor}, {device.total_memory >> 20} MiB"
        )
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    found["driver"] = driver.stdout.strip().splitlines()[:1]
    return found


def _build() -> dict[str, Any]:
    from vllm_lite import ops

    return {
        "CPU kernels for this machine": " ".join(ops.cpu_isas()),
        "in use": ops.current_cpu_isa(),
        "CUDA kernels": "yes" if ops.has_cuda_kernels() else "no",
    }


def _environment() -> dict[str, Any]:
    """Variables that change what happens; keys are not shown."""
    found = {}
    for name in sorted(os.environ):
        if name.startswith((ENVIRONMENT_PREFIX, "CUDA_", "OMP_", "HF_", "PYTORCH_")):
            secret = "KEY" in name or "TOKEN" in name
            found[name] = "(hidden)" if secret else os.environ[name]
    return found
