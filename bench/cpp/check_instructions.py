"""Fails if a decode step of the scheduler, or a CPU kernel, takes too many instructions.

Wall time on a shared CI machine says little; the count of instructions that callgrind gives is the
same on every run with the same compiler. Build type Release (-O3). callgrind knows no AVX-512, so
the kernels are counted with AVX2.

    python bench/cpp/check_instructions.py build/dev
    python bench/cpp/check_instructions.py build/dev --update    writes the counts + 5 %

Exit status: 0 within the budget, 1 over it, 2 if it could not be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUDGET = HERE / "instruction_budget.json"
SCHEDULER_STEPS = 160  # ten blocks of 16 tokens for each sequence
KERNEL_STEPS = 2
SLACK = 1.05


def measure(command: list[str], steps: int) -> float:
    """Instructions per step. Raises RuntimeError with what valgrind printed if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind.out"
        done = subprocess.run(
            ["valgrind", "--tool=callgrind", "--toggle-collect=measured_steps",
             f"--callgrind-out-file={out}", *command, str(steps)],
            capture_output=True, text=True, check=False,
            env=os.environ | {"VLLM_LITE_CPU_ISA": "avx2"},
        )  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        totals = re.search(r"^(?:summary|totals): (\d+)", out.read_text(), re.MULTILINE)
    count = int(totals.group(1)) if totals else 0
    if count == 0:
        raise RuntimeError("callgrind counted nothing in measured_steps(); was it inlined?")
    return count / steps


def measure_all(build: Path, names: list[str]) -> dict[str, int]:
    """Case -> instructions of one step."""
    programs = build / "bench" / "cpp"

    def one(name: str) -> float:
        if name == "scheduler_decode_step_256":
            return measure([str(programs / "scheduler_instructions")], SCHEDULER_STEPS)
        return measure([str(programs / "kernel_instructions"), name], KERNEL_STEPS)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(names, map(round, pool.map(one, names)), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path, help="build folder with bench/cpp/*_instructions")
    parser.add_argument("--update", action="store_true", help="write the budget")
    arguments = parser.parse_args()
    if shutil.which("valgrind") is None:
        print("check_instructions: valgrind is not installed (Debian: apt-get install valgrind)")
        return 2
    for name in ("scheduler_instructions", "kernel_instructions"):
        if not (arguments.build / "bench" / "cpp" / name).exists():
            print(
                f"check_instructions: {name} is missing: configure with -DVLLM_LITE_BENCHMARKS=ON "
                "and build it"
            )
            return 2
    budget = json.loads(BUDGET.read_text())
    try:
        counts = measure_all(arguments.build, list(budget))
    except RuntimeError as error:
        print(f"check_instructions: {error}")
        return 2
    if arguments.update:
        budget = {name: round(count * SLACK) for name, count in counts.items()}
        BUDGET.write_text(json.dumps(budget, indent=1) + "\n")
    over = 0
    for name, count in counts.items():
        verdict = "within" if count <= budget[name] else "OVER"
        over += count > budget[name]
        print(f"{name}: {count} instructions, {verdict} {budget[name]}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
