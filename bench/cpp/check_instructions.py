"""Fails if a decode step (plan + build + commit, 256 sequences) takes too many instructions.

Wall time on a shared CI machine says little; the count of instructions that callgrind gives is the
same on every run with the same compiler. Build type Release (-O3).

    python bench/cpp/check_instructions.py build/dev

Exit status: 0 within the budget, 1 over it, 2 if it could not be measured.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
NUM_STEPS = 160  # ten blocks of 16 tokens for each sequence


def measure(program: Path) -> float:
    """Instructions per step. Raises RuntimeError with what valgrind printed if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind.out"
        command = [
            "valgrind",
            "--tool=callgrind",
            "--toggle-collect=measured_steps",
            f"--callgrind-out-file={out}",
            str(program),
            str(NUM_STEPS),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(done.stderr.strip())
        totals = re.search(r"^(?:summary|totals): (\d+)", out.read_text(), re.MULTILINE)
    count = int(totals.group(1)) if totals else 0
    if count == 0:
        raise RuntimeError("callgrind counted nothing in measured_steps(); was it inlined?")
    return count / NUM_STEPS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "build", type=Path, help="build folder with bench/cpp/scheduler_instructions"
    )
    build = parser.parse_args().build
    program = build / "bench" / "cpp" / "scheduler_instructions"
    if shutil.which("valgrind") is None:
        print("check_instructions: valgrind is not installed (Debian: apt-get install valgrind)")
        return 2
    if not program.exists():
        print(
            f"check_instructions: {program} is missing: configure with -DVLLM_LITE_BENCHMARKS=ON "
            "and build the target scheduler_instructions"
        )
        return 2
    budget = json.loads((HERE / "instruction_budget.json").read_text())["scheduler_decode_step_256"]
    try:
        count = measure(program)
    except RuntimeError as error:
        print(f"check_instructions: {error}")
        return 2
    verdict = "within" if count <= budget else "OVER"
    print(f"scheduler decode step, 256 sequences: {count:.0f} instructions, {verdict} {budget}")
    return 0 if count <= budget else 1


if __name__ == "__main__":
    sys.exit(main())
