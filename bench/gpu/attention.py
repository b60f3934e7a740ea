"""Paged attention against the device's ceilings, torch's attention and FlashInfer. JSON lines.

    python bench/gpu/attention.py [--quick] [--dry-run]

Decode: GB/s of the KV that must be read, beside the measured copy bandwidth. Prefill: TFLOP/s
beside a measured bfloat16 product. Results are compared with torch's before anything is timed.
"""

import argparse
from itertools import product

import torch
from rivals import Attend, flashinfer_attention, torch_attention
from timing import Bench, Figure, start

from vllm_lite import ops

MOST_KV_BYTES = 40 << 30
# Results are rounded to bfloat16, and so are the weights of the values.
TOLERANCE = {torch.bfloat16: 0.01, torch.float8_e4m3fn: 0.01}


class Case:
    """``num_seqs`` sequences of one length; the last ``num_query`` tokens of each are asked."""

    block_size = 16

    def __init__(
        self,
        bench: Bench,
        num_seqs: int,
        num_query: int,
        length: int,
        heads: int,
        kv_heads: int,
        head_size: int,
        kv_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.num_seqs, self.num_query, self.length = num_seqs, num_query, length
        self.heads, self.kv_heads, self.head_size = heads, kv_heads, head_size
        num_tokens, blocks = num_seqs * num_query, -(-length // self.block_size)
        device = bench.device
        self.query = torch.randn(num_tokens, heads, head_size, device=device).bfloat16()
        self.out = torch.full_like(self.query, torch.nan)
        shape = (num_seqs * blocks, 2, kv_heads, self.block_size, head_size)
        self.cache = torch.empty(shape, device=device, dtype=torch.bfloat16).normal_().to(kv_dtype)
        order = torch.randperm(num_seqs * blocks, dtype=torch.int32)
        self.tables = order.view(num_seqs, blocks).to(device)
        self.rows = torch.arange(num_seqs, dtype=torch.int32, device=device)
        starts = torch.arange(0, num_tokens + 1, num_query, dtype=torch.int32)
        lengths = torch.full((num_seqs,), length, dtype=torch.int32)
        multiprocessors = bench.num_multiprocessors
        plan = torch.zeros(
            ops.attention_plan_size(num_tokens, num_seqs, heads, kv_heads, multiprocessors),
            dtype=torch.int32,
        )
        ops.plan_attention(starts, lengths, heads, kv_heads, 0, multiprocessors, plan)
        self.starts, self.lengths = starts.to(device), lengths.to(device)
        self.plan = plan.to(device)
        self.workspace = torch.empty(
            ops.attention_workspace_size(kv_heads, head_size), device=device
        )

    def run(self) -> None:
        ops.paged_attention(
            self.out, self.query, self.cache, self.tables, self.rows, self.starts, self.lengths,
            self.head_size**-0.5, plan=self.plan, workspace=self.workspace,
        )  # fmt: skip

    def contiguous_kv(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[num_seqs, kv_heads, length, head_size]``, bfloat16."""
        gathered = self.cache.view(torch.uint8)[self.tables.long()].view(self.cache.dtype)
        by_head = gathered.bfloat16().permute(2, 0, 3, 1, 4, 5)
        shape = (2, self.num_seqs, self.kv_heads, -1, self.head_size)
        key, value = by_head.reshape(shape)[:, :, :, : self.length].contiguous()
        return key, value

    @property
    def kv_bytes(self) -> int:
        elements = 2 * self.num_seqs * self.kv_heads * self.length * self.head_size
        return elements * self.cache.element_size()

    @property
    def flops(self) -> float:
        before = self.length - self.num_query
        pairs = self.num_query * before + self.num_query * (self.num_query + 1) / 2
        return 4.0 * self.num_seqs * self.heads * self.head_size * pairs


def measure(bench: Bench, stage: str, name: str, case: Case) -> None:
    """Memory is a decode's bound, products are a prefill's."""
    theirs = torch_attention(case)
    if not isinstance(theirs, str):
        check(case, theirs())
    seconds = bench.kernel_seconds(case.run)
    ceilings = bench.ceilings
    figures: dict[str, Figure] = {}
    if case.num_query == 1:
        bound = case.kv_bytes / ceilings.copy_bandwidth
        figures["gb_per_s"] = case.kv_bytes / seconds / 1e9
    else:
        bound = case.flops / ceilings.bf16_flops
        figures["tflops"] = case.flops / seconds / 1e12
    figures |= {"bound_us": bound * 1e6, "share": bound / seconds}
    figures["torch_us"] = rival_us(bench, theirs)
    del theirs
    figures["flashinfer_us"] = rival_us(bench, flashinfer_attention(case))
    bench.report(stage, name, seconds, **figures)


def check(case: Case, expected: torch.Tensor) -> None:
    case.run()
    error = (case.out.float() - expected.float()).norm() / expected.float().norm()
    if not error < TOLERANCE[case.cache.dtype]:
        raise AssertionError(f"paged_attention differs from torch's by {float(error):.3g}")


def rival_us(bench: Bench, attend: Attend | str) -> Figure:
    return attend if isinstance(attend, str) else bench.kernel_seconds(attend) * 1e6


def bench_decode(bench: Bench, quick: bool) -> None:
    kv_heads, head_size = bench.pick((8, 128), (2, 64))
    groups = bench.pick((4, 1, 8), (4, 1))
    batches = bench.pick((1, 4, 16, 64, 256), (1, 3))
    for group, batch, length in product(groups, batches, bench.pick((512, 4096, 32768), (300,))):
        if 4 * batch * kv_heads * length * head_size > MOST_KV_BYTES:
            continue
        if quick and (group, batch) != (4, 64) and length != 4096:
            continue
        case = Case(bench, batch, 1, length, kv_heads * group, kv_heads, head_size)
        measure(bench, "decode attention", f"batch {batch}, context {length}, GQA {group}", case)
    for batch, length in bench.pick(((1, 4096), (64, 4096), (64, 32768)), ((2, 300),)):
        case = Case(bench, batch, 1, length, 4 * kv_heads, kv_heads, head_size, torch.float8_e4m3fn)
        name = f"batch {batch}, context {length}, GQA 4"
        measure(bench, "decode attention, float8 KV", name, case)


def bench_prefill(bench: Bench, quick: bool) -> None:
    # (sequences, query tokens, tokens with KV)
    steps = bench.pick(
        ((1, 8192, 8192), (16, 1024, 1024), (1, 32768, 32768), (1, 2048, 32768)),
        ((2, 70, 70), (1, 40, 300)),
    )
    heads, kv_heads = bench.pick((32, 8), (4, 2))
    for head_size in bench.pick((128, 64), (64,)):
        for num_seqs, num_query, length in steps:
            if quick and (head_size, length) != (128, 8192):
                continue
            case = Case(bench, num_seqs, num_query, length, heads, kv_heads, head_size)
            name = f"{num_seqs} x {num_query} of {length}, head size {head_size}"
            measure(bench, "prefill attention", name, case)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a third of the cases")
    bench, arguments = start(parser)
    bench_decode(bench, arguments.quick)
    bench_prefill(bench, arguments.quick)


if __name__ == "__main__":
    main()
