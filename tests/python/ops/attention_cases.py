"""Cases of paged_attention, store_kv and copy_blocks for the op table."""

import math
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from ops.back_ends import runs_cuda_kernels
from ops.kv_layout import as_int8, as_plain, dequantised
from ops.op_table import FLOAT_DTYPES, OpCase, Result, normal
from vllm_lite import ops

HEAD_SIZES = (64, 80, 96, 128, 256)
# (query tokens, tokens with KV): a whole prompt, a chunk in the middle, decodes.
MIX = ((19, 19), (7, 70), (1, 1), (1, 130))


@dataclass(frozen=True)
class Shape:
    num_kv_heads: int = 2
    group: int = 3
    head_size: int = 64
    block_size: int = 16
    sliding_window: int = 0
    soft_cap: float = 0.0
    alibi: bool = False
    int8: bool = False


def _arena(shape: Shape, num_blocks: int, dtype: torch.dtype) -> torch.Tensor:
    """NaN everywhere, as no slot that was not stored may be looked at."""
    size = (num_blocks, 2, shape.num_kv_heads, shape.block_size, shape.head_size)
    plain = torch.full(size, math.nan, dtype=dtype)
    return as_int8(plain) if shape.int8 else plain


def _attention(shape: Shape, generator: torch.Generator, dtype: torch.dtype) -> Result:
    on_cuda = runs_cuda_kernels()
    if on_cuda and dtype == torch.float32:
        pytest.skip("float32 has no CUDA kernel")
    if on_cuda and shape.int8:
        pytest.skip("int8 has no CUDA kernel")
    num_heads = shape.num_kv_heads * shape.group
    num_blocks = [-(-length // shape.block_size) for _, length in MIX]
    order = torch.randperm(sum(num_blocks), generator=generator).int()
    arena = _arena(shape, sum(num_blocks), dtype)
    tables = torch.zeros(len(MIX) + 1, max(num_blocks), dtype=torch.int32)
    rows = torch.arange(len(MIX), 0, -1, dtype=torch.int32)
    queries, expected = [], []
    largest = 0.0  # value
    slopes = torch.rand(num_heads, generator=generator) if shape.alibi else None
    scale = shape.head_size**-0.5
    for index, (num_query, length) in enumerate(MIX):
        key = normal(generator, dtype, length, shape.num_kv_heads, shape.head_size)
        value = normal(generator, dtype, length, shape.num_kv_heads, shape.head_size)
        query = normal(generator, dtype, num_query, num_heads, shape.head_size)
        blocks, order = order[: num_blocks[index]], order[num_blocks[index] :]
        tables[rows[index], : len(blocks)] = blocks
        token = torch.arange(length)
        slots = blocks[token // shape.block_size].long() * shape.block_size
        ops.store_kv(key, value, arena, slots + token % shape.block_size)
        largest = max(largest, value.abs().max().item())
        queries.append(query)
        if shape.int8:
            key, value = dequantised(key), dequantised(value)
        expected.append(_reference(shape, query, key, value, scale, slopes))
    query = torch.cat(queries)
    out = torch.empty_like(query)
    starts = [0]
    for num_query, _ in MIX:
        starts.append(starts[-1] + num_query)
    ops.paged_attention(
        out,
        query,
        arena,
        tables,
        rows,
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([length for _, length in MIX], dtype=torch.int32),
        scale,
        shape.sliding_window,
        shape.soft_cap,
        slopes,
    )
    # Tensor cores take the weights in 16 bits, and so do AVX-512-BF16's pairs: half a unit of their
    # last place. With int8 keys the query has 16 bits.
    is_pairs = dtype == torch.bfloat16 and ops.current_cpu_isa() in ("avx512_bf16", "amx")
    absolute = torch.finfo(dtype).eps / 2 * largest if on_cuda or is_pairs else 0.0
    if shape.int8:
        absolute = 2**-15 * largest
    return Result({"out": out}, {"out": torch.cat(expected)}, absolute=absolute)


def _reference(
    shape: Shape,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    slopes: torch.Tensor | None,
) -> torch.Tensor:
    query, key, value = query.double(), key.double(), value.double()
    out = torch.empty_like(query)
    for token in range(len(query)):
        position = len(key) - len(query) + token
        first = max(0, position + 1 - shape.sliding_window) if shape.sliding_window else 0
        seen = torch.arange(first, position + 1)
        for head in range(query.shape[1]):
            kv_head = head // shape.group
            scores = key[seen, kv_head] @ query[token, head] * scale
            if slopes is not None:
                scores = scores + slopes[head].double() * (seen - position)
            if shape.soft_cap:
                scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
            out[token, head] = scores.softmax(0) @ value[seen, kv_head]
    return out


def _store(shape: Shape, generator: torch.Generator, dtype: torch.dtype) -> Result:
    num_tokens, num_blocks = 37, 5
    # A view into a fused row of query, key and value; some tokens are not stored.
    fused = normal(generator, dtype, num_tokens, 3 * shape.num_kv_heads, shape.head_size)
    key, value = fused[:, shape.num_kv_heads :].chunk(2, dim=1)
    slots = torch.randperm(num_blocks * shape.block_size, generator=generator)[:num_tokens]
    slots[::5] = -1
    if shape.int8 and runs_cuda_kernels():
        pytest.skip("int8 has no CUDA kernel")
    expected = torch.zeros_like(_arena(replace(shape, int8=False), num_blocks, dtype))
    arena = as_int8(expected) if shape.int8 else expected.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, shape.block_size)
            expected[block, 0, :, offset], expected[block, 1, :, offset] = key[token], value[token]
    ops.store_kv(key, value, arena, slots)
    if shape.int8:
        return Result({"arena": arena}, {"arena": as_int8(expected)}, exact=True)
    return Result({"arena": as_plain(arena)}, {"arena": expected.double()}, exact=True)


def _copy(shape: Shape, generator: torch.Generator, dtype: torch.dtype) -> Result:
    size = (3, 6, 2, shape.num_kv_heads, shape.block_size, shape.head_size)
    arena = normal(generator, dtype, *size)
    expected = arena.clone()
    pairs = [(0, 3), (0, 4), (5, 1)]
    for source, destination in pairs:
        expected[:, destination] = expected[:, source]
    ops.copy_blocks(arena, torch.tensor(pairs, dtype=torch.int32))
    return Result({"arena": arena}, {"arena": expected.double()}, exact=True)


_ATTENTION_SHAPES = {
    **{f"head {size}": Shape(head_size=size) for size in HEAD_SIZES},
    "no groups": Shape(num_kv_heads=3, group=1),
    "group of 8, block 32": Shape(group=8, block_size=32),
    "window": Shape(sliding_window=11),
    "soft cap": Shape(soft_cap=2.0),
    "alibi": Shape(alibi=True),
    "window and soft cap": Shape(sliding_window=11, soft_cap=2.0),
    "window and alibi": Shape(sliding_window=11, alibi=True),
}
_MOVE_SHAPES = {f"head {size}": Shape(head_size=size) for size in HEAD_SIZES}


def _with_int8(shapes: dict[str, Shape]) -> dict[str, Shape]:
    return shapes | {f"int8 {name}": replace(shape, int8=True) for name, shape in shapes.items()}


CASES = [
    OpCase(op, name, dtype, partial(run, shape))
    for op, run, shapes in (
        ("paged_attention", _attention, _with_int8(_ATTENTION_SHAPES)),
        ("store_kv", _store, _with_int8(_MOVE_SHAPES)),
        ("copy_blocks", _copy, _MOVE_SHAPES),
    )
    for name, shape in shapes.items()
    for dtype in FLOAT_DTYPES
]
