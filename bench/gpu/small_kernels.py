"""The kernels that only move memory, as a share of the device's copy bandwidth. JSON lines.

python bench/gpu/small_kernels.py
"""

from collections.abc import Callable
from functools import partial

import torch
from timing import Ceilings, kernel_seconds, measure_ceilings, report

from vllm_lite import ops

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_SIZE = 4096, 14336, 32, 8, 128
BLOCK_SIZE = 16


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def measure(
    name: str, tokens: int, num_bytes: int, ceilings: Ceilings, run: Callable[[], object]
) -> None:
    seconds = kernel_seconds(run)
    report(
        "small kernels",
        f"{name}, {tokens} tokens",
        seconds,
        gb_per_s=num_bytes / seconds / 1e9,
        bound_us=num_bytes / ceilings.copy_bandwidth * 1e6,
        share=num_bytes / seconds / ceilings.copy_bandwidth,
    )


def main() -> None:
    ceilings = measure_ceilings()
    report(
        "ceilings", "copy and bf16 product", 0.0,
        copy_gb_per_s=ceilings.copy_bandwidth / 1e9, bf16_tflops=ceilings.bf16_flops / 1e12,
    )  # fmt: skip
    table = torch.randn(32768, HEAD_SIZE, device="cuda")
    for tokens in (1, 64, 256, 8192):
        x, out, residual = normal(tokens, HIDDEN), normal(tokens, HIDDEN), normal(tokens, HIDDEN)
        weight = normal(HIDDEN)
        width = x.element_size()
        measure("rms_norm", tokens, 2 * x.numel() * width, ceilings,
                partial(ops.rms_norm, out, x, weight, 1e-5))  # fmt: skip
        measure("rms_norm with residual", tokens, 4 * x.numel() * width, ceilings,
                partial(ops.rms_norm, out, x, weight, 1e-5, residual))  # fmt: skip
        gate_up, activated = normal(tokens, 2 * INTERMEDIATE), normal(tokens, INTERMEDIATE)
        measure("silu_mul", tokens, 3 * activated.numel() * width, ceilings,
                partial(ops.silu_mul, activated, gate_up))  # fmt: skip
        qkv = normal(tokens, HEADS + 2 * KV_HEADS, HEAD_SIZE)
        query, key, value = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        positions = torch.arange(tokens, device="cuda", dtype=torch.int32)
        measure("rope", tokens, 2 * (query.numel() + key.numel()) * width, ceilings,
                partial(ops.rope, query, key, positions, table))  # fmt: skip
        blocks = -(-tokens // BLOCK_SIZE)
        cache = normal(blocks, 2, KV_HEADS, BLOCK_SIZE, HEAD_SIZE)
        slots = torch.arange(tokens, device="cuda", dtype=torch.int64)
        measure("store_kv", tokens, 2 * (key.numel() + value.numel()) * width, ceilings,
                partial(ops.store_kv, key, value, cache, slots))  # fmt: skip
    arena = normal(32, 512, 2, KV_HEADS, BLOCK_SIZE, HEAD_SIZE)
    pairs = torch.arange(512, device="cuda", dtype=torch.int32).view(256, 2)
    measure("copy_blocks, 256 blocks x 32 layers", 0, arena.numel() * 2, ceilings,
            partial(ops.copy_blocks, arena, pairs))  # fmt: skip


if __name__ == "__main__":
    main()
