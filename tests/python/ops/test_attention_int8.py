"""int8 KV caches, on the CPU: against what they hold, against what was to be held, and contract
"row" bit for bit. The helpers are those of the tests of other caches.
"""

import math
from typing import Any

import pytest
import torch

from ops.kv_layout import dequantised
from ops.op_table import FLOAT_DTYPES
from ops.test_attention import (
    MIXES,
    TOLERANCE,
    Options,
    Sequence,
    make_sequences,
    one_thread,  # noqa: F401 (a fixture for every test)
    options_for,
    part,
    reference,
    row_options,  # noqa: F401
    run,
    share,
)
from vllm_lite import ops

# Of the largest value: what the query's 16 bits cost.
QUERY_ROUNDING = 2**-15

dtypes = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)


def run_int8(sequences: list[Sequence], options: Options, block_size: int = 16, **more: Any) -> Any:
    return run(sequences, options, block_size, int8=True, **more)


def check(sequences: list[Sequence], options: Options, block_size: int = 16) -> None:
    """Against attention in float64 over the integers times their scales."""
    for sequence, result in zip(sequences, run_int8(sequences, options, block_size), strict=True):
        if len(sequence.query) == 0:
            continue
        held = Sequence(sequence.query, dequantised(sequence.key), dequantised(sequence.value))
        error = (result.double() - reference(held, options)).abs().max()
        tolerance = TOLERANCE[result.dtype] + QUERY_ROUNDING
        assert error <= tolerance * sequence.value.double().abs().max()


@dtypes
@pytest.mark.parametrize("head_size", [32, 64, 80, 96, 128, 256])
def test_head_sizes_and_dtypes(head_size: int, dtype: torch.dtype, isa: str) -> None:
    check(make_sequences(MIXES["mixed"], 2, 3, head_size, dtype), options_for(head_size))


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_groups_block_sizes_and_mixes(group: int, block_size: int, mix: str, isa: str) -> None:
    dtype = FLOAT_DTYPES[(group + block_size) % 3]
    check(make_sequences(MIXES[mix], 2, group, 64, dtype), options_for(64), block_size)


def test_window_soft_cap_and_alibi(isa: str) -> None:
    sequences = make_sequences(MIXES["mixed"], 2, 3, 64, torch.float32)
    slopes = torch.tensor([2.0**-i for i in range(1, 7)])
    check(sequences, options_for(64, sliding_window=30))
    check(sequences, options_for(64, soft_cap=1.5))
    check(sequences, options_for(64, alibi_slopes=slopes, soft_cap=5.0, sliding_window=30))


@pytest.mark.parametrize("head_size", [64, 128])
def test_rounding_to_int8_costs_one_percent(head_size: int, isa: str) -> None:
    """Norm over norm, of attention over random keys and values in float64."""
    sequences = make_sequences([(1, 1000), (40, 300)], 2, 3, head_size, torch.float32)
    for sequence, result in zip(
        sequences, run_int8(sequences, options_for(head_size)), strict=True
    ):
        expected = reference(sequence, options_for(head_size))
        error = float((result.double() - expected).norm() / expected.norm())
        assert 0.004 < error < 0.012


def test_scales_follow_each_token_and_head(isa: str) -> None:
    """A token or head that is a thousand times as large does not take the others' bits."""
    sequence = make_sequences([(3, 200)], 2, 3, 64, torch.float32)[0]
    sequence.value[:, 1] *= 1000
    sequence.value[::2] *= 1e-3
    sequence.key[:, 0] *= 1e-3
    sequence.key[5] = 0
    sequence.value[6] = 0
    result = run_int8([sequence], options_for(64))[0].double()
    expected = reference(sequence, options_for(64))
    for heads in (slice(0, 3), slice(3, 6)):
        error = (result[:, heads] - expected[:, heads]).norm() / expected[:, heads].norm()
        assert error < 0.02


# ---- contract "row"


