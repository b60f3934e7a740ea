"""Sampling of 64 rows of 151,936 logits, beside the time to read them once. JSON lines.

    python bench/gpu/sampling.py [--dry-run]

torch_us: what eager torch takes for the same choice, where that is a few calls.
"""

import argparse
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from timing import Bench, start

from vllm_lite import ops
from vllm_lite.worker.step_plan import NEW_ROW

PLAIN = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "num_logprobs": -1}
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.1}
CASES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50, top_p 0.9, min_p 0.05": {"top_k": 50, "top_p": 0.9, "min_p": 0.05},
    "greedy, 5 logprobs": {"temperature": 0.0, "num_logprobs": 5},
    "penalties, temperature 1": PENALTIES,
}


def row_state(params: dict[str, float], num_rows: int) -> torch.Tensor:
    """int32 ``[num_rows, 16]`` for ``ops.sample``; the rows differ in their seeds."""
    rows = np.zeros(num_rows, dtype=NEW_ROW)
    for name, value in (PLAIN | params).items():
        rows[name] = value
    rows["seed"][:, 0] = np.arange(num_rows)
    return torch.from_numpy(rows.view(np.int32).reshape(num_rows, -1)[:, 1:]).contiguous()


def sample_by_noise(logits: torch.Tensor) -> torch.Tensor:
    """Draws from the softmax without a wait for the host, as torch.multinomial would."""
    return (logits.softmax(-1) / torch.empty_like(logits).exponential_()).argmax(-1)


def sample_top_p(logits: torch.Tensor, top_p: float = 0.9) -> torch.Tensor:
    ordered, ids = logits.sort(-1, descending=True)
    mass = ordered.softmax(-1).cumsum(-1)
    kept = ordered.masked_fill(mass - ordered.softmax(-1) > top_p, -torch.inf)
    return ids.gather(-1, sample_by_noise(kept).unsqueeze(-1))


THEIRS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "greedy": partial(torch.argmax, dim=-1),
    "temperature 1": sample_by_noise,
    "top_p 0.9": sample_top_p,
}


def bench_rows(bench: Bench, num_rows: int, vocab_size: int) -> None:
    device = bench.device
    logits = torch.randn(num_rows, vocab_size, device=device) * 3
    rows = torch.arange(num_rows, dtype=torch.int32, device=device)
    counts = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=device)
    mask = torch.zeros(num_rows, vocab_size, dtype=torch.uint8, device=device)
    mask[:, ::100] = 1
    workspace = torch.empty(
        ops.sample_workspace_bytes(num_rows, vocab_size), dtype=torch.uint8, device=device
    )
    token_ids, ranks = torch.full_like(rows, -1), torch.empty_like(rows)
    logprobs = torch.empty(num_rows, device=device)
    top_ids = torch.empty(num_rows, 5, dtype=torch.int32, device=device)
    top_logprobs = torch.empty(num_rows, 5, device=device)
    for name, params in CASES.items():
        has_penalties, has_logprobs = "penalties" in name, "logprobs" in name
        run = partial(
            ops.sample,
            logits, rows, rows, row_state(params, num_rows).to(device), None,
            counts if has_penalties else None, mask if has_penalties else None,
            token_ids,
            logprobs if has_logprobs else None, ranks if has_logprobs else None,
            top_ids if has_logprobs else None, top_logprobs if has_logprobs else None,
            workspace,
        )  # fmt: skip
        token_ids.fill_(-1)
        seconds = bench.kernel_seconds(run)
        if name.startswith("greedy") and not token_ids.equal(logits.argmax(-1).int()):
            raise AssertionError(f"{name}: sample differs from torch's argmax")
        if not token_ids.ge(0).all():
            raise AssertionError(f"{name}: sample failed for a row")
        least = logits.numel() * 4 / bench.ceilings.copy_bandwidth
        theirs = THEIRS.get(name)
        bench.report(
            "sampling", f"{num_rows} x {vocab_size}, {name}", seconds,
            bound_us=least * 1e6, share=least / seconds,
            torch_us=bench.kernel_seconds(partial(theirs, logits)) * 1e6 if theirs else None,
        )  # fmt: skip


def main() -> None:
    bench, _ = start(argparse.ArgumentParser(description=__doc__.splitlines()[0]))
    for num_rows in bench.pick((64, 1), (3, 1)):
        bench_rows(bench, num_rows, bench.pick(151_936, 1000))


if __name__ == "__main__":
    main()
