"""Paged attention on the CPU against this machine's ceilings.

Decode reads every KV byte once, so its bound is read bandwidth; prefill is bound by multiply-adds.
Both ceilings are measured here, with torch: a sum over a large tensor, a float32 matrix product.
The KV of a prefix that sequences share is read once for up to 72 rows (attention_work.h); its rate
is given in the bytes that they would read each on its own.

    python bench/bench_attention.py [--isa avx2] [--threads 1] [--heads 32 --kv-heads 8 ...]
                                    [--kv-cache-dtype int8]
"""

import argparse
import time
from collections.abc import Callable

import torch

from vllm_lite import ops
from vllm_lite.config import kv_row_size

BLOCK_SIZE = 16
# (sequences, tokens, tokens of a common prefix)
DECODES = [(1, 512, 0), (1, 4096, 0), (16, 512, 0), (16, 4096, 0), (64, 1072, 0), (64, 1072, 1024)]


def best_seconds(call: Callable[[], object], budget: float = 0.5) -> float:
    """The fastest of the calls that fit into about ``budget`` seconds (at least three)."""
    call()
    best, spent, count = float("inf"), 0.0, 0
    while spent < budget or count < 3:
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
        best, spent, count = min(best, seconds), spent + seconds, count + 1
    return best


def read_ceiling() -> float:
    """Bytes per second of reading 256 MiB, larger than what the caches keep of it."""
    data = torch.ones(2**25, dtype=torch.float64)
    return data.numel() * 8 / best_seconds(lambda: data.sum())


def multiply_ceiling() -> float:
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return 2 * 1024**3 / best_seconds(lambda: a @ b)


class Case:
    """``batch`` sequences of ``context`` tokens in shuffled blocks, the last ``num_query`` asked.

    They have the blocks of the first ``shared`` tokens in common. Each call reads another layer's
    cache, as a model does: a small case must not stay in L2.
    """

    def __init__(
        self, args: argparse.Namespace, batch: int, context: int, num_query: int, shared: int = 0
    ) -> None:
        dtype = getattr(torch, args.dtype)
        kv_name = args.dtype if args.kv_cache_dtype == "auto" else args.kv_cache_dtype
        kv_dtype = getattr(torch, kv_name)
        row_size = kv_row_size(args.head_size, kv_name)
        blocks_each = -(-context // BLOCK_SIZE)
        num_slots = batch * blocks_each * BLOCK_SIZE
        shape = (batch * blocks_each, 2, args.kv_heads, BLOCK_SIZE, row_size)
        layer_bytes = torch.Size(shape).numel() * kv_dtype.itemsize
        num_layers = max(1, min(64, 2**29 // layer_bytes))
        self.layers = list(torch.empty(num_layers, *shape, dtype=kv_dtype))
        key, value = torch.randn(2, num_slots, args.kv_heads, args.head_size).to(dtype)
        for layer in self.layers:
            ops.store_kv(key, value, layer, torch.arange(num_slots))
        order = torch.randperm(batch * blocks_each).int()
        self.block_tables = order.reshape(batch, blocks_each).contiguous()
        self.block_tables[:, : shared // BLOCK_SIZE] = self.block_tables[0, : shared // BLOCK_SIZE]
        self.query = torch.randn(batch * num_query, args.heads, args.head_size).to(dtype)
        self.out = torch.empty_like(self.query)
        self.rows = torch.arange(batch, dtype=torch.int32)
        self.query_start = (torch.arange(batch + 1) * num_query).int()
        self.seq_lens = torch.full((batch,), context, dtype=torch.int32)
        self.scale = args.head_size**-0.5
        self.kv_bytes = 2 * batch * context * args.kv_heads * row_size * kv_dtype.itemsize
        seen = num_query * (context - num_query) + num_query * (num_query + 1) // 2
        self.flops = 4 * batch * seen * args.heads * args.head_size
        self.next_layer = 0

    def __call__(self) -> None:
        self.next_layer = (self.next_layer + 1) % len(self.layers)
        ops.paged_attention(
            self.out, self.query, self.layers[self.next_layer], self.block_tables, self.rows,
            self.query_start, self.seq_lens, self.scale,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa", choices=ops.cpu_isas(), default=ops.current_cpu_isa())
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "int8"], default="auto")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ops.set_num_threads(args.threads)
    ops.set_cpu_isa(args.isa)
    read, multiply = read_ceiling(), multiply_ceiling()
    print(
        f"{args}\n"
        f"ceilings: read {read / 1e9:.1f} GB/s, float32 product {multiply / 1e9:.0f} GFLOP/s"
    )
    for batch, context, shared in DECODES:
        case = Case(args, batch, context, 1, shared)
        seconds = best_seconds(case)
        rate = case.kv_bytes / seconds
        print(
            f"decode  batch {batch:3} context {context:5} shared {shared:4}: "
            f"{seconds * 1e6:9.1f} us, "
            f"{rate / 1e9:6.2f} GB/s of KV = {rate / read:4.0%} of the read ceiling"
        )
    for batch, context, num_query in [(1, 512, 512), (1, 4096, 256), (16, 128, 128)]:
        case = Case(args, batch, context, num_query)
        seconds = best_seconds(case)
        rate = case.flops / seconds
        print(
            f"prefill batch {batch:3} context {context:5} query {num_query:4}: "
            f"{seconds * 1e6:9.1f} us, "
            f"{rate / 1e9:6.1f} GFLOP/s = {rate / multiply:4.0%} of the product ceiling"
        )


if __name__ == "__main__":
    main()
