"""bench/gpu_check.sh on the host layer: its stages run, and nothing looks like a figure."""

import itertools
import json
import os
import platform
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from ops.on_host import BUILD
from waiting import one_at_a_time

pytestmark = pytest.mark.timeout(1800)  # some wait for others: gpu_check()

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench/gpu_check.sh"
STAGES = (
    "build", "tests", "attention", "small_kernels", "sampling", "end_to_end",
    "memcheck", "racecheck", "engine", "synccheck",
)  # fmt: skip
# What only a server or a development machine has.
SERVER_PACKAGES = (
    "fastapi", "starlette", "uvicorn", "httptools", "prometheus_client", "pydantic",
    "gguf", "hypothesis", "openai", "psutil",
)  # fmt: skip
# What the benchmarks do without, beside those.
TEST_PACKAGES = ("pytest", "transformers", "httpx")
# What a machine for CUDA does not have either, and must be carried there: modules, packages.
CARRIED = {"msgspec": "msgspec", "zmq": "pyzmq"}
NOT_ON_A_BARE_MACHINE = (*SERVER_PACKAGES, *CARRIED, *CARRIED.values())
BARE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
# Hides modules and packages, but where the script installs what was carried.
HIDE = """
from importlib.machinery import PathFinder

find_spec, find_distributions = PathFinder.find_spec, PathFinder.find_distributions

def is_hidden(name, place):
    return name.partition(".")[0] in {hidden} and "build/gpu_check/packages" not in str(place)

def find(_, name, *more):
    spec = find_spec(name, *more)
    return None if spec is None or is_hidden(name, spec.origin) else spec

PathFinder.find_spec = classmethod(find)
PathFinder.find_distributions = staticmethod(
    lambda *context: (
        found for found in find_distributions(*context)
        if not is_hidden(found.name, found.locate_file(""))
    )
)
"""


