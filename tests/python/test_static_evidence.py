"""bench/gpu/static_evidence.py: what it makes of a kernel that nvcc has compiled."""

import json
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench/gpu"))
import static_evidence
from static_evidence import ARCHITECTURE, KERNELS, ROOT, Kernel

SAID = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z12scale_kernelP6float4' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 28 registers, used 1 barriers, 512 bytes smem
"""
LISTING = """\
	.target	sm_90a
	.section	.text._Z12scale_kernelP6float4,"ax",@progbits
_Z12scale_kernelP6float4:
.text._Z12scale_kernelP6float4:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/               @P0 EXIT ;
.L_x_1:
        /*0020*/                   LDG.E.128 R4, desc[UR4][R8.64] ;
        /*0030*/                   FADD R4, R4, R4 ;
        /*0040*/                   STG.E.128 desc[UR4][R8.64], R4 ;
        /*0050*/              @!P1 BRA `(.L_x_1) ;
        /*0060*/                   STG.E desc[UR4][R8.64], R4 ;
        /*0070*/                   EXIT ;
$__internal_0_$__cuda_sm20_div_u64:
        /*0080*/                   MOV R12, R2 ;
        /*0090*/                   NOP ;
"""
SOURCE = """
__global__ void scale_kernel(float4* values) {
  float4 value = values[threadIdx.x];
  value.x *= 2;
  values[threadIdx.x] = value;
}
"""


def test_a_row_says_what_the_compiler_and_the_disassembler_say() -> None:
    (compiled,) = static_evidence.kernels(SAID, LISTING).values()
    kernel = Kernel("scale", "scale_kernel", threads=256, loads=2)
    assert static_evidence.row(kernel, compiled) == (
        "| `scale_kernel` | 28, 512 | 256, 8 | 64 | 8, 2, 1 | 2 (4 / 2) |"
    )


@pytest.mark.skipif(
    shutil.which("nvcc") is None or shutil.which("nvdisasm") is None,
    reason="needs nvcc and nvdisasm",
)
def test_a_source_is_compiled_and_disassembled(tmp_path: Path) -> None:
    source = tmp_path / "scale.cu"
    source.write_text(SOURCE)
    compiled = static_evidence.compile_source(source)
    assert list(compiled) == ["scale_kernel"]
    cells = static_evidence.row(Kernel("scale", "scale_kernel", 256, 1), compiled["scale_kernel"])
    assert cells.startswith("| `scale_kernel` | ")
    assert ", 2, 0 | " in cells  # 16 bytes loaded, 16 stored, no others


def test_the_kernels_of_the_table_are_those_of_the_product() -> None:
    budget = json.loads((ROOT / "tests/cuda_budget.json").read_text())[ARCHITECTURE]
    assert {kernel.name for kernel in KERNELS} <= budget.keys()
    for kernel in KERNELS:
        assert (ROOT / "csrc" / f"{kernel.source}.cu").exists()
