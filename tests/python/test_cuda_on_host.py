"""The host layer of CUDA kernels (tests/cuda_on_host) finds the mistakes that kernels have.

Each file in ``mutants`` holds a kernel and the mistakes that can be planted in it by number. It is
built plain, with AddressSanitizer and UBSan, and with ThreadSanitizer; each mistake must be found
by one of the builds at least, the kernel as it is by none.
"""

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYER = ROOT / "tests/cuda_on_host"
SANITIZERS = {
    "plain": [],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
    "thread": ["-fsanitize=thread"],
}
# Which builds must find what: a missing barrier that only sometimes changes a result, say, is a
# matter for ThreadSanitizer.
MUST_FIND = {
    "gemm_mutants": {
        "kReadsPastRows": {"address"},
        "kWritesPastRows": {"address"},
        "kTailNotZeroed": {"plain"},
        "kWaitsForTooFew": {"plain"},
        "kNoCommit": {"plain"},
        "kNoBarrierAfterWait": {"plain", "thread"},
        "kNoBarrierBeforeReuse": {"plain", "thread"},
        "kNoBarrierBeforeSums": {"plain", "thread"},
        "kDivergentBarrier": {"plain"},
        "kEarlyReturn": {"plain"},
        "kDivergentShuffle": {"plain"},
        "kShuffleTooFew": {"plain"},
        "kNoSyncwarp": {"plain", "thread"},
        "kSharedOverrun": {"address"},
        "kDynamicTooSmall": {"address"},
        "kMisalignedLdmatrix": {"plain"},
        "kMisalignedCopy": {"plain"},
        "kCopyInFlight": {"plain"},
        "kNoFence": {"thread"},
        "kPlainCounter": {"thread"},
        "kBankConflicts": {"plain"},
    },
    "wgmma_mutants": {
        "kNoProxyFence": {"plain"},
        "kNoWgmmaFence": {"plain"},
        "kFenceOnce": {"plain"},
        "kFenceTooEarly": {"plain"},
        "kNoCommit": {"plain"},
        "kNoWgmmaWait": {"plain"},
        "kWaitsForTooFew": {"plain"},
        "kReleasesBeforeWait": {"plain", "thread"},
        "kOneWarpReleases": {"plain", "thread"},
        "kMultipliesTooEarly": {"plain", "thread"},
        "kArrivesBeforeCopies": {"thread"},
        "kLoadsTooEarly": {"plain"},
        "kNoSwizzle": {"plain"},
        "kWrongSwizzle": {"plain"},
        "kWrongColumnBlock": {"plain"},
        "kWrongStep": {"plain"},
        "kWarpSkipsAProduct": {"plain"},
        "kLaneSkipsFence": {"plain"},
        "kDynamicTooSmall": {"address"},
    },
}
SEEDS = ("0", "1", "2", "3")


def source_of(kernel: str) -> Path:
    return LAYER / f"tests/mutants/{kernel}.cu"


# By their numbers: the kernel as it is first.
MUTANTS = {
    kernel: re.findall(r"^  (k\w+),", source_of(kernel).read_text(), re.MULTILINE)
    for kernel in MUST_FIND
}

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++"),
    pytest.mark.timeout(1800),  # the first test compiles all three builds
]


def compile_program(folder: Path, build: str, sources: list[Path], libraries: list[str]) -> Path:
    """With the layer itself, which ThreadSanitizer's build leaves uninstrumented."""
    common = ["g++", "-std=c++20", "-O1", "-g", "-ffp-contract=off", "-Wall", "-Wextra"]
    common += ["-Wno-unknown-pragmas", f"-I{LAYER}/include", f"-I{ROOT}/csrc"]
    layer = folder / "layer.cpp"
    layer.write_text("".join(f'#include "{path}"\n' for path in sorted(LAYER.glob("src/*.cpp"))))
    flags = [] if build == "plain" else [f"-DCUDA_ON_HOST_{build.upper()}_SANITIZER"]
    if build == "address":
        flags += SANITIZERS[build]
    layer_object, program = folder / "layer.o", folder / "program"
    subprocess.run([*common, *flags, "-c", layer, "-o", layer_object], check=True)
    inputs = ["-xc++", *sources, ROOT / "csrc/core/check.cpp", "-xnone", layer_object, *libraries]
    subprocess.run([*common, *SANITIZERS[build], *inputs, "-pthread", "-o", program], check=True)
    return program


ProgramOf = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def program_of(tmp_path_factory: pytest.TempPathFactory) -> ProgramOf:
    """The program of a kernel and a build, compiled when it is first asked for."""

    @functools.cache
    def program_of(kernel: str, build: str) -> Path:
        return compile_program(tmp_path_factory.mktemp(build), build, [source_of(kernel)], [])

    return program_of


def run(program: Path, *arguments: str, seed: str = "0") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CUDA_ON_HOST_SEED": seed, "TSAN_OPTIONS": "halt_on_error=1"}
    return subprocess.run(
        [program, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("build", SANITIZERS)
@pytest.mark.parametrize("kernel", MUTANTS)
def test_clean_kernel_is_not_reproached(program_of: ProgramOf, kernel: str, build: str) -> None:
    for seed in SEEDS:
        result = run(program_of(kernel, build), seed=seed)
        assert result.returncode == 0, f"seed {seed}:\n{result.stdout}"


@pytest.mark.parametrize(
    ("kernel", "mutant"),
    [(kernel, mutant) for kernel, mutants in MUTANTS.items() for mutant in mutants[1:]],
)
def test_mutant_is_found(program_of: ProgramOf, kernel: str, mutant: str) -> None:
    number = str(MUTANTS[kernel].index(mutant))
    for build in MUST_FIND[kernel][mutant]:
        seeds = SEEDS if build == "plain" else SEEDS[:1]
        results = [run(program_of(kernel, build), number, seed=seed) for seed in seeds]
        assert any(result.returncode != 0 for result in results), f"{build} did not find {mutant}"
        assert all(result.returncode != 2 for result in results), results[0].stdout


@pytest.mark.parametrize(
    ("kernel", "build", "mutant"),
    [
        ("gemm_mutants", "address", "kSharedOverrun"),
        ("gemm_mutants", "thread", "kNoSyncwarp"),
        ("wgmma_mutants", "address", "kDynamicTooSmall"),
        ("wgmma_mutants", "thread", "kReleasesBeforeWait"),
    ],
)
def test_report_names_the_line_of_the_kernel(
    program_of: ProgramOf, kernel: str, build: str, mutant: str
) -> None:
    report = run(program_of(kernel, build), str(MUTANTS[kernel].index(mutant))).stdout
    assert f"{kernel}.cu:" in report


@pytest.mark.slow
@pytest.mark.parametrize("build", ["address", "thread"])
def test_primitives_under_sanitizers(tmp_path: Path, build: str) -> None:
    # The layer's own: paged_attention_test.cpp links the project's kernels.
    sources = sorted(set(LAYER.glob("tests/*.cpp")) - set(LAYER.glob("tests/paged*.cpp")))
    program = compile_program(tmp_path, build, sources, ["-lgtest", "-lgtest_main"])
    result = run(program)
    assert result.returncode == 0, result.stdout
