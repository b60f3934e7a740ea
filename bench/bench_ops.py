"""Speed of the small CPU ops and of sampling, next to the copy bandwidth of this machine.

    python bench/bench_ops.py [--seconds 0.2] [--threads 2] [--isa avx2]

GB/s counts every byte that an op must read or write once. Sampling prints microseconds a row and
the bandwidth of reading the row's logits once, which is the least it can do. Times are the best of
many calls, so that other work on the machine disturbs them least.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from vllm_lite import ops
from vllm_lite.worker.step_plan import NEW_ROW


def best_seconds(run: Callable[[], object], budget: float) -> float:
    """Shortest time of a call within about `budget` seconds, after one call to warm up."""
    run()
    times: list[float] = []
    end = time.perf_counter() + budget
    while time.perf_counter() < end or len(times) < 3:
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def report(name: str, seconds: float, num_bytes: float, ceiling: float, extra: str = "") -> None:
    rate = num_bytes / seconds / 1e9
    print(f"{name:44} {rate:7.1f} GB/s {100 * rate / ceiling:5.0f} % of copy {extra}")


def bench_small_ops(budget: float, ceiling: float) -> None:
    for tokens, dtype in ((1, torch.bfloat16), (512, torch.bfloat16), (512, torch.float32)):
        width = torch.finfo(dtype).bits // 8
        hidden, intermediate, heads, kv_heads, head_size = 2048, 6144, 16, 8, 128
        label = f"{tokens} tokens {str(dtype).removeprefix('torch.')}"
        x, out = torch.randn(tokens, hidden).to(dtype), torch.empty(tokens, hidden, dtype=dtype)
        weight, residual = torch.ones(hidden, dtype=dtype), torch.zeros(tokens, hidden, dtype=dtype)
        seconds = best_seconds(partial(ops.rms_norm, out, x, weight, 1e-6), budget)
        report(f"rms_norm, {label}", seconds, 2 * x.numel() * width, ceiling)
        seconds = best_seconds(partial(ops.rms_norm, out, x, weight, 1e-6, residual), budget)
        report(f"rms_norm with residual, {label}", seconds, 4 * x.numel() * width, ceiling)

        qkv = torch.randn(tokens, heads + 2 * kv_heads, head_size).to(dtype)
        query, key = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
        table = torch.randn(4096, head_size)
        positions = torch.arange(tokens, dtype=torch.int32)
        seconds = best_seconds(partial(ops.rope, query, key, positions, table), budget)
        rotated = query.numel() + key.numel()
        report(f"rope, {label}", seconds, 2 * rotated * width, ceiling)

        gate_up = torch.randn(tokens, 2 * intermediate).to(dtype)
        activated = torch.empty(tokens, intermediate, dtype=dtype)
        seconds = best_seconds(partial(ops.silu_mul, activated, gate_up), budget)
        report(f"silu_mul, {label}", seconds, 3 * activated.numel() * width, ceiling)


def bench_dequantize(budget: float, ceiling: float) -> None:
    elements = 2048 * 4096
    for name, number, length, size in (
        ("Q4_0", 2, 32, 18),
        ("Q8_0", 8, 32, 34),
        ("Q4_K", 12, 256, 144),
        ("Q6_K", 14, 256, 210),
    ):
        blocks = torch.randint(0, 60, (elements // length * size,), dtype=torch.uint8)
        out = torch.empty(elements, dtype=torch.bfloat16)
        seconds = best_seconds(partial(ops.dequantize, out, blocks, number), budget)
        num_bytes = blocks.numel() + 2 * elements
        extra = f"{elements / seconds / 1e9:.2f} G elements/s"
        report(f"dequantize {name} to bfloat16", seconds, num_bytes, ceiling, extra)


SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "greedy, 5 logprobs": {"temperature": 0.0, "num_logprobs": 5},
    "repetition penalty, temperature 1": {"repetition_penalty": 1.2},
}
PLAIN = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "num_logprobs": -1}


def bench_sampling(budget: float, ceiling: float) -> None:
    num_rows = 64
    for vocab_size in (49152, 151936):
        logits = torch.randn(num_rows, vocab_size) * 3
        rows, positions = torch.arange(num_rows, dtype=torch.int32), torch.arange(num_rows).int()
        token_ids, ranks = torch.empty(num_rows).int(), torch.empty(num_rows).int()
        logprobs = torch.empty(num_rows)
        top_ids, top_logprobs = torch.empty(num_rows, 5).int(), torch.empty(num_rows, 5)
        counts = torch.zeros(num_rows, vocab_size, dtype=torch.int32)
        mask = torch.zeros(num_rows, vocab_size, dtype=torch.uint8)
        mask[:, ::100] = 1
        for name, params in SAMPLING.items():
            states = np.zeros(num_rows, dtype=NEW_ROW)
            for field, value in (PLAIN | params).items():
                states[field] = value
            states["seed"][:, 0] = np.arange(num_rows)
            words = torch.from_numpy(states.view(np.int32).reshape(num_rows, -1))
            penalized = "penalty" in name

            run = partial(
                ops.sample,
                logits, rows, positions, words[:, 1:].contiguous(), None,
                counts if penalized else None, mask if penalized else None,
                token_ids, logprobs, ranks, top_ids, top_logprobs,
            )  # fmt: skip
            seconds = best_seconds(run, budget)
            extra = f"{seconds / num_rows * 1e6:7.1f} us/row"
            label = f"sample {vocab_size}, {name}"
            report(label, seconds, logits.numel() * 4, ceiling, extra)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.2, help="time for each measurement")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--isa", choices=ops.cpu_isas(), default=ops.current_cpu_isa())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    ops.set_num_threads(arguments.threads)
    ops.set_cpu_isa(arguments.isa)

    source = torch.ones(64 << 20)
    target = torch.empty_like(source)
    seconds = best_seconds(partial(target.copy_, source), arguments.seconds)
    ceiling = 2 * source.numel() * 4 / seconds / 1e9
    print(f"{arguments.isa}, {arguments.threads} threads, copy of 256 MiB: {ceiling:.1f} GB/s")
    print("(a tensor that fits the caches can be faster than that)")
    bench_small_ops(arguments.seconds, ceiling)
    bench_dequantize(arguments.seconds, ceiling)
    bench_sampling(arguments.seconds, ceiling)


if __name__ == "__main__":
    main()