@dtypes
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_give_the_bits_of_the_whole_prompt(
    chunk: int,
    dtype: torch.dtype,
    row_options: Options,  # noqa: F811
    isa: str,
) -> None:
    sequence = make_sequences([(330, 330)], 2, 3, 64, dtype)[0]
    whole = run_int8([sequence], row_options)[0]
    begins = range(0, 330, chunk * max(1, 21 // chunk))
    chunks = [part(sequence, begin, min(begin + chunk, 330)) for begin in begins]
    for begin, result in zip(begins, run_int8(chunks, row_options), strict=True):
        assert torch.equal(result, whole[begin : begin + chunk])
    last = run_int8(chunks[-1:], row_options, 32)[0]
    assert torch.equal(last, whole[begins[-1] : begins[-1] + chunk])


@pytest.mark.parametrize("threads", [1, 2])
def test_company_placement_and_threads_do_not_change_a_bit(
    threads: int,
    row_options: Options,  # noqa: F811
    isa: str,
) -> None:
    lengths = [(1, 1500), (1, 40), (90, 300), (1, 257), (2, 1023)] + [(1, 600)] * 20
    sequences = make_sequences(lengths, 2, 3, 64, torch.bfloat16)
    together = run_int8(sequences, row_options, seed=1)
    ops.set_num_threads(threads)
    placements = [(16, 2, math.nan), (64, 3, 1.0), (32, 4, math.inf)]
    for i in range(6):
        block_size, seed, unused = placements[(i + threads) % 3]
        alone = run_int8([sequences[i]], row_options, block_size, seed=seed, unused=unused)[0]
        assert torch.equal(alone, together[i])


@pytest.mark.parametrize("group", [1, 3, 8])
def test_a_shared_prefix_does_not_change_a_bit(group: int, isa: str) -> None:
    lengths = [(1, 1100), (1, 1025), (40, 1800), (1, 1601), (5, 1601), (1, 300)]
    sequences = make_sequences(lengths, 2, group, 64, torch.bfloat16)
    share(sequences, 0, 1024, [1, 2, 3, 4])
    share(sequences, 2, 1536, [3, 4])
    apart = run_int8(sequences, options_for(64))
    for a, b in zip(run_int8(sequences, options_for(64), share_blocks=True), apart, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_later_tokens_do_not_reach_a_row_even_by_nan(poison: float, isa: str) -> None:
    sequence = make_sequences([(100, 100)], 2, 3, 64, torch.float32)[0]
    clean = run_int8([sequence], options_for(64))[0]
    sequence.key[70:, :, 3] = poison
    sequence.value[70:, :, 60] = poison
    assert torch.equal(run_int8([sequence], options_for(64))[0][:70], clean[:70])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_what_is_not_finite_is_not_hidden(name: str, bad: float, isa: str) -> None:
    sequence = make_sequences([(100, 100)], 1, 1, 64, torch.float32)[0]
    getattr(sequence, name)[30, 0, 5] = bad
    result = run_int8([sequence], options_for(64))[0]
    assert result[:30].isfinite().all() and result[30].isnan().all()
    assert result[31:].isnan().all() if name != "query" else result[31:].isfinite().all()


# ---- refused


def test_a_row_without_room_for_its_scale_is_refused(isa: str) -> None:
    out, zero = torch.ones(1, 1, 64), torch.zeros(1, dtype=torch.int32)
    cache = torch.zeros(5, 2, 1, 16, 64, dtype=torch.int8)
    start = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="last dimension of an int8 cache is head_size \\+ 4"):
        ops.paged_attention(out, out, cache, zero.view(1, 1), zero, start, zero + 1, 1.0)


def test_int8_is_refused_on_cuda(cuda_back_end: str) -> None:
    out, zero = torch.ones(1, 1, 64, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int32)
    cache = torch.zeros(5, 2, 1, 16, 68, dtype=torch.int8)
    start = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="paged_attention: an int8 KV cache has no CUDA kernel"):
        ops.paged_attention(out, out, cache, zero.view(1, 1), zero, start, zero + 1, 1.0)
    with pytest.raises(RuntimeError, match="store_kv: an int8 KV cache has no CUDA kernel"):
        ops.store_kv(out, out, cache, zero.long())
