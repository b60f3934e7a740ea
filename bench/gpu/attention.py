"""Paged attention against the device's ceilings, and torch's scaled_dot_product_attention.

    python bench/gpu/attention.py [--quick]

Decode: GB/s of the KV that must be read, beside the measured copy bandwidth. Prefill: TFLOP/s
beside a measured bfloat16 product. torch's attention gets contiguous keys and values with the heads
already repeated as it wants them, so it does not pay for pages. JSON lines.
"""

import argparse
from functools import partial

import torch
from timing import Ceilings, kernel_seconds, measure_ceilings, report

from vllm_lite import ops

BLOCK_SIZE = 16
MOST_KV_BYTES = 32 << 30


class Case:
    """``num_seqs`` sequences of one length; the last ``num_query`` tokens of each are asked."""

    def __init__(
        self, num_seqs: int, num_query: int, length: int, heads: int, kv_heads: int, head_size: int
    ) -> None:
        self.num_seqs, self.num_query, self.length = num_seqs, num_query, length
        self.heads, self.kv_heads, self.head_size = heads, kv_heads, head_size
        num_tokens, blocks = num_seqs * num_query, -(-length // BLOCK_SIZE)
        like = {"device": "cuda", "dtype": torch.bfloat16}
        self.query = torch.randn(num_tokens, heads, head_size, **like)
        self.out = torch.empty_like(self.query)
        shape = (num_seqs * blocks, 2, kv_heads, BLOCK_SIZE, head_size)
        self.cache = torch.empty(shape, **like).normal_()
        order = torch.randperm(num_seqs * blocks, dtype=torch.int32)
        self.tables = order.view(num_seqs, blocks).cuda()
        self.rows = torch.arange(num_seqs, dtype=torch.int32).cuda()
        starts = torch.arange(0, num_tokens + 1, num_query, dtype=torch.int32)
        lengths = torch.full((num_seqs,), length, dtype=torch.int32)
        multiprocessors = torch.cuda.get_device_properties("cuda").multi_processor_count
        plan = torch.zeros(
            ops.attention_plan_size(num_tokens, num_seqs, heads, kv_heads, multiprocessors),
            dtype=torch.int32,
        )
        ops.plan_attention(starts, lengths, heads, kv_heads, 0, multiprocessors, plan)
        self.starts, self.lengths, self.plan = starts.cuda(), lengths.cuda(), plan.cuda()
        self.workspace = torch.empty(
            ops.attention_workspace_size(kv_heads, head_size), device="cuda"
        )

    def run(self) -> None:
        ops.paged_attention(
            self.out, self.query, self.cache, self.tables, self.rows, self.starts, self.lengths,
            self.head_size**-0.5, plan=self.plan, workspace=self.workspace,
        )  # fmt: skip

    @property
    def kv_bytes(self) -> int:
        return 2 * self.num_seqs * self.kv_heads * self.length * self.head_size * 2

    @property
    def flops(self) -> float:
        before = self.length - self.num_query
        pairs = self.num_query * before + self.num_query * (self.num_query + 1) / 2
        return 4.0 * self.num_seqs * self.heads * self.head_size * pairs

    def torch_seconds(self) -> float:
        shape = (self.num_seqs, self.heads, self.num_query, self.head_size)
        query = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        kv_shape = (self.num_seqs, self.kv_heads, self.length, self.head_size)
        key = torch.randn(kv_shape, device="cuda", dtype=torch.bfloat16)
        run = partial(
            torch.nn.functional.scaled_dot_product_attention, query, key, torch.randn_like(key),
            is_causal=self.num_query == self.length, enable_gqa=self.heads != self.kv_heads,
        )  # fmt: skip
        return kernel_seconds(run)


def bench_decode(ceilings: Ceilings, quick: bool) -> None:
    for group in (4, 1, 8):
        for batch in (1, 4, 16, 64, 256):
            for length in (512, 4096, 32768):
                kv_heads = 8
                if 4 * batch * kv_heads * length * 128 > MOST_KV_BYTES:
                    continue
                if quick and (group != 4 or length != 4096):
                    continue
                case = Case(batch, 1, length, kv_heads * group, kv_heads, 128)
                seconds = kernel_seconds(case.run)
                report(
                    "decode attention",
                    f"batch {batch}, context {length}, GQA {group}",
                    seconds,
                    gb_per_s=case.kv_bytes / seconds / 1e9,
                    bound_us=case.kv_bytes / ceilings.copy_bandwidth * 1e6,
                    share=case.kv_bytes / seconds / ceilings.copy_bandwidth,
                    torch_us=case.torch_seconds() * 1e6 if batch * length <= 1 << 20 else None,
                )


def bench_prefill(ceilings: Ceilings, quick: bool) -> None:
    for head_size in (128, 64):
        for num_seqs, length in ((1, 8192), (16, 1024), (1, 32768)):
            if quick and (head_size, length) != (128, 8192):
                continue
            case = Case(num_seqs, length, length, 32, 8, head_size)
            seconds = kernel_seconds(case.run)
            report(
                "prefill attention",
                f"{num_seqs} x {length}, head size {head_size}",
                seconds,
                tflops=case.flops / seconds / 1e12,
                bound_us=case.flops / ceilings.bf16_flops * 1e6,
                share=case.flops / seconds / ceilings.bf16_flops,
                torch_us=case.torch_seconds() * 1e6,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the cases of the targets alone")
    quick = parser.parse_args().quick
    ceilings = measure_ceilings()
    bench_decode(ceilings, quick)
    bench_prefill(ceilings, quick)


if __name__ == "__main__":
    main()
