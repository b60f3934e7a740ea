"""Some CUDA kernels compile for sm_90a within their budget; see tests/cuda_budget.py."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "cuda_budget.py"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_kernels_keep_their_budget() -> None:
    sources = [
        "attention_head_64", "attention_head_80_fp8", "paged_attention", "sample", "embedding",
        "moe", "rms_norm", "rope", "silu_mul", "store_kv", "copy_blocks", "swap_blocks",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, SCRIPT, *sources], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_kernel_over_its_budget_is_named() -> None:
    sys.path.insert(0, str(SCRIPT.parent))
    from cuda_budget import complaints, parse

    found = parse(
        "ptxas info : Compiling entry function 'kernel' for 'sm_90a'\n"
        "    0 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info : Used 72 registers, used 1 barriers, 64 bytes smem\n"
    )
    assert found == {"kernel": {"registers": 72, "spill_bytes": 12, "shared_bytes": 64}}
    budget = {"kernel": {"registers": 71, "spill_bytes": 12, "shared_bytes": 64}, "old": {}}
    assert complaints(found, budget, whole=False) == ["kernel: 72 registers, the budget is 71"]
    assert len(complaints(found, budget, whole=True)) == 2
    assert complaints(found, {}, whole=False) == ["kernel: not in the budget"]
