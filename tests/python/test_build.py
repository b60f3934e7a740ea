"""What a build says when something it needs is missing: one sentence, before it compiles."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOLS = ("cmake", "ninja")
COMPILERS = ("c++", "g++", "cc", "gcc", "ld", "as", "ar", "ranlib")


def configure(tmp_path: Path, tools: tuple[str, ...], *options: str) -> str:
    """CMake's complaint on a machine that has only these programs."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in tools:
        found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        assert found is not None, name
        # Programs from PyPI are scripts that find their package beside themselves.
        (programs / name).write_text(f'#!/bin/sh\nexec "{found}" "$@"\n')
        (programs / name).chmod(0o755)
    environment = {"PATH": str(programs), "HOME": str(tmp_path)}
    done = subprocess.run(
        [programs / "cmake", "-S", ROOT, "-B", tmp_path / "build", "-G", "Ninja", *options],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    return " ".join(done.stderr.split())


def test_without_a_compiler(tmp_path: Path) -> None:
    said = configure(tmp_path, TOOLS, "-DVLLM_LITE_CUDA=OFF")
    assert "No C++ compiler was found: install one with C++20" in said


def test_without_torch_and_pybind11(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv/bin/python"
    said = configure(
        tmp_path, TOOLS + COMPILERS, "-DVLLM_LITE_CUDA=OFF", f"-DPython_EXECUTABLE={python}"
    )
    assert f"is not installed for {python}: run 'pip install -r requirements/cpu.txt' first" in said


def test_cuda_on_without_nvcc(tmp_path: Path) -> None:
    said = configure(tmp_path, TOOLS + COMPILERS, "-DVLLM_LITE_CUDA=ON")
    assert "VLLM_LITE_CUDA=ON, but no CUDA compiler (nvcc) was found" in said


def test_cuda_neither_on_nor_off(tmp_path: Path) -> None:
    said = configure(tmp_path, TOOLS + COMPILERS, "-DVLLM_LITE_CUDA=maybe")
    assert "VLLM_LITE_CUDA=maybe: must be AUTO, ON or OFF" in said
