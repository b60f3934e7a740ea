"""Moving KV: float8 caches, the fused op against its two parts, indices out of the cache."""

import pytest
import torch

from ops.kv_layout import as_int8
from ops.op_table import FLOAT_DTYPES, normal, rotary_table
from vllm_lite import ops

FLOAT8 = torch.float8_e4m3fn
BLOCK_SIZE = 16


def kv(dtype: torch.dtype, tokens: int, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    key, value = normal(generator, dtype, 2, tokens, 3, head_size)
    return key, value


def empty_cache(dtype: torch.dtype, head_size: int) -> torch.Tensor:
    plain = torch.full((5, 2, 3, BLOCK_SIZE, head_size), 7.0)
    return as_int8(plain) if dtype == torch.int8 else plain.to(dtype)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("head_size", [64, 21])
def test_a_float8_cache_holds_scaled_and_saturated_values(
    head_size: int, dtype: torch.dtype, cuda_back_end: str
) -> None:
    key, value = kv(dtype, 20, head_size)
    key[3, 1], value[4, 2] = 3000.0, -3000.0
    key[5, 0, 7] = float("nan")
    slots = torch.randperm(5 * BLOCK_SIZE)[:20]
    slots[2] = -1
    cache = empty_cache(FLOAT8, head_size)
    expected = cache.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        for half, (x, scale) in enumerate(((key, 0.5), (value, 0.03))):
            scaled = (x[token].float() / torch.tensor(scale)).clamp(-448, 448)
            expected[slot // BLOCK_SIZE, half, :, slot % BLOCK_SIZE] = scaled.to(FLOAT8)
    ops.store_kv(key, value, cache, slots, k_scale=0.5, v_scale=0.03)
    assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))


def test_a_float8_cache_is_refused_on_cpu() -> None:
    key, value = kv(torch.bfloat16, 2, 64)
    with pytest.raises(RuntimeError, match="store_kv: a float8 KV cache needs CUDA"):
        ops.store_kv(key, value, empty_cache(FLOAT8, 64), torch.tensor([0, 1]))


