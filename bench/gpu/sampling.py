"""Sampling of 64 rows of 151,936 logits, beside the time to read them once. JSON lines.

python bench/gpu/sampling.py
"""

from functools import partial

import torch
from timing import kernel_seconds, measure_ceilings, report

from vllm_lite import ops

VOCAB_SIZE = 151_936
# temperature, top_p, min_p, repetition, presence, frequency penalty; top_k, logprobs, min tokens
CASES = {
    "greedy": ([0.0, 1.0, 0.0, 1.0, 0.0, 0.0], [0, -1, 0]),
    "temperature 1": ([1.0, 1.0, 0.0, 1.0, 0.0, 0.0], [0, -1, 0]),
    "top_k 50": ([1.0, 1.0, 0.0, 1.0, 0.0, 0.0], [50, -1, 0]),
    "top_p 0.9": ([1.0, 0.9, 0.0, 1.0, 0.0, 0.0], [0, -1, 0]),
    "top_k 50, top_p 0.9, min_p 0.05": ([1.0, 0.9, 0.05, 1.0, 0.0, 0.0], [50, -1, 0]),
    "greedy, 5 logprobs": ([0.0, 1.0, 0.0, 1.0, 0.0, 0.0], [0, 5, 0]),
    "penalties, temperature 1": ([1.0, 1.0, 0.0, 1.2, 0.1, 0.1], [0, -1, 0]),
}


def main() -> None:
    ceilings = measure_ceilings()
    for num_rows in (1, 64):
        logits = torch.randn(num_rows, VOCAB_SIZE, device="cuda") * 3
        rows = torch.arange(num_rows, dtype=torch.int32, device="cuda")
        counts = torch.zeros(num_rows, VOCAB_SIZE, dtype=torch.int32, device="cuda")
        mask = torch.zeros(num_rows, VOCAB_SIZE, dtype=torch.uint8, device="cuda")
        mask[:, ::100] = 1
        workspace = torch.empty(
            ops.sample_workspace_bytes(num_rows, VOCAB_SIZE), dtype=torch.uint8, device="cuda"
        )
        token_ids, ranks = torch.empty_like(rows), torch.empty_like(rows)
        logprobs = torch.empty(num_rows, device="cuda")
        top_ids = torch.empty(num_rows, 5, dtype=torch.int32, device="cuda")
        top_logprobs = torch.empty(num_rows, 5, device="cuda")
        for name, (floats, ints) in CASES.items():
            has_penalties, has_logprobs = "penalties" in name, "logprobs" in name
            run = partial(
                ops.sample,
                logits, rows, rows,
                torch.tensor([floats] * num_rows).T.contiguous().cuda(),
                torch.tensor([ints] * num_rows, dtype=torch.int32).T.contiguous().cuda(),
                torch.arange(num_rows, device="cuda"),
                counts if has_penalties else None, mask if has_penalties else None,
                None, None, None, None, None, None, None,
                token_ids,
                logprobs if has_logprobs else None, ranks if has_logprobs else None,
                top_ids if has_logprobs else None, top_logprobs if has_logprobs else None,
                workspace,
            )  # fmt: skip
            seconds = kernel_seconds(run)
            least = logits.numel() * 4 / ceilings.copy_bandwidth
            report(
                "sampling", f"{num_rows} x {VOCAB_SIZE}, {name}", seconds,
                bound_us=least * 1e6, share=least / seconds,
            )  # fmt: skip


if __name__ == "__main__":
    main()
