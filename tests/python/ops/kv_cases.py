"""Cases of the ops that move KV: store_kv, rope_store_kv, copy_blocks, swap_blocks."""

from collections.abc import Callable

import pytest
import torch

from ops.back_ends import runs_cuda_kernels
from ops.kv_layout import as_plain, as_stored
from ops.op_table import (
    Result,
    make_cases,
    normal,
    rope_reference,
    rotary_table,
    shifted,
)
from vllm_lite import ops

BLOCK_SIZE, NUM_BLOCKS = 16, 12


def random_slots(generator: torch.Generator, tokens: int) -> torch.Tensor:
    """Distinct slots, every seventh token without one."""
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=generator)[:tokens]
    slots[::7] = -1
    return slots


def stored(
    cache: torch.Tensor, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    expected = cache.to(key.dtype)
    kept = slots >= 0
    block, offset = slots[kept] // BLOCK_SIZE, slots[kept] % BLOCK_SIZE
    expected[block, 0, :, offset] = key[kept]
    expected[block, 1, :, offset] = value[kept]
    return expected


def store_kv_case(
    tokens: int, heads: int, head_size: int, unaligned: bool = False
) -> Callable[..., Result]:
    """key and value are views into a fused row."""

    def run(generator: torch.Generator, dtype: torch.dtype) -> Result:
        if head_size % 2 and not runs_cuda_kernels():
            pytest.skip("the CPU stores keys in pairs of elements")
        fused = normal(generator, dtype, tokens, 3 * heads, head_size)
        if unaligned:
            fused = shifted(fused)
        key, value = fused[:, heads : 2 * heads], fused[:, 2 * heads :]
        cache = normal(generator, dtype, NUM_BLOCKS, 2, heads, BLOCK_SIZE, head_size)
        slots = random_slots(generator, tokens)
        expected = stored(cache, slots, key, value)
        cache = as_stored(cache)
        ops.store_kv(key, value, cache, slots)
        return Result({"cache": as_plain(cache)}, {"cache": expected}, exact=True)

    return run


STORE_KV = {
    "batch": store_kv_case(40, 3, 64),
    "one_token": store_kv_case(2, 8, 128),
    "head_of_80": store_kv_case(9, 2, 80),
    "odd_head": store_kv_case(9, 2, 21),
    "unaligned": store_kv_case(9, 2, 64, unaligned=True),
    "more_heads_than_threads": store_kv_case(3, 40, 128),
}


def rope_store_kv_case(
    tokens: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    rotary_size: int,
    unaligned: bool = False,
) -> Callable[..., Result]:
    def run(generator: torch.Generator, dtype: torch.dtype) -> Result:
        qkv = normal(generator, dtype, tokens, heads + 2 * kv_heads, head_size)
        if unaligned:
            qkv = shifted(qkv)
        query, key, value = qkv.split([heads, kv_heads, kv_heads], 1)
        cache = normal(generator, dtype, NUM_BLOCKS, 2, kv_heads, BLOCK_SIZE, head_size)
        slots = random_slots(generator, tokens)
        table = rotary_table(64, rotary_size)
        positions = torch.randint(0, 64, (tokens,), generator=generator, dtype=torch.int32)
        expected = {
            "query": rope_reference(query, table, positions),
            "cache": stored(cache, slots, rope_reference(key, table, positions), value.double()),
            "value": value.double(),
        }
        cache = as_stored(cache)
        ops.rope_store_kv(query, key, value, positions, table, cache, slots)
        return Result({"query": query, "cache": as_plain(cache), "value": value}, expected)

    return run


ROPE_STORE_KV = {
    "batch": rope_store_kv_case(40, 9, 3, 64, 64),
    "one_token": rope_store_kv_case(1, 4, 2, 128, 128),
    "partial_rotary": rope_store_kv_case(10, 4, 1, 80, 32),
    "odd_half": rope_store_kv_case(10, 2, 2, 80, 54),
    "unaligned": rope_store_kv_case(10, 4, 2, 64, 64, unaligned=True),
    "more_heads_than_threads": rope_store_kv_case(3, 64, 8, 128, 128),
}


def copy_blocks_case(
    pairs: list[tuple[int, int]], heads: int = 2, head_size: int = 64
) -> Callable[..., Result]:
    def run(generator: torch.Generator, dtype: torch.dtype) -> Result:
        arena = normal(generator, dtype, 3, NUM_BLOCKS, 2, heads, BLOCK_SIZE, head_size)
        expected = arena.clone()
        for source, destination in pairs:
            expected[:, destination] = expected[:, source].clone()
        ops.copy_blocks(arena, torch.tensor(pairs, dtype=torch.int32).view(-1, 2))
        return Result({"arena": arena}, {"arena": expected}, exact=True)

    return run


def copy_blocks_of_odd_bytes(generator: torch.Generator, dtype: torch.dtype) -> Result:
    arena = shifted(normal(generator, dtype, 2, 4, 2, 1, 1, 3))
    expected = arena.clone()
    expected[:, 3] = expected[:, 0]
    ops.copy_blocks(arena, torch.tensor([(0, 3)], dtype=torch.int32))
    return Result({"arena": arena}, {"arena": expected}, exact=True)


COPY_BLOCKS = {
    "one": copy_blocks_case([(3, 5)]),
    "none": copy_blocks_case([]),
    "many": copy_blocks_case([(0, 6), (1, 7), (2, 8), (0, 9), (4, 10), (5, 11)]),
    "chain": copy_blocks_case([(0, 3), (3, 7), (4, 4), (1, 8), (7, 9)]),
    "source_overwritten_later": copy_blocks_case([(0, 3), (1, 0), (2, 1), (5, 2), (9, 5), (0, 9)]),
    "odd_bytes": copy_blocks_of_odd_bytes,
}


def swap_blocks_case(pairs: list[tuple[int, int]]) -> Callable[..., Result]:
    def run(generator: torch.Generator, dtype: torch.dtype) -> Result:
        source = normal(generator, dtype, 3, NUM_BLOCKS, 2, 2, BLOCK_SIZE, 16)
        target = normal(generator, dtype, 3, 20, 2, 2, BLOCK_SIZE, 16)
        expected = {"source": source.clone(), "target": target.clone()}
        for before, after in pairs:
            expected["target"][:, after] = source[:, before]
        ops.swap_blocks(source, target, torch.tensor(pairs, dtype=torch.int32).view(-1, 2))
        return Result({"source": source, "target": target}, expected, exact=True)

    return run


SWAP_BLOCKS = {
    "none": swap_blocks_case([]),
    "scattered": swap_blocks_case([(0, 19), (11, 0), (5, 7)]),
    "runs": swap_blocks_case([(0, 4), (1, 5), (2, 6), (3, 8), (9, 12), (10, 13), (11, 14)]),
    "same_destination": swap_blocks_case([(0, 4), (1, 5), (2, 5)]),
    "descending": swap_blocks_case([(3, 3), (2, 2), (1, 1)]),
}

CASES = [
    *make_cases("store_kv", STORE_KV),
    *make_cases("rope_store_kv", ROPE_STORE_KV),
    *make_cases("copy_blocks", COPY_BLOCKS),
    *make_cases("swap_blocks", SWAP_BLOCKS),
]
