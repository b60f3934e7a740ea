"""Builds the tensor ops with their CUDA kernels, and holds what nvcc says of every kernel.

    python tests/cuda_budget.py             build in build/cuda, compare (nvcc, no GPU)
    python tests/cuda_budget.py --update    write what was found into tests/cuda_budget.json

The build is the product's own, for the oldest architecture that is supported and for Hopper.

A kernel may use no more registers, spilled bytes or static shared memory than its budget says. A
kernel that the budget does not name, or that is gone, is an error too; so is a kernel whose wgmmas
ptxas serialises. Another release of nvcc than the budget's allocates registers in its own way: then
the kernels are only built.
"""

import argparse
import fcntl
import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build/cuda"
BUDGET = Path(__file__).with_suffix(".json")
ARCHITECTURES = ("80", "90a")

Usage = dict[str, int]
Budget = dict[str, dict[str, Usage]]  # architecture, kernel


def compile_source(command: list[str]) -> int:
    """A compiler's exit code; what it says is kept, as a later build does not make the object."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    Path(command[command.index("-o") + 1] + ".log").write_text(done.stdout)
    if done.returncode != 0:
        print(done.stdout)
    return done.returncode


def build() -> None:
    """Builds what has changed; a second process waits. Raises RuntimeError with the output if that
    fails.
    """
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    launcher = (sys.executable, str(Path(__file__)), "--compile")
    configure: list[str | Path] = [
        "cmake", "-S", ROOT, "-B", BUILD, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}",
        "-DVLLM_LITE_CUDA=ON", f"-DCMAKE_CUDA_COMPILER_LAUNCHER={';'.join(launcher)}",
        f"-DCMAKE_CUDA_ARCHITECTURES={';'.join(f'{arch}-real' for arch in ARCHITECTURES)}",
        "-DCMAKE_CUDA_FLAGS=-Xptxas=-v", "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON",
    ]  # fmt: skip
    make: list[str | Path] = ["cmake", "--build", BUILD, "--target", "_ops"]
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (configure, make):
            done = subprocess.run(
                command, env={**os.environ, "PATH": path}, capture_output=True, text=True,
                check=False,
            )  # fmt: skip
            if done.returncode != 0:
                raise RuntimeError(f"{command} failed:\n{done.stdout}{done.stderr}")


def logs() -> list[str]:
    """What nvcc has said of each kernel source."""
    commands = json.loads((BUILD / "compile_commands.json").read_text())
    return [
        (BUILD / f"{command['output']}.log").read_text()
        for command in commands
        if command["file"].endswith(".cu")
    ]


def parse(text: str) -> Budget:
    """The kernels, by their mangled names, of the lines of ``ptxas -v``."""
    found: Budget = {}
    usage: Usage = {}
    for line in text.splitlines():
        if "Potential Performance Loss" in line:
            raise RuntimeError(f"ptxas serialises wgmmas:\n{line}")
        if match := re.search(r"Compiling entry function '(\w+)' for '(\w+)'", line):
            name, architecture = match.groups()
            usage = {"registers": 0, "spill_bytes": 0, "shared_bytes": 0}
            found.setdefault(architecture, {})[name] = usage
        elif match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            usage["spill_bytes"] = int(match[1]) + int(match[2])
        elif match := re.search(r"Used (\d+) registers", line):
            usage["registers"] = int(match[1])
            if shared := re.search(r"(\d+) bytes smem", line):
                usage["shared_bytes"] = int(shared[1])
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


def measure() -> Budget:
    """Of all kernels in the build."""
    found: Budget = {}
    for text in logs():
        for architecture, kernels in parse(text).items():
            names = readable(list(kernels))
            found.setdefault(architecture, {}).update(zip(names, kernels.values(), strict=True))
    return {name: dict(sorted(kernels.items())) for name, kernels in sorted(found.items())}


def complaints(found: Budget, budget: Budget) -> list[str]:
    said = []
    for architecture in found.keys() | budget.keys():
        kernels, allowed = found.get(architecture, {}), budget.get(architecture, {})
        for name in kernels.keys() | allowed.keys():
            where = f"{architecture} {name}"
            if name not in allowed:
                said.append(f"{where}: not in the budget")
            elif name not in kernels:
                said.append(f"{where}: in the budget, but there is no such kernel")
            else:
                said += [
                    f"{where}: {used} {what}, the budget is {allowed[name][what]}"
                    for what, used in kernels[name].items()
                    if used > allowed[name][what]
                ]
    return sorted(said)


def compare(found: Budget) -> list[str]:
    """What is not as the budget says; nothing if that is of another release of nvcc."""
    budget = json.loads(BUDGET.read_text())
    return complaints(found, budget) if budget.pop("nvcc") == nvcc_release() else []


def write(found: Budget) -> None:
    """A line for a kernel."""
    parts = [f'"nvcc": {json.dumps(nvcc_release())}']
    for architecture, kernels in found.items():
        lines = [f"  {json.dumps(name)}: {json.dumps(usage)}" for name, usage in kernels.items()]
        parts.append(f'"{architecture}": {{\n' + ",\n".join(lines) + "\n }")
    BUDGET.write_text("{\n " + ",\n ".join(parts) + "\n}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help="write the budget")
    parser.add_argument("--compile", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compile:
        return compile_source(arguments.compile)
    build()
    found = measure()
    if arguments.update:
        write(found)
    said = compare(found)
    print(*said, sep="\n", end="\n" if said else "")
    for architecture, kernels in found.items():
        spilling = sum(usage["spill_bytes"] > 0 for usage in kernels.values())
        most = max(usage["registers"] for usage in kernels.values())
        print(f"{architecture}: {len(kernels)} kernels, at most {most} registers, {spilling} spill")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
