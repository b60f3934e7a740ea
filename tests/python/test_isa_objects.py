"""Kernels that are compiled once per instruction set must not share a symbol.

Of two weak definitions the linker keeps either: an AVX-512 copy of a template or an inline function
could end up being what a processor without AVX-512 runs (see csrc/core/isa.h).
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "csrc").rglob("*_isa.cpp"))
COMPILER = shutil.which(os.environ.get("CXX", "g++"))

pytestmark = pytest.mark.skipif(
    COMPILER is None or shutil.which("nm") is None or platform.machine() != "x86_64",
    reason="needs a C++ compiler for x86-64 and nm",
)


def isa_flags() -> dict[str, list[str]]:
    """The instruction sets and their compiler flags, as cmake/isa.cmake states them."""
    text = (ROOT / "cmake" / "isa.cmake").read_text()
    sets = re.findall(r"set\(VL_ISA_FLAGS_(\w+) ([^)]*)\)", text)
    return {isa: shlex.split(flags.replace('""', "")) for isa, flags in sets}


def run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, f"{shlex.join(command)}\n{result.stderr}"
    return result.stdout


def sources_of(isa: str) -> list[Path]:
    """Those that the folders' CMakeLists.txt have compiled for it; cmake/isa.cmake has the rule."""
    found = []
    for path in sorted((ROOT / "csrc").rglob("CMakeLists.txt")):
        calls = re.findall(
            r"vl_add_isa_sources\(\w+\s+(?:ISAS ([\w\s]*?)\s+)?SOURCES ([^)]*)\)", path.read_text()
        )
        for isas, sources in calls:
            if isa in (isas.split() or ("portable", "avx2", "avx512")):
                found += [path.parent / source for source in sources.split()]
    return found


class Objects:
    """The symbols of sources compiled for one instruction set.

    Nothing is optimised, so that nothing is inlined that need not be: the symbols are at least
    those of the build's object. Most of the time goes into reading <immintrin.h>: it is compiled
    ahead, once.
    """

    def __init__(self, isa: str, folder: Path) -> None:
        self.isa = isa
        self._folder = folder / isa
        self._folder.mkdir()
        self._command = [
            str(COMPILER), "-std=c++20", "-O0", "-fPIC", *isa_flags()[isa],
            f"-DVL_ISA={isa}", f"-DVL_ISA_{isa}=1", "-I", str(ROOT / "csrc"),
        ]  # fmt: skip
        self._header = self._folder / "intrinsics.h"
        self._header.write_text("#include <immintrin.h>\n")
        run(*self._command, "-x", "c++-header", str(self._header), "-o", f"{self._header}.gch")

    def symbols(self, source: Path) -> list[tuple[str, str]]:
        """(nm type, demangled name) of what the source defines or needs."""
        target = self._folder / f"{source.stem}.o"
        run(*self._command, "-include", str(self._header), "-c", str(source), "-o", str(target))
        found = re.findall(r"^[0-9a-f ]{16} (\S) (.*)$", run("nm", "-C", str(target)), re.M)
        return [(str(kind), str(name)) for kind, name in found]

    def shared(self, source: Path) -> list[str]:
        found = self.symbols(source)
        own = f"vllm_lite::{self.isa}::"
        assert any(kind in "TDR" and own in name for kind, name in found), f"{source}: {found}"
        # V, W, u: vague linkage. Other global definitions must be in the set's own namespace.
        # DW.ref is a pointer to the C++ runtime's exception handler, the same in every object.
        return [
            f"{source.name} ({self.isa}): {kind} {name}"
            for kind, name in found
            if not name.startswith("DW.ref.")
            and (kind in "VWuvw" or (kind in "TDBR" and own not in name))
        ]


@pytest.mark.case("INS-01")
def test_no_object_of_an_instruction_set_defines_a_shared_symbol(tmp_path: Path) -> None:
    isas = isa_flags().keys() - {"portable"}
    assert isas >= {"avx2", "avx512", "avx512_bf16", "amx"}
    assert sorted(sources_of("avx512")) == SOURCES
    assert all(sources_of(isa) for isa in isas)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(lambda isa: Objects(isa, tmp_path), isas))
        jobs = [(one, source) for one in objects for source in sources_of(one.isa)]
        shared = list(pool.map(lambda job: job[0].shared(job[1]), jobs))
    assert not any(shared), "\n".join(line for lines in shared for line in lines)


def test_the_check_sees_a_shared_symbol(tmp_path: Path) -> None:
    source = tmp_path / "bad_isa.cpp"
    source.write_text(
        "template <typename T> __attribute__((noinline)) T twice(T x) { return x + x; }\n"
        "namespace vllm_lite::VL_ISA { float user(float x) { return twice(x); } }\n"
        "float unnamed(float x) { return x; }\n"
    )
    shared = Objects("avx2", tmp_path).shared(source)
    assert [line.partition(": ")[2] for line in sorted(shared)] == [
        "T unnamed(float)",
        "W float twice<float>(float)",
    ]
