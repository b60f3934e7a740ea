"""The project's CUDA kernels under AddressSanitizer with UBSan, and under ThreadSanitizer.

``tests/cpp/cuda`` runs attention, sampling and the small kernels in random cases. Here it is built
with each sanitizer, and attention of one head size and two pairs of types, as it takes most of the
time to compile; the slow test takes all of it. ``test_cuda_on_host.py`` holds that the host layer
finds mistakes at all.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from waiting import one_at_a_time

ROOT = Path(__file__).parents[2]
SANITIZERS = ("address", "thread")
# Orders of threads and blocks, as they come and a random one; and compute capabilities: an older
# device, and a Hopper, whose attention kernels are others.
RUNS = (("0", "80"), ("5", "90"))
LITTLE_SHARED_MEMORY = ("5", "86")  # where attention of large heads has another layout

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


def build(sanitizer: str, *targets: str) -> Path:
    """The build folder, which is kept: compiling is what the tests take their time for."""
    folder = ROOT / "build" / sanitizer
    tools = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    commands = [
        ["cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", "-DVLLM_LITE_PYTHON=OFF",
         "-DVLLM_LITE_CUDA=OFF", "-DVLLM_LITE_TESTS=ON", f"-DCUDA_ON_HOST_SANITIZER={sanitizer}",
         f"-DPython_EXECUTABLE={sys.executable}"],
        ["ninja", "-C", folder, "-j2", *targets],
    ]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    for command in commands:
        with one_at_a_time(folder):
            done = subprocess.run(
                command, env=os.environ | {"PATH": tools}, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, check=False,
            )  # fmt: skip
        assert done.returncode == 0, done.stdout[-5000:]
    return folder


def run(program: Path, runs: tuple[tuple[str, str], ...] = RUNS) -> None:
    for seed, capability in runs:
        environment = {
            "CUDA_ON_HOST_SEED": seed,
            "CUDA_ON_HOST_COMPUTE_CAPABILITY": capability,
            "TSAN_OPTIONS": "halt_on_error=1",
        }
        done = subprocess.run(
            [program], env=os.environ | environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"seed {seed}, {capability}:\n{done.stdout[-5000:]}"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_kernels(sanitizer: str) -> None:
    run(build(sanitizer, "cuda_random_part_test") / "tests/cpp/cuda/cuda_random_part_test")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_all_kernels(sanitizer: str) -> None:
    folder = build(sanitizer, "cuda_random_test", "paged_attention_test")
    run(folder / "tests/cpp/cuda/cuda_random_test", (*RUNS, LITTLE_SHARED_MEMORY))
    run(folder / "tests/cuda_on_host/tests/paged_attention_test")