@pytest.mark.parametrize(
    ("block_size", "head_size", "dtype", "message"),
    [
        (24, 64, torch.float32, "multiple of 16 .*, not 24 and 64"),
        (16, 21, torch.float32, ".* head_size of 2, not 16 and 21"),
        (16, 72, torch.int8, ".* head_size of 16, not 16 and 72"),
    ],
)
def test_a_cache_without_the_cpu_layout_is_refused(
    block_size: int, head_size: int, dtype: torch.dtype, message: str, isa: str
) -> None:
    key, value = kv(torch.float32, 2, head_size)
    row = head_size + 4 * (dtype == torch.int8)
    cache = torch.zeros(2, 2, 3, block_size, row, dtype=dtype)
    with pytest.raises(RuntimeError, match=f"store_kv: on CPU block_size must be a {message}"):
        ops.store_kv(key, value, cache, torch.tensor([0, 1]))
    assert cache.eq(0).all()


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_an_int8_cache_holds_each_vector_times_its_scale(dtype: torch.dtype, isa: str) -> None:
    key, value = kv(dtype, 20, 64)
    key[0], value[1, 2] = 0.0, 0.0
    key[2, 0, 9], value[3, 1, 63] = float("nan"), float("-inf")
    key[4], value[4] = key[4] * 1e-38, value[4] * 1e-6
    # Halves between two integers go to the even one.
    key[5] = torch.arange(64) / 2 - 16
    key[5, :, 0] = 127.0
    slots = torch.randperm(5 * BLOCK_SIZE)[:20]
    slots[7] = -1
    plain = torch.full((5, 2, 3, BLOCK_SIZE, 64), 7.0)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            plain[slot // BLOCK_SIZE, 0, :, slot % BLOCK_SIZE] = key[token].float()
            plain[slot // BLOCK_SIZE, 1, :, slot % BLOCK_SIZE] = value[token].float()
    cache = empty_cache(torch.int8, 64)
    ops.store_kv(key, value, cache, slots)
    expected = as_int8(plain)
    # A NaN may have any bits: compare what stands in the last strip apart.
    actual_floats, floats = (c.contiguous().view(torch.float32) for c in (cache, expected))
    same = cache.view(torch.int32) == expected.view(torch.int32)
    assert (same | (actual_floats.isnan() & floats.isnan())).all()


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_scales_must_be_positive(scale: float, back_end: str) -> None:
    key, value = kv(torch.bfloat16, 2, 64)
    with pytest.raises(RuntimeError, match="k_scale and v_scale must be positive"):
        ops.store_kv(key, value, empty_cache(torch.bfloat16, 64), torch.tensor([0, 1]), 1.0, scale)


def check_fused(
    head_size: int, rotary_size: int, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    key, value = kv(dtype, 30, head_size)
    query = torch.cat([key + 1, value], 1)
    table, positions = rotary_table(64, rotary_size), torch.arange(30, dtype=torch.int32) * 2
    slots = torch.randperm(5 * BLOCK_SIZE)[:30]
    slots[4], slots[29] = -1, -(2**40)
    caches = [empty_cache(cache_dtype, head_size) for _ in range(2)]
    apart, fused = query.clone(), query.clone()
    rotated = key.clone()
    ops.rope(apart, rotated, positions, table)
    ops.store_kv(rotated, value, caches[0], slots, 0.25, 0.7)
    ops.rope_store_kv(fused, key, value, positions, table, caches[1], slots, 0.25, 0.7)
    assert torch.equal(apart, fused)
    assert torch.equal(caches[0].view(torch.uint8), caches[1].view(torch.uint8))


HEADS = pytest.mark.parametrize(("head_size", "rotary_size"), [(64, 64), (80, 32), (50, 18)])


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@HEADS
def test_fused_is_bit_equal_to_rope_and_store(
    head_size: int, rotary_size: int, dtype: torch.dtype, back_end: str
) -> None:
    check_fused(head_size, rotary_size, dtype, dtype)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@HEADS
def test_fused_is_bit_equal_to_rope_and_store_in_a_float8_cache(
    head_size: int, rotary_size: int, dtype: torch.dtype, cuda_back_end: str
) -> None:
    check_fused(head_size, rotary_size, dtype, FLOAT8)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize(("head_size", "rotary_size"), [(64, 64), (80, 32)])
def test_fused_is_bit_equal_to_rope_and_store_in_an_int8_cache(
    head_size: int, rotary_size: int, dtype: torch.dtype, isa: str
) -> None:
    check_fused(head_size, rotary_size, dtype, torch.int8)


def test_int8_blocks_move_with_their_scales(isa: str) -> None:
    arena = torch.randint(-128, 128, (3, 6, 2, 2, BLOCK_SIZE, 68), dtype=torch.int8)
    expected = arena.clone()
    expected[:, 4] = expected[:, 1]
    ops.copy_blocks(arena, torch.tensor([(1, 4)], dtype=torch.int32))
    assert torch.equal(arena, expected)
    other = torch.zeros(3, 2, 2, 2, BLOCK_SIZE, 68, dtype=torch.int8)
    ops.swap_blocks(arena, other, torch.tensor([(4, 1)], dtype=torch.int32))
    assert torch.equal(other[:, 1], arena[:, 1])


@pytest.mark.parametrize("slot", [40, 2**31, 2**32, 2**40, -(2**40)])
def test_cuda_stores_nothing_in_a_slot_that_the_cache_does_not_have(
    slot: int, cuda_back_end: str
) -> None:
    key, value = kv(torch.float32, 3, 64)
    # The cache is the middle of a larger tensor, so that a neighbour would be seen.
    arena = torch.zeros(15, 2, 3, 8, 64)
    cache = arena[5:10]
    slots = torch.tensor([0, slot, 39])
    ops.store_kv(key, value, cache, slots)
    assert torch.equal(cache[0, 0, :, 0], key[0]) and torch.equal(cache[4, 1, :, 7], value[2])
    assert arena.count_nonzero() == 2 * 2 * 3 * 64


@pytest.mark.parametrize("pair", [(-1, 2), (9, 2), (2, -1), (2, 9), (2**31 - 1, 1)], ids=str)
def test_cuda_leaves_out_a_pair_with_a_block_that_the_cache_does_not_have(
    pair: tuple[int, int], cuda_back_end: str
) -> None:
    whole = torch.randn(3, 9, 2, 1, 8, 64)
    arena = whole[1:2]
    expected = whole.clone()
    expected[1, 3] = expected[1, 0]
    expected[1, 5] = expected[1, 3]
    ops.copy_blocks(arena, torch.tensor([(0, 3), pair, (3, 5)], dtype=torch.int32))
    assert torch.equal(whole, expected)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ((-1, 0), "block -1 of from_arena, which has blocks 0 to 3"),
        ((4, 0), "block 4 of from_arena, which has blocks 0 to 3"),
        ((0, 6), "block 6 of to_arena, which has blocks 0 to 5"),
    ],
)
def test_swap_blocks_refuses_a_block_outside_an_arena_and_copies_nothing(
    pair: tuple[int, int], message: str, back_end: str
) -> None:
    source, target = torch.ones(2, 4, 2, 1, 8, 16), torch.zeros(2, 6, 2, 1, 8, 16)
    with pytest.raises(RuntimeError, match=message):
        ops.swap_blocks(source, target, torch.tensor([(0, 1), pair], dtype=torch.int32))
    assert target.eq(0).all()


def test_swap_blocks_refuses_arenas_that_differ_or_are_one(back_end: str) -> None:
    arena, pairs = torch.ones(2, 4, 2, 1, 8, 16), torch.tensor([(0, 1)], dtype=torch.int32)
    for other in (torch.ones(3, 4, 2, 1, 8, 16), arena.half(), arena[:, :, :1]):
        with pytest.raises(RuntimeError, match="alike but in num_blocks"):
            ops.swap_blocks(arena, other, pairs)
    with pytest.raises(RuntimeError, match="must be two arenas"):
        ops.swap_blocks(arena, arena, pairs)


@pytest.mark.cuda
def test_swap_blocks_to_pinned_host_memory_and_back() -> None:
    device = torch.randn(3, 9, 2, 2, 8, 64, device="cuda")
    host = torch.zeros(3, 20, 2, 2, 8, 64, pin_memory=True)
    pairs = torch.tensor([(0, 4), (1, 5), (8, 0)], dtype=torch.int32)
    ops.swap_blocks(device, host, pairs)
    back = torch.zeros_like(device)
    ops.swap_blocks(host, back, pairs.flip(1).contiguous())
    torch.cuda.synchronize()
    assert torch.equal(host[:, [4, 5, 0]], device[:, [0, 1, 8]].cpu())
    assert torch.equal(back[:, [0, 1, 8]], device[:, [0, 1, 8]])
    assert back[:, 2:8].eq(0).all()