def gpu_check(
    directory: Path,
    *arguments: str,
    hidden: tuple[str, ...] = (),
    build: Path = BUILD,
    budget: int = 480,
    timeout: int = 800,
    **variables: str,
) -> tuple[subprocess.CompletedProcess[str], dict[str, list[dict[str, Any]]]]:
    """(how it ended, its lines by stage), with an interpreter that cannot find some packages."""
    (directory / "sitecustomize.py").write_text(HIDE.format(hidden=hidden))
    environment = os.environ | {
        "OUT": str(directory / "out"),
        "BUDGET": str(budget),
        "PYTHON": sys.executable,
        "PYTHONPATH": str(directory),
        "VLLM_LITE_TEST_BUILD": str(build),
        "WHEELS": "",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    with one_at_a_time(SCRIPT):  # each run replaces the packages in build/gpu_check
        done = subprocess.run(
            [SCRIPT, *arguments],
            env=environment, capture_output=True, text=True, timeout=timeout, check=False,
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
    hidden = SERVER_PACKAGES + TEST_PACKAGES
    done, stages = gpu_check(tmp_path, "--dry-run", *names, hidden=hidden)
    (log,) = (tmp_path / "out").glob("*.log")
    assert statuses(stages) == dict.fromkeys(names, 0), done.stdout + log.read_text()
    assert done.returncode == 0
    assert stages.keys() == {
        "run", "ceilings", "decode attention", "decode attention, float8 KV", "prefill attention",
        "small kernels", "swapped blocks", "sampling", "end to end",
    }  # fmt: skip
    for stage, lines in stages.items():
        for line in lines if stage != "run" else []:
            figures = {key: value for key, value in line.items() if key not in ("stage", "name")}
            assert "us" in figures
            assert set(figures.values()) <= {"-", "not installed", "no such mask"}, line
    (table,) = (tmp_path / "out").glob("*.md")
    for line in stages["end to end"]:
        assert f"| {line['name']} | - |" in table.read_text()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_whole_dry_run_builds_first_and_fails_nowhere(tmp_path: Path) -> None:
    done, stages = gpu_check(tmp_path, "--dry-run", budget=3000, timeout=3500)
    assert done.returncode == 0, done.stdout
    assert statuses(stages) == dict.fromkeys(STAGES, 0), done.stdout


def test_a_stage_that_lacks_a_package_says_so_and_the_next_one_runs(tmp_path: Path) -> None:
    stage_names = ("attention", "end_to_end", "sampling")
    # A FlashInfer of another release than the benchmark knows is no reason to stop either.
    (tmp_path / "flashinfer.py").touch()
    done, stages = gpu_check(tmp_path, "--dry-run", *stage_names, hidden=("msgspec", "zmq"))
    assert done.returncode == 0
    assert "end_to_end: not run, lacks msgspec, zmq\n" in done.stdout
    wheels = f"put into wheels/ the wheels, for Python {platform.python_version()}, of: "
    assert f"{wheels}msgspec, pyzmq\n" in done.stdout
    lacks = {"end_to_end": "not run: lacks msgspec, zmq"}
    assert statuses(stages) == {"attention": 0, "sampling": 0} | lacks
    for line in stages["decode attention"]:
        assert "AttributeError: module 'flashinfer' has no" in line["flashinfer_us"]


def test_the_build_names_the_tools_that_it_lacks(tmp_path: Path) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    for path in itertools.chain(Path("/bin").iterdir(), Path("/usr/bin").iterdir()):
        if path.name not in ("cmake", "ninja") and not (commands / path.name).is_symlink():
            (commands / path.name).symlink_to(path)
    python = tmp_path / "python/python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done, stages = gpu_check(tmp_path, "--dry-run", "build", PATH=str(commands), PYTHON=str(python))
    assert statuses(stages) == {"build": "not run: lacks cmake, ninja"}, done.stdout + done.stderr
    assert "wheels" not in done.stdout


def make_wheel(directory: Path, name: str) -> None:
    """Of a package that is installed."""
    package = metadata.distribution(name)
    tag = re.search(r"^Tag: (.*)$", package.read_text("WHEEL") or "", re.M)
    assert tag is not None and package.files is not None
    path = directory / f"{name}-{package.version}-{tag[1]}.whl"
    of_the_installer = ("INSTALLER", "REQUESTED", "direct_url.json")
    with zipfile.ZipFile(path, "w") as wheel:
        for file in package.files:
            if (
                file.suffix != ".pyc"
                and ".." not in file.parts
                and file.name not in of_the_installer
            ):
                wheel.write(str(file.locate()), str(file))


def test_what_a_bare_machine_lacks_is_installed_from_the_folder_of_wheels(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in (*CARRIED.values(), "numpy"):  # the last is there already
        make_wheel(wheels, name)
    names = ("end_to_end", "engine")
    done, stages = gpu_check(
        tmp_path, "--dry-run", *names, hidden=NOT_ON_A_BARE_MACHINE, WHEELS=str(wheels), **BARE
    )
    (log,) = (tmp_path / "out").glob("*.log")
    assert statuses(stages) == dict.fromkeys(names, 0), done.stdout + log.read_text()
    assert "== wheels: msgspec pyzmq\n" in done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) > 10


def test_wheels_that_cannot_be_installed_are_a_failure(tmp_path: Path) -> None:
    (tmp_path / "other-1.0-cp27-cp27m-win32.whl").touch()
    done, stages = gpu_check(tmp_path, "--dry-run", "sampling", WHEELS=str(tmp_path))
    assert done.returncode == 1 and "failed: wheels" in done.stdout
    assert statuses(stages) == {"wheels": 1, "sampling": 0}


def test_a_folder_without_wheels_is_refused(tmp_path: Path) -> None:
    done, _ = gpu_check(tmp_path, "--dry-run", "sampling", WHEELS=str(tmp_path))
    assert done.returncode == 2 and done.stderr == f"WHEELS={tmp_path}: no *.whl there\n"


def test_a_stage_that_fails_is_named(tmp_path: Path) -> None:
    done, stages = gpu_check(tmp_path, "--dry-run", "sampling", build=tmp_path)
    assert done.returncode == 1 and "failed: sampling" in done.stdout
    assert statuses(stages) == {"sampling": 1}


def test_the_kernel_tests_of_the_sanitizers_run_and_none_at_all_is_a_failure(
    tmp_path: Path,
) -> None:
    hidden = NOT_ON_A_BARE_MACHINE
    names = ("memcheck", "synccheck")
    done, stages = gpu_check(tmp_path, "--dry-run", *names, hidden=hidden, **BARE)
    assert done.returncode == 0 and statuses(stages) == dict.fromkeys(names, 0), done.stdout
    passed = re.findall(r"(\d+) passed", done.stdout)
    assert len(passed) == 2 and min(map(int, passed)) > 100
    nothing = {"PYTEST_ADDOPTS": "--deselect tests/python/ops"}
    done, stages = gpu_check(tmp_path, "--dry-run", "racecheck", **nothing)
    assert done.returncode == 1 and statuses(stages) == {"racecheck": 1}
    nothing = {"PYTEST_ADDOPTS": "-p skips_all"}
    (tmp_path / "skips_all.py").write_text(
        "import pytest\ndef pytest_runtest_setup(item): pytest.skip()\n"
    )
    done, stages = gpu_check(tmp_path, "--dry-run", "tests", **nothing)
    assert "skipped" in done.stdout and statuses(stages) == {"tests": 1}


def marked_cuda(directory: Path, *paths: str, hidden: tuple[str, ...] = ()) -> set[str]:
    """The names of the tests that ``-m cuda`` chooses from the paths."""
    (directory / "sitecustomize.py").write_text(HIDE.format(hidden=hidden))
    paths_of_modules = [directory, ROOT / "python", ROOT / "tests/python"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only",
         "-m", "cuda", *paths],
        env=os.environ
        | (BARE if hidden else {})
        | {"PYTHONPATH": ":".join(map(str, paths_of_modules))},
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    return {line for line in done.stdout.splitlines() if "::" in line}


def test_every_test_that_needs_a_device_is_chosen_on_a_bare_machine(tmp_path: Path) -> None:
    script = SCRIPT.read_text()
    ops, engine = "tests/python/ops", "tests/python/engine/test_cuda.py"
    assert ops in script and engine in script
    chosen = marked_cuda(tmp_path, ops, hidden=NOT_ON_A_BARE_MACHINE)
    chosen |= marked_cuda(tmp_path, engine, hidden=SERVER_PACKAGES)  # the rest carried
    assert chosen == marked_cuda(tmp_path, "tests/python")
    assert len(chosen) > 700


def test_a_stage_cannot_take_the_time_of_those_after_it(tmp_path: Path) -> None:
    shares = dict(re.findall(r"\[(\w+)\]=(\d+)", SCRIPT.read_text()))
    assert tuple(shares) == STAGES
    assert sum(map(int, shares.values())) == 480
    hangs = tmp_path / "python"
    hangs.write_text(
        f'#!/bin/sh\ncase "$1" in *attention.py) sleep 1000 ;; esac\nexec {sys.executable} "$@"\n'
    )
    hangs.chmod(0o755)
    later = int(shares["small_kernels"])
    names = ("attention", "small_kernels")
    done, stages = gpu_check(tmp_path, "--dry-run", *names, budget=later + 6, PYTHON=str(hangs))
    assert statuses(stages)["attention"] == 124
    found = re.search(r"small_kernels \(after .*; at most (\d+) s\)", done.stdout)
    # Between the two an interpreter is started, which takes a busy machine seconds.
    assert found is not None and later // 2 <= int(found[1]) <= later, done.stdout


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
