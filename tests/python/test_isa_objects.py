"""Kernels that are compiled once per instruction set must not share a symbol.

Of two weak definitions the linker keeps either: an AVX-512 copy of a template or an inline function
could end up being what a processor without AVX-512 runs (see csrc/core/isa.h).
"""

import re
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "csrc").rglob("*_isa.cpp"))
COMPILER = shutil.which("g++") or shutil.which("clang++")

pytestmark = pytest.mark.skipif(
    COMPILER is None or shutil.which("nm") is None, reason="needs a C++ compiler and nm"
)


def isa_flags() -> dict[str, list[str]]:
    """The instruction sets and their compiler flags, as cmake/isa.cmake states them."""
    text = (ROOT / "cmake" / "isa.cmake").read_text()
    sets = re.findall(r"set\(VL_ISA_FLAGS_(\w+) ([^)]*)\)", text)
    return {isa: shlex.split(flags.replace('""', "")) for isa, flags in sets}


def symbols(source: Path, isa: str, flags: list[str], folder: Path) -> list[tuple[str, str]]:
    """(nm type, demangled name) of the source's object.

    Nothing is inlined that need not be, so this shows at least what the build's object has.
    """
    target = folder / f"{source.stem}.{isa}.o"
    command = [
        str(COMPILER), "-std=c++20", "-O0", "-fPIC", "-c", *flags,
        f"-DVL_ISA={isa}", f"-DVL_ISA_{isa}=1", "-I", str(ROOT / "csrc"),
        str(source), "-o", str(target),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, text=True)
    listing = subprocess.run(["nm", "-C", str(target)], check=True, capture_output=True, text=True)
    found = re.findall(r"^[0-9a-f ]{16} (\S) (.*)$", listing.stdout, re.M)
    return [(str(kind), str(name)) for kind, name in found]


def test_no_object_of_an_instruction_set_defines_a_shared_symbol(tmp_path: Path) -> None:
    flags = isa_flags()
    assert {"portable", "avx2", "avx512"} <= set(flags)
    assert SOURCES
    jobs = [(source, isa) for source in SOURCES for isa in flags if isa != "portable"]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda job: symbols(job[0], job[1], flags[job[1]], tmp_path), jobs))
    shared = []
    for (source, isa), found in zip(jobs, results, strict=True):
        for kind, name in found:
            # V, W, u: vague linkage. Other global definitions must be in the set's own namespace.
            # DW.ref is a pointer to the C++ runtime's exception handler, the same in every object.
            if name.startswith("DW.ref."):
                continue
            if kind in "VWuvw" or (kind in "TDBR" and f"vllm_lite::{isa}::" not in name):
                shared.append(f"{source.name} ({isa}): {kind} {name}")
    assert not shared, "\n".join(shared)


def test_the_check_sees_a_shared_symbol(tmp_path: Path) -> None:
    source = tmp_path / "bad_isa.cpp"
    source.write_text(
        "template <typename T> __attribute__((noinline)) T twice(T x) { return x + x; }\n"
        "float user(float x) { return twice(x); }\n"
    )
    found = symbols(source, "avx2", isa_flags()["avx2"], tmp_path)
    assert ("W", "float twice<float>(float)") in found
