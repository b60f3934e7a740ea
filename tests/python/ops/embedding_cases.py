"""Cases of embedding for the op table: rows of every dtype, tokens that a row sampled last."""

from functools import partial

import torch

from ops.op_table import FLOAT_DTYPES, OpCase, Result, normal
from vllm_lite import ops


def _embedding(
    size: int, table_dtype: torch.dtype, generator: torch.Generator, dtype: torch.dtype
) -> Result:
    """Half of the ids are of tokens that a row sampled last; out's rows are strided."""
    num_tokens, vocab_size, max_rows = 23, 101, 9
    table = normal(generator, table_dtype, vocab_size, size)
    ids = torch.randint(0, vocab_size, (num_tokens,), generator=generator, dtype=torch.int32)
    last_tokens = torch.randint(0, vocab_size, (max_rows,), generator=generator, dtype=torch.int32)
    rows = torch.randint(0, max_rows, (num_tokens,), generator=generator, dtype=torch.int32)
    from_rows = torch.arange(num_tokens) % 2 == 1
    ids[0], last_tokens[0], rows[1] = vocab_size - 1, 0, 0
    expected = table[torch.where(from_rows, last_tokens[rows.long()], ids).long()]
    wide = torch.full((num_tokens, size + 8), float("nan"), dtype=dtype)
    whole = wide.clone()
    whole[:, :size] = expected.to(dtype)
    ops.embedding(wide[:, :size], table, torch.where(from_rows, -1 - rows, ids), last_tokens)
    return Result(
        {"out": wide[:, :size], "beyond": wide[:, size:].isnan()},
        {"out": whole[:, :size], "beyond": whole[:, size:].isnan()},
        exact=True,
    )


def _without_last_tokens(generator: torch.Generator, dtype: torch.dtype) -> Result:
    table = normal(generator, dtype, 40, 64)
    ids = torch.tensor([39, 0, 7, 7], dtype=torch.int32)
    out = torch.empty(4, 64, dtype=dtype)
    ops.embedding(out, table, ids)
    return Result({"out": out}, {"out": table[ids.long()]}, exact=True)


CASES = [
    OpCase(
        "embedding",
        f"{size}_from_{str(table).removeprefix('torch.')}",
        out,
        partial(_embedding, size, table),
    )
    for size in (1, 77, 576, 2048)
    for table in FLOAT_DTYPES
    for out in FLOAT_DTYPES
] + [OpCase("embedding", "no_last_tokens", torch.bfloat16, _without_last_tokens)]
