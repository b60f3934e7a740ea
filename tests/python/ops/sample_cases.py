"""Cases of sample for the op table; test_sampling.py has the choices."""

from functools import partial

import torch

from ops.op_table import OpCase, Result
from vllm_lite import ops

NUM_TOP = 5


def _greedy(vocab_size: int, generator: torch.Generator, dtype: torch.dtype) -> Result:
    """The likeliest token, its logprob and rank, and the NUM_TOP likeliest, of several rows."""
    num_rows = 9
    logits = torch.randn(num_rows, vocab_size, generator=generator, dtype=dtype) * 4
    logits[3, ::7] = -torch.inf
    token_ids, ranks = torch.empty(2, num_rows, dtype=torch.int32)
    logprobs = torch.empty(num_rows)
    top_ids = torch.empty(num_rows, NUM_TOP, dtype=torch.int32)
    top_logprobs = torch.empty(num_rows, NUM_TOP)
    row_state = torch.zeros(num_rows, 16, dtype=torch.int32)  # csrc/core/row_state.h
    row_state.view(torch.float32)[:, [1, 4]] = 1.0  # top_p, repetition_penalty
    row_state[:, 7] = NUM_TOP
    order = torch.arange(num_rows, dtype=torch.int32)
    ops.sample(
        logits, order, order, row_state, None, None, None,
        token_ids, logprobs, ranks, top_ids, top_logprobs,
        torch.empty(ops.sample_workspace_bytes(num_rows, vocab_size), dtype=torch.uint8),
    )  # fmt: skip
    reference = logits.double().log_softmax(-1)
    best = reference.topk(NUM_TOP)
    return Result(
        {
            "token_ids": token_ids.float(),
            "logprobs": logprobs,
            "ranks": ranks.float(),
            "top_ids": top_ids.float(),
            "top_logprobs": top_logprobs,
        },
        {
            "token_ids": best.indices[:, 0].double(),
            "logprobs": best.values[:, 0],
            "ranks": torch.ones(num_rows, dtype=torch.float64),
            "top_ids": best.indices.double(),
            "top_logprobs": best.values,
        },
    )


CASES = [
    OpCase("sample", f"vocabulary {size}", torch.float32, partial(_greedy, size))
    for size in (100, 32_003, 49_152)
]
