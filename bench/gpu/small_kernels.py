"""The kernels that only move memory, as a share of the device's copy bandwidth. JSON lines.

python bench/gpu/small_kernels.py [--dry-run]
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from timing import Bench, start

from vllm_lite import ops

BLOCK_SIZE = 16


def measure(
    bench: Bench, name: str, num_bytes: int, out: torch.Tensor, run: Callable[[], object]
) -> None:
    """num_bytes: what must be read and written. out: what the kernel writes."""
    seconds = bench.kernel_seconds(run)
    if not out.float().isfinite().all():
        raise AssertionError(f"{name}: the result is not finite")
    bound = num_bytes / bench.ceilings.copy_bandwidth
    bench.report(
        "small kernels", name, seconds,
        gb_per_s=num_bytes / seconds / 1e9, bound_us=bound * 1e6, share=bound / seconds,
    )  # fmt: skip


def bench_layer(bench: Bench, tokens: int) -> None:
    hidden, intermediate = bench.pick((4096, 14336), (256, 512))
    heads, kv_heads, head_size = bench.pick((32, 8, 128), (4, 2, 64))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=bench.device).bfloat16()

    x, out, residual = normal(tokens, hidden), normal(tokens, hidden), normal(tokens, hidden)
    weight = normal(hidden)
    width = x.element_size()
    measure(bench, f"rms_norm, {tokens} tokens", 2 * x.numel() * width, out,
            partial(ops.rms_norm, out, x, weight, 1e-5))  # fmt: skip
    measure(bench, f"rms_norm with residual, {tokens} tokens", 4 * x.numel() * width, out,
            partial(ops.rms_norm, out, x, weight, 1e-5, residual))  # fmt: skip
    gate_up, activated = normal(tokens, 2 * intermediate), normal(tokens, intermediate)
    measure(bench, f"silu_mul, {tokens} tokens", 3 * activated.numel() * width, activated,
            partial(ops.silu_mul, activated, gate_up))  # fmt: skip
    qkv = normal(tokens, heads + 2 * kv_heads, head_size)
    query, key, value = qkv.split([heads, kv_heads, kv_heads], dim=1)
    positions = torch.arange(tokens, device=bench.device, dtype=torch.int32)
    angles = torch.rand(tokens, head_size // 2, device=bench.device) * 6
    table = torch.cat([angles.cos(), angles.sin()], 1)
    rotated = 2 * (query.numel() + key.numel()) * width + table.numel() * 4
    measure(bench, f"rope, {tokens} tokens", rotated, query,
            partial(ops.rope, query, key, positions, table))  # fmt: skip
    cache = normal(-(-tokens // BLOCK_SIZE), 2, kv_heads, BLOCK_SIZE, head_size)
    slots = torch.arange(tokens, device=bench.device, dtype=torch.int64)
    stored = (key.numel() + value.numel()) * width
    measure(bench, f"store_kv, {tokens} tokens", 2 * stored, cache,
            partial(ops.store_kv, key, value, cache, slots))  # fmt: skip
    measure(bench, f"rope_store_kv, {tokens} tokens", rotated + 2 * value.numel() * width, cache,
            partial(ops.rope_store_kv, query, key, value, positions, table, cache,
                    slots))  # fmt: skip
    embeddings = normal(bench.pick(128_256, 300), hidden)
    ids = torch.randint(0, len(embeddings), (tokens,), device=bench.device, dtype=torch.int32)
    measure(bench, f"embedding, {tokens} tokens", 2 * out.numel() * width, out,
            partial(ops.embedding, out, embeddings, ids))  # fmt: skip


def main() -> None:
    bench, _ = start(argparse.ArgumentParser(description=__doc__.splitlines()[0]))
    for tokens in bench.pick((1, 64, 256, 8192), (1, 17)):
        bench_layer(bench, tokens)
    layers, pairs = bench.pick((32, 256), (2, 4))
    arena = torch.randn(layers, 2 * pairs, 2, 8, BLOCK_SIZE, 128, device=bench.device).bfloat16()
    ids = torch.arange(2 * pairs, device=bench.device, dtype=torch.int32).view(pairs, 2)
    measure(bench, f"copy_blocks, {pairs} blocks x {layers} layers", arena.numel() * 2, arena,
            partial(ops.copy_blocks, arena, ids))  # fmt: skip


if __name__ == "__main__":
    main()
