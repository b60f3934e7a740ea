"""The tensor ops built with CUDA kernels: their budget, and what loads beside a CPU torch."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ops.on_host import load_on_host
from waiting import one_at_a_time

sys.path.insert(0, str(Path(__file__).parents[1]))
import cuda_budget

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
pytestmark = pytest.mark.timeout(3600)  # the build

# Makes vllm_lite import the extension module of the build instead of the installed one.
PREFER_BUILD = """
import sys
from importlib.util import spec_from_file_location
from pathlib import Path

class Build:
    @staticmethod
    def find_spec(name, path=None, target=None):
        package, _, module = name.rpartition(".")
        found = list(Path(sys.argv[1]).glob(module + ".*so")) if package == "vllm_lite" else []
        return spec_from_file_location(name, found[0]) if found else None

sys.meta_path.insert(0, Build)
"""


@pytest.fixture(scope="module")
def extension() -> Path:
    """The folder of the extension module."""
    with one_at_a_time(Path(cuda_budget.__file__)):
        cuda_budget.build()
    return cuda_budget.BUILD / "csrc/bindings"


def run(extension: Path, code: str, *arguments: str) -> str:
    """The output of a new interpreter, which sees no GPU."""
    done = subprocess.run(
        [sys.executable, "-c", PREFER_BUILD + code, extension, *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_nvcc
def test_kernels_keep_their_budget(extension: Path) -> None:
    found = cuda_budget.measure()
    assert sorted(found) == [f"sm_{name}" for name in cuda_budget.ARCHITECTURES]
    assert cuda_budget.compare(found) == []


@needs_nvcc
def test_the_extension_has_its_kernels_for_cuda_and_computes_on_the_cpu(extension: Path) -> None:
    """The CUDA back end has every op that the kernels on the host have."""
    said = run(extension, """
import torch
from vllm_lite import ops
assert sys.argv[1] in ops._library.origin
assert ops.has_cuda_kernels()
x = torch.randn(3, 64)
out = torch.empty_like(x)
ops.rms_norm(out, x, torch.ones(64), 0.0)
torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (64,)))
for name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
    if name.startswith("vllm_lite::"):
        print(name)
""")  # fmt: skip
    load_on_host()
    of_host = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
    expected = {
        name.replace("_cuda_on_host", "") for name in of_host if "_cuda_on_host::" in name
    } - {"vllm_lite::plan_attention"}  # the host's on every back end
    assert set(said.splitlines()) == expected
    assert "vllm_lite::paged_attention" in expected


@needs_nvcc
def test_without_a_gpu_one_sentence_says_what_is_missing(extension: Path, tiny_model: str) -> None:
    said = run(extension, """
from vllm_lite import LLM
try:
    LLM(sys.argv[2], device="cuda", dtype="bfloat16", max_model_len=64)
except ValueError as error:
    print(error)
""", tiny_model)  # fmt: skip
    assert said.startswith("torch finds no usable CUDA device (torch.cuda.is_available() is false)")
    assert said.count("\n") == 1 and "or use --device cpu" in said


def test_a_kernel_over_its_budget_is_named() -> None:
    text = (
        "ptxas info : Compiling entry function 'kernel' for 'sm_90a'\n"
        "    0 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info : Used 72 registers, used 1 barriers, 64 bytes smem\n"
    )
    found = cuda_budget.parse(text + text.replace("90a", "80").replace("72", "70"))
    usage: dict[str, Any] = {"spill_bytes": 12, "shared_bytes": 64}
    assert found == {
        "sm_90a": {"kernel": {"registers": 72} | usage},
        "sm_80": {"kernel": {"registers": 70} | usage},
    }
    budget = {name: {"kernel": {"registers": 71} | usage} for name in ("sm_80", "sm_90a")}
    assert cuda_budget.complaints(found, budget) == [
        "sm_90a kernel: 72 registers, the budget is 71"
    ]
    budget["sm_80"]["old"] = {}
    assert "sm_80 old: in the budget, but there is no such kernel" in cuda_budget.complaints(
        found, budget
    )
    assert len(cuda_budget.complaints(found, {"sm_90a": budget["sm_90a"]})) == 2
    with pytest.raises(RuntimeError, match="serialises wgmmas"):
        cuda_budget.parse("ptxas info : (C7510) Potential Performance Loss: wgmma ... serialized")
