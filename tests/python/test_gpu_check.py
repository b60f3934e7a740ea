"""bench/gpu_check.sh on the host layer: its benchmarks run, and nothing looks like a figure."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ops.on_host import BUILD

ROOT = Path(__file__).parents[2]
# What only a server or a development machine has.
SERVER_PACKAGES = (
    "fastapi", "starlette", "uvicorn", "httptools", "prometheus_client", "pydantic",
    "pytest", "gguf", "hypothesis", "openai", "httpx", "psutil", "transformers",
)  # fmt: skip
HIDE = """
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = staticmethod(
    lambda name, *more: None if name.partition(".")[0] in {hidden} else find(name, *more)
)
"""


def gpu_check(
    directory: Path,
    *arguments: str,
    hidden: tuple[str, ...] = (),
    build: Path = BUILD,
    budget: int = 100,
) -> tuple[subprocess.CompletedProcess[str], dict[str, list[dict[str, Any]]]]:
    """(how it ended, its lines by stage), with an interpreter that cannot find some packages."""
    (directory / "sitecustomize.py").write_text(HIDE.format(hidden=hidden))
    environment = os.environ | {
        "OUT": str(directory / "out"),
        "BUDGET": str(budget),
        "PYTHON": sys.executable,
        "PYTHONPATH": str(directory),
        "VLLM_LITE_TEST_BUILD": str(build),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [ROOT / "bench/gpu_check.sh", *arguments],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    stages: dict[str, list[dict[str, Any]]] = {}
    for path in (directory / "out").glob("*.json"):
        for line in json.loads(path.read_text())["lines"]:
            stages.setdefault(line["stage"], []).append(line)
    return done, stages


def statuses(stages: dict[str, list[dict[str, Any]]]) -> dict[str, int | str]:
    return {line["name"]: line["status"] for line in stages["run"]}


def test_dry_run_goes_through_every_benchmark_and_prints_no_figure(tmp_path: Path) -> None:
    names = ("attention", "small_kernels", "sampling", "end_to_end")
    done, stages = gpu_check(tmp_path, "--dry-run", *names, hidden=SERVER_PACKAGES)
    (log,) = (tmp_path / "out").glob("*.log")
    assert statuses(stages) == dict.fromkeys(names, 0), done.stdout + log.read_text()
    assert done.returncode == 0
    assert stages.keys() == {
        "run", "ceilings", "decode attention", "decode attention, float8 KV", "prefill attention",
        "small kernels", "sampling", "end to end",
    }  # fmt: skip
    for stage, lines in stages.items():
        for line in lines if stage != "run" else []:
            figures = {key: value for key, value in line.items() if key not in ("stage", "name")}
            assert "us" in figures
            assert set(figures.values()) <= {"-", "not installed", "no such mask"}, line
    (table,) = (tmp_path / "out").glob("*.md")
    for line in stages["end to end"]:
        assert f"| {line['name']} | - |" in table.read_text()


def test_a_stage_that_lacks_a_package_says_so_and_the_next_one_runs(tmp_path: Path) -> None:
    stage_names = ("attention", "end_to_end", "sampling")
    # A FlashInfer of another release than the benchmark knows is no reason to stop either.
    (tmp_path / "flashinfer.py").touch()
    done, stages = gpu_check(tmp_path, "--dry-run", *stage_names, hidden=("msgspec", "zmq"))
    assert done.returncode == 0
    assert "end_to_end: not run" in done.stdout and "lacks msgspec, zmq" in done.stdout
    lacks = {"end_to_end": "not run: lacks msgspec, zmq"}
    assert statuses(stages) == {"attention": 0, "sampling": 0} | lacks
    for line in stages["decode attention"]:
        assert "AttributeError: module 'flashinfer' has no" in line["flashinfer_us"]


def test_a_stage_that_fails_is_named(tmp_path: Path) -> None:
    done, stages = gpu_check(tmp_path, "--dry-run", "sampling", build=tmp_path)
    assert done.returncode == 1 and "failed: sampling" in done.stdout
    assert statuses(stages) == {"sampling": 1}


def test_when_the_time_is_up_the_rest_is_not_run(tmp_path: Path) -> None:
    done, stages = gpu_check(tmp_path, "--dry-run", "sampling", budget=0)
    assert done.returncode == 0 and "not run: sampling" in done.stdout
    assert statuses(stages) == {"sampling": "not run: no time left"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_points_to_the_dry_run(tmp_path: Path) -> None:
    done, _ = gpu_check(tmp_path, "sampling")
    assert done.returncode == 1
    assert done.stderr == "torch finds no CUDA device; --dry-run needs none\n"


def test_unknown_stages_are_refused(tmp_path: Path) -> None:
    done, _ = gpu_check(tmp_path, "--dry-run", "atention")
    assert done.returncode == 2 and "stages: build tests attention" in done.stderr
