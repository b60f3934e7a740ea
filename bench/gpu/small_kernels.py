"""The kernels that only move memory, as a share of the device's copy bandwidth. JSON lines.

    python bench/gpu/small_kernels.py [--dry-run]

Blocks that are swapped with host memory: as a share of what one large copy to or from pinned memory
reaches.
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


def bench_experts(bench: Bench, tokens: int) -> None:
    """What expert layers need around their products, at the shape of Qwen3-30B-A3B."""
    hidden, experts, k = bench.pick((2048, 128, 8), (64, 8, 2))
    pairs = tokens * k
    device = bench.device
    logits = torch.randn(tokens, experts, device=device).bfloat16()
    weights = torch.full((tokens, k), torch.nan, device=device)
    ids = torch.empty(tokens, k, dtype=torch.int32, device=device)
    measure(bench, f"route_experts, {tokens} tokens", logits.numel() * 2 + pairs * 8, weights,
            partial(ops.route_experts, weights, ids, logits, True))  # fmt: skip
    order, rows = torch.zeros(2, pairs, dtype=torch.int32, device=device)
    begins = torch.zeros(experts + 1, dtype=torch.int32, device=device)
    measure(bench, f"permute_tokens, {tokens} tokens", pairs * 12 + begins.numel() * 4, begins,
            partial(ops.permute_tokens, ids, order, rows, begins))  # fmt: skip
    if not torch.equal(order.long()[rows.long()], torch.arange(pairs, device=device)):
        raise AssertionError("permute_tokens: rows is not the inverse of order")
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    gathered = torch.full((pairs, hidden), torch.nan, device=device).bfloat16()
    measure(bench, f"gather_rows, {tokens} tokens", (tokens + pairs) * hidden * 2 + pairs * 4,
            gathered, partial(ops.gather_rows, gathered, x, order, k))  # fmt: skip
    out = torch.full_like(x, torch.nan)
    measure(bench, f"combine_experts, {tokens} tokens", (tokens + pairs) * hidden * 2 + pairs * 8,
            out, partial(ops.combine_experts, out, gathered, rows.view(tokens, k),
                         weights))  # fmt: skip


def bench_swap(bench: Bench) -> None:
    """64 blocks of 32 layers between the device and pinned memory, one copy per layer and run."""
    layers, count, kv_heads, head_size = bench.pick((32, 64, 8, 128), (2, 4, 2, 16))
    shape = (layers, 4 * count, 2, kv_heads, BLOCK_SIZE, head_size)
    content = torch.randn(shape, device=bench.device).bfloat16()
    on_device = torch.empty_like(content)
    on_host = torch.empty(shape, dtype=torch.bfloat16, pin_memory=not bench.dry_run)
    num_bytes = on_device[:, :count].numel() * 2
    for name, source, target in (("out", on_device, on_host), ("in", on_host, on_device)):
        source.copy_(content)
        whole = partial(target.copy_, source, non_blocking=True)
        ceiling = source.numel() * 2 / bench.wall_seconds(whole)
        for kind, ids in (
            ("neighbours", torch.arange(count)),
            ("scattered", torch.randperm(4 * count)[:count]),
        ):
            pairs = ids.int()[:, None].repeat(1, 2)
            target.zero_()
            seconds = bench.wall_seconds(partial(ops.swap_blocks, source, target, pairs))
            if not target[:, ids].cpu().equal(source[:, ids].cpu()):
                raise AssertionError(f"swap_blocks {name}: the blocks differ")
            bound = num_bytes / ceiling
            bench.report(
                "swapped blocks", f"{name}, {count} {kind} x {layers} layers", seconds,
                gb_per_s=num_bytes / seconds / 1e9, pinned_copy_gb_per_s=ceiling / 1e9,
                bound_us=bound * 1e6, share=bound / seconds,
            )  # fmt: skip


def main() -> None:
    bench, _ = start(argparse.ArgumentParser(description=__doc__.splitlines()[0]))
    for tokens in bench.pick((1, 64, 256, 8192), (1, 17)):
        bench_layer(bench, tokens)
        bench_experts(bench, tokens)
    layers, pairs = bench.pick((32, 256), (2, 4))
    arena = torch.randn(layers, 2 * pairs, 2, 8, BLOCK_SIZE, 128, device=bench.device).bfloat16()
    ids = torch.arange(2 * pairs, device=bench.device, dtype=torch.int32).view(pairs, 2)
    measure(bench, f"copy_blocks, {pairs} blocks x {layers} layers", arena.numel() * 2, arena,
            partial(ops.copy_blocks, arena, ids))  # fmt: skip
    del arena
    bench_swap(bench)


if __name__ == "__main__":
    main()
