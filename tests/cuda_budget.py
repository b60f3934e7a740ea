"""Registers, spills and shared memory of every CUDA kernel, held by tests/cuda_budget.json.

    python tests/cuda_budget.py                    compile all for sm_90a and compare (nvcc, no GPU)
    python tests/cuda_budget.py sample rms_norm    only these sources
    python tests/cuda_budget.py --update           write what was found

All takes some ten minutes of a processor, most of it attention; CI takes a few sources.

A kernel may use no more registers, spilled bytes or static shared memory than its budget says. A
kernel that the budget does not name, or that is gone, is an error too; so is a kernel whose wgmmas
ptxas serialises. Another release of nvcc than
the budget's allocates registers in its own way: then the sources are only compiled.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUDGET = Path(__file__).with_suffix(".json")
ARCHITECTURE = "-gencode=arch=compute_90a,code=sm_90a"

Usage = dict[str, int]


def compile_kernels(source: Path) -> str:
    """What ptxas says of a file's kernels. Raises CalledProcessError if it does not compile."""
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            ["nvcc", "-std=c++20", "-O3", "--fmad=false", ARCHITECTURE, "-Xptxas=-v",
             "-I", ROOT / "csrc", "-c", source, "-o", Path(directory) / "kernels.o"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"{source.name} does not compile for sm_90a:\n{done.stderr}")
    if "Potential Performance Loss" in done.stderr:
        raise RuntimeError(f"{source.name}: ptxas serialises wgmmas:\n{done.stderr}")
    return done.stderr


def parse(text: str) -> dict[str, Usage]:
    """Kernel name -> usage, from the lines of ``ptxas -v``."""
    found: dict[str, Usage] = {}
    name = ""
    for line in text.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            name = match[1]
            found[name] = {"registers": 0, "spill_bytes": 0, "shared_bytes": 0}
        elif match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            found[name]["spill_bytes"] = int(match[1]) + int(match[2])
        elif match := re.search(r"Used (\d+) registers", line):
            found[name]["registers"] = int(match[1])
            if shared := re.search(r"(\d+) bytes smem", line):
                found[name]["shared_bytes"] = int(shared[1])
    return found


def nvcc_release() -> str:
    text = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"release (\d+\.\d+)", text)
    assert match, text
    return match[1]


def readable(names: list[str]) -> list[str]:
    """Demangled, without namespaces, return type and parameters."""
    plain = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout.splitlines()
    short = []
    for name in plain:
        name = name.replace("(anonymous namespace)::", "").replace("vllm_lite::", "")
        depth = 0
        for end, character in enumerate(name):
            depth += (character == "<") - (character == ">")
            if character == "(" and depth == 0 and not name[:end].endswith(("::", " ")):
                name = name[:end]
                break
        short.append(re.sub(r"\((\w|::)+\)", "", name).removeprefix("void "))
    return short


def measure(names: Sequence[str] = ()) -> dict[str, Usage]:
    """Of the sources with these stems; of all if there are none."""
    sources = sorted((ROOT / "csrc").rglob("*.cu"))
    if names:
        sources = [source for source in sources if source.stem in names]
    found: dict[str, Usage] = {}
    with ThreadPoolExecutor(2) as pool:
        for text in pool.map(compile_kernels, sources):
            usage = parse(text)
            found |= dict(zip(readable(list(usage)), usage.values(), strict=True))
    return dict(sorted(found.items()))


def complaints(found: dict[str, Usage], budget: dict[str, Usage], whole: bool) -> list[str]:
    """whole: all sources have been compiled."""
    said = [f"{name}: not in the budget" for name in found.keys() - budget.keys()]
    if whole:
        gone = budget.keys() - found.keys()
        said += [f"{name}: in the budget, but there is no such kernel" for name in gone]
    for name in found.keys() & budget.keys():
        for what, used in found[name].items():
            allowed = budget[name][what]
            if used > allowed:
                said.append(f"{name}: {used} {what}, the budget is {allowed}")
    return sorted(said)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help="stems of .cu files")
    parser.add_argument("--update", action="store_true", help="write the budget")
    arguments = parser.parse_args()
    if arguments.update and arguments.sources:
        parser.error("--update is of all sources")
    found = measure(arguments.sources)
    if arguments.update:
        budget = {"nvcc": nvcc_release(), "kernels": found}
        BUDGET.write_text(json.dumps(budget, indent=1) + "\n")
    budget = json.loads(BUDGET.read_text())
    if budget["nvcc"] != nvcc_release():
        print(f"{len(found)} kernels compiled; the budget is of nvcc {budget['nvcc']}")
        return 0
    said = complaints(found, budget["kernels"], whole=not arguments.sources)
    print(*said, sep="\n", end="\n" if said else "")
    spilling = sum(usage["spill_bytes"] > 0 for usage in found.values())
    most = max(usage["registers"] for usage in found.values())
    print(f"{len(found)} kernels, at most {most} registers, {spilling} spill")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
