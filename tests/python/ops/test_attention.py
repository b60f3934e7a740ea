"""Paged attention, store_kv and copy_blocks against references; contract "row" bit for bit."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ops.back_ends import CUDA_BACK_ENDS, make_plan
from ops.kv_layout import as_int8, as_plain, as_stored
from vllm_lite import ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of the largest value in the row's KV. float32: the rounding of a few hundred additions and of exp.
# 16-bit: the one rounding of the result (half a unit of epsilon), and the same again for the
# weights, which tensor cores take in 16 bits.
TOLERANCE = {
    torch.float32: 2e-6,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps,
    torch.float16: torch.finfo(torch.float16).eps,
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The small products of the references lose more to a second thread than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    ops.set_num_threads(1)


@pytest.fixture
def widest(back_end: str) -> torch.dtype:
    """The most exact dtype that the back end has."""
    return torch.float16 if back_end in CUDA_BACK_ENDS else torch.float32


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest, back_end: str) -> torch.dtype:
    if request.param == torch.float32 and back_end in CUDA_BACK_ENDS:
        pytest.skip("float32 has no CUDA kernel")
    return request.param


@dataclass
class Sequence:
    """Contiguous keys and values of ``length`` tokens; the last ``num_query`` of them are asked."""

    query: torch.Tensor  # [num_query, num_heads, head_size]
    key: torch.Tensor  # [length, num_kv_heads, head_size]
    value: torch.Tensor


@dataclass(frozen=True)
class Options:
    scale: float
    sliding_window: int = 0
    soft_cap: float = 0.0
    alibi_slopes: torch.Tensor | None = None


def make_sequences(
    lengths: list[tuple[int, int]],
    num_kv_heads: int,
    group: int,
    head_size: int,
    dtype: torch.dtype,
    seed: int = 0,
    gain: float = 1.0,
) -> list[Sequence]:
    """lengths: (num_query, length) pairs."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).mul_(gain).to(dtype)

    return [
        Sequence(
            normal(num_query, num_kv_heads * group, head_size),
            normal(length, num_kv_heads, head_size),
            normal(length, num_kv_heads, head_size),
        )
        for num_query, length in lengths
    ]


def reference(sequence: Sequence, options: Options) -> torch.Tensor:
    query, key, value = sequence.query.double(), sequence.key.double(), sequence.value.double()
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * options.scale
    positions = torch.arange(len(key) - len(query), len(key))
    distance = torch.arange(len(key))[None, :] - positions[:, None]
    if options.alibi_slopes is not None:
        scores = scores + options.alibi_slopes.double()[:, None, None] * distance
    if options.soft_cap > 0:
        scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
    hidden = distance > 0
    if options.sliding_window:
        hidden = hidden | (distance <= -options.sliding_window)
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def run(
    sequences: list[Sequence],
    options: Options,
    block_size: int,
    seed: int = 0,
    unused: float = math.nan,
    num_multiprocessors: int = 132,
    plan_window: int | None = None,
    fp8_scales: tuple[float, float] | None = None,
    share_blocks: bool = False,
    int8: bool = False,
) -> list[torch.Tensor]:
    """Stores the sequences into a cache of shuffled blocks and attends; one result per sequence.

    Slots without a token, and blocks that have fallen out of the window, hold ``unused``.
    num_multiprocessors, plan_window: what a CUDA back end's plan is made for; by default, an H200
    and the window. fp8_scales: the cache is FP8, and these are k_scale and v_scale. share_blocks:
    as after hits in the prefix cache, whole blocks that sequences begin with are stored once.
    int8: the cache is int8, of the CPU.
    """
    _, num_kv_heads, head_size = sequences[0].key.shape
    dtype = sequences[0].key.dtype
    num_blocks = [-(-len(s.key) // block_size) for s in sequences]
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(sum(num_blocks) + 3, generator=generator).int()
    kv_cache = torch.full((len(order), 2, num_kv_heads, block_size, head_size), unused, dtype=dtype)
    max_rows = len(sequences) + 2
    rows = torch.randperm(max_rows, generator=generator)[: len(sequences)].int()
    block_tables = torch.full((max_rows, max([*num_blocks, 1]) + 1), 2**30, dtype=torch.int32)
    used = 0
    known: dict[bytes, torch.Tensor] = {}  # of a prefix's bytes, its last block
    for row, sequence, count in zip(rows.tolist(), sequences, num_blocks, strict=True):
        blocks = order[used : used + count].clone()
        used += count
        for end in range(block_size, len(sequence.key) + 1, block_size) if share_blocks else ():
            prefix = torch.stack([sequence.key[:end], sequence.value[:end]]).view(torch.uint8)
            block = blocks[end // block_size - 1]
            block.copy_(known.setdefault(prefix.numpy().tobytes(), block.clone()))
        block_tables[row, :count] = blocks
        tokens = torch.arange(len(sequence.key))
        block, offset = blocks[tokens // block_size].long(), tokens % block_size
        kv_cache[block, 0, :, offset] = sequence.key
        kv_cache[block, 1, :, offset] = sequence.value
        if options.sliding_window:
            first_seen = len(sequence.key) - len(sequence.query) + 1 - options.sliding_window
            for block in range(max(0, first_seen) // block_size):
                kv_cache[block_tables[row, block]] = unused
                block_tables[row, block] = 2**30
    kv_cache = as_int8(kv_cache) if int8 else as_stored(kv_cache)
    # query and out are views into wider rows, as a fused qkv projection leaves them.
    query = torch.cat([s.query for s in sequences])
    heads = query.shape[1]
    wide = torch.full((len(query), heads + 2 * num_kv_heads, head_size), math.nan, dtype=dtype)
    wide[:, :heads] = query
    out = torch.full((len(query), heads + 1, head_size), math.nan, dtype=dtype)
    query_start = torch.tensor([0, *[len(s.query) for s in sequences]]).cumsum(0).int()
    seq_lens = torch.tensor([len(s.key) for s in sequences], dtype=torch.int32)
    more: dict[str, Any] = {}
    if num_multiprocessors != 132 or plan_window is not None:
        window = options.sliding_window if plan_window is None else plan_window
        more = make_plan(query, kv_cache, query_start, seq_lens, window, num_multiprocessors)
    if fp8_scales is not None:
        kv_cache = kv_cache.to(torch.float8_e4m3fn)
        more |= {"k_scale": fp8_scales[0], "v_scale": fp8_scales[1]}
    ops.paged_attention(
        out[:, :heads], wide[:, :heads], kv_cache, block_tables, rows, query_start, seq_lens,
        options.scale, options.sliding_window, options.soft_cap, options.alibi_slopes, **more,
    )  # fmt: skip
    assert out[:, heads:].isnan().all(), "written past the heads of a token"
    return list(torch.split(out[:, :heads], [len(s.query) for s in sequences]))


def check(sequences: list[Sequence], options: Options, block_size: int = 16) -> None:
    for sequence, result in zip(sequences, run(sequences, options, block_size), strict=True):
        if len(sequence.query) == 0:
            continue
        error = (result.double() - reference(sequence, options)).abs()
        scale = sequence.value.double().abs().max()
        assert error.max() <= TOLERANCE[result.dtype] * scale


def options_for(head_size: int, **more: Any) -> Options:
    return Options(scale=head_size**-0.5, **more)


MIXES = {
    "prefill": [(5, 5), (130, 130), (1, 1), (64, 64)],
    "decode": [(1, 1), (1, 17), (1, 64), (1, 300), (1, 65)],
    "mixed": [(7, 90), (0, 0), (1, 33), (40, 40), (0, 20), (3, 700), (64, 129)],
}


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
def test_head_sizes_and_dtypes(head_size: int, dtype: torch.dtype) -> None:
    sequences = make_sequences(MIXES["mixed"], 2, 3, head_size, dtype)
    check(sequences, options_for(head_size))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_of_32_on_the_cpu(dtype: torch.dtype, isa: str) -> None:
    check(make_sequences(MIXES["mixed"], 2, 3, 32, dtype), options_for(32))


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_groups_block_sizes_and_mixes(
    group: int, block_size: int, mix: str, widest: torch.dtype
) -> None:
    dtype = [widest, torch.bfloat16, torch.float16][(group + block_size) % 3]
    check(make_sequences(MIXES[mix], 2, group, 64, dtype), options_for(64), block_size)


def test_one_kv_head_for_more_heads_than_an_item_has_rows(widest: torch.dtype) -> None:
    check(make_sequences([(1, 40), (3, 9)], 1, 77, 64, widest), options_for(64))


@pytest.mark.parametrize("window", [1, 5, 100])
def test_sliding_window(window: int, widest: torch.dtype) -> None:
    options = options_for(64, sliding_window=window)
    for mix in MIXES.values():
        check(make_sequences(mix, 2, 2, 64, widest), options)


def test_window_wider_than_the_sequence_is_no_window(widest: torch.dtype) -> None:
    sequences = make_sequences(MIXES["mixed"], 2, 2, 64, widest)
    windowed = run(sequences, options_for(64, sliding_window=5000), 16)
    for a, b in zip(windowed, run(sequences, options_for(64), 16), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("scale", [0.0, -0.125])
def test_scale_may_be_0_or_negative(scale: float, widest: torch.dtype) -> None:
    check(make_sequences(MIXES["mixed"], 2, 2, 64, widest), Options(scale, sliding_window=30))


def test_soft_cap_holds_scores_over_5000(widest: torch.dtype) -> None:
    sequences = make_sequences(MIXES["mixed"], 2, 2, 64, widest, gain=30.0)
    scores = torch.einsum("qhd,khd->hqk", sequences[0].query[:, ::2], sequences[0].key) / 8
    assert scores.abs().max() > 1000
    check(sequences, options_for(64, soft_cap=30.0))
    huge = make_sequences([(4, 70)], 1, 1, 64, widest, gain=100.0)
    assert torch.einsum("qhd,khd->hqk", huge[0].query, huge[0].key).max() / 8 > 5000
    check(huge, options_for(64, soft_cap=30.0))
    check(make_sequences(MIXES["mixed"], 2, 2, 64, widest), options_for(64, soft_cap=1.5))


def test_large_scores_do_not_overflow_without_a_cap(widest: torch.dtype) -> None:
    # One key takes all the weight; what is left is rounding of the score, which grows with it.
    sequence = make_sequences([(4, 300)], 1, 1, 64, widest, gain=40.0)[0]
    result = run([sequence], options_for(64), 16)[0]
    expected = reference(sequence, options_for(64))
    tolerance = max(1e-3, TOLERANCE[widest])
    assert (result - expected).abs().max() <= tolerance * sequence.value.abs().max()


def test_scores_of_minus_infinity_weigh_nothing_even_where_a_whole_tile_has_them(
    widest: torch.dtype,
) -> None:
    sequence = make_sequences([(4, 400)], 1, 1, 64, widest)[0]
    sequence.query.abs_()
    sequence.key[:330] = -math.inf
    check([sequence], options_for(64))


def test_alibi(widest: torch.dtype) -> None:
    slopes = torch.tensor([2.0**-i for i in range(1, 7)])
    sequences = make_sequences(MIXES["mixed"], 2, 3, 64, widest)
    check(sequences, options_for(64, alibi_slopes=slopes))
    check(sequences, options_for(64, alibi_slopes=slopes, soft_cap=5.0, sliding_window=30))


def test_nothing_to_do(widest: torch.dtype) -> None:
    result = run(make_sequences([(0, 0), (0, 5)], 1, 1, 64, widest), options_for(64), 16)
    assert [len(r) for r in result] == [0, 0]


def test_a_row_before_the_first_token_sees_nothing(widest: torch.dtype) -> None:
    """More query tokens than tokens: not a plan the engine makes, but not a crash either."""
    query = torch.ones(3, 1, 64, dtype=widest)
    out = torch.full_like(query, math.nan)
    kv_cache = torch.ones(1, 2, 1, 16, 64, dtype=widest)
    table, zero = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    start = torch.tensor([0, 3], dtype=torch.int32)
    ops.paged_attention(out, query, kv_cache, table, zero, start, zero + 1, 1.0)
    assert out[:2].eq(0).all() and out[2].eq(1).all()


# ---- indices that lead out of the tensors, which the CPU checks


def attend_with(
    rows: tuple[int, ...] = (2,),
    query_start: tuple[int, ...] = (0, 1),
    seq_lens: tuple[int, ...] = (40,),
    sliding_window: int = 0,
    block: tuple[int, int] | None = None,
) -> torch.Tensor:
    """One decode of 40 tokens in blocks 3, 1, 2 of five, of 16 tokens; block: (index, other id)."""
    table = torch.full((3, 4), -1, dtype=torch.int32)
    table[2, :3] = torch.tensor([3, 1, 2])
    if block is not None:
        table[2, block[0]] = block[1]
    out = torch.full((1, 1, 64), math.nan)
    ints = [torch.tensor(values, dtype=torch.int32) for values in (rows, query_start, seq_lens)]
    kv_cache = torch.ones(5, 2, 1, 16, 64)
    try:
        ops.paged_attention(out, torch.ones_like(out), kv_cache, table, *ints, 1.0, sliding_window)
    except RuntimeError:
        assert out.isnan().all(), "refused, yet something was written"
        raise
    return out


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("block", [-1, 5, 2**31 - 1, -(2**31)])
def test_a_block_outside_the_cache_is_refused_by_row_and_block(
    index: int, block: int, isa: str
) -> None:
    message = rf"row 2 of block_tables: block\[{index}\] is {block}; the cache has blocks 0 to 4"
    with pytest.raises(RuntimeError, match=message):
        attend_with(block=(index, block))


@pytest.mark.parametrize(
    ("window", "index", "is_read"),
    # Position 39 sees 39 - window + 1 and up; block 1 begins at 16, block 2 at 32.
    [(8, 1, False), (8, 2, True), (24, 0, False), (24, 1, True), (25, 0, True), (0, 3, False)],
)
def test_only_blocks_that_are_read_are_checked(
    window: int, index: int, is_read: bool, isa: str
) -> None:
    if is_read:
        with pytest.raises(RuntimeError, match=rf"block\[{index}\] is 1000"):
            attend_with(sliding_window=window, block=(index, 1000))
    else:
        assert attend_with(sliding_window=window, block=(index, 1000)).eq(1).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_lens": (65,)}, r"seq_lens\[0\] is 65; row 2 .* holds 4 blocks of 16 tokens"),
        ({"rows": (3,)}, r"rows\[0\] is 3; block_tables has rows 0 to 2"),
        ({"rows": (-1,)}, r"rows\[0\] is -1; block_tables has rows 0 to 2"),
        ({"query_start": (0, 2)}, r"query_start\[1\] is 2; .* from 0 to 1, the tokens of query"),
        ({"query_start": (-1, 1)}, r"query_start\[0\] is -1"),
        ({"query_start": (1, 0)}, r"query_start\[0\] is 1 and query_start\[1\] is 0"),
        ({"sliding_window": -1}, "sliding_window must be positive, or 0 for none"),
    ],
    ids=str,
)
def test_indices_outside_their_tensors_are_refused(
    changes: dict[str, Any], message: str, isa: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        attend_with(**changes)


@pytest.mark.parametrize("block_size", [0, 8, 24, 512])
def test_a_block_is_a_power_of_two_from_16_to_256(block_size: int, back_end: str) -> None:
    out, zero = torch.ones(1, 1, 64).bfloat16(), torch.zeros(1, dtype=torch.int32)
    cache = torch.ones(5, 2, 1, block_size, 64).bfloat16()
    start = torch.tensor([0, 1], dtype=torch.int32)
    message = f"paged_attention: block_size is {block_size}; it must be a power of two from 16 to"
    with pytest.raises(RuntimeError, match=message):
        ops.paged_attention(out, out, cache, zero.view(1, 1), zero, start, zero + 1, 1.0)


# ---- contract "row" -----------------------------------------------------------------------------

ROW_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 70},
    "cap and alibi": {
        "soft_cap": 8.0,
        "alibi_slopes": torch.tensor([0.5, 0.1, 0.02, 0.3, 0.2, 0.1]),
    },
}


@pytest.fixture(params=ROW_OPTIONS)
def row_options(request: pytest.FixtureRequest) -> Options:
    return options_for(64, **ROW_OPTIONS[request.param])


def part(sequence: Sequence, begin: int, end: int) -> Sequence:
    """Query tokens begin..end-1 of a whole prompt, as a step that stops there sees them."""
    return Sequence(sequence.query[begin:end], sequence.key[:end], sequence.value[:end])


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_give_the_bits_of_the_whole_prompt(
    chunk: int, dtype: torch.dtype, row_options: Options
) -> None:
    sequence = make_sequences([(330, 330)], 2, 3, 64, dtype)[0]
    whole = run([sequence], row_options, 16)[0]
    # Chunks of the prompt as sequences of one batch (of short ones, some); the last one alone.
    begins = range(0, 330, chunk * max(1, 21 // chunk))
    chunks = [part(sequence, begin, min(begin + chunk, 330)) for begin in begins]
    for begin, result in zip(begins, run(chunks, row_options, 16), strict=True):
        assert torch.equal(result, whole[begin : begin + chunk])
    last = run(chunks[-1:], row_options, 32)[0]
    assert torch.equal(last, whole[begins[-1] : begins[-1] + chunk])


def test_head_size_80_keeps_the_bits_too(back_end: str) -> None:
    sequence = make_sequences([(150, 150)], 1, 4, 80, torch.bfloat16)[0]
    whole = run([sequence], options_for(80), 16)[0]
    for begin, end in [(0, 1), (1, 8), (63, 127), (149, 150)]:
        assert torch.equal(
            run([part(sequence, begin, end)], options_for(80), 16)[0], whole[begin:end]
        )


@pytest.mark.parametrize("threads", [1, 2])
def test_company_placement_and_threads_do_not_change_a_bit(
    threads: int, row_options: Options, back_end: str
) -> None:
    """Alone a long row is split over the cores by range; among many it is not."""
    lengths = [(1, 1500), (1, 40), (90, 300), (1, 256), (1, 257), (2, 1023)] + [(1, 600)] * 20
    sequences = make_sequences(lengths, 2, 3, 64, torch.bfloat16)
    together = run(sequences, row_options, 16, seed=1)
    ops.set_num_threads(threads)
    placements = [(16, 2, math.nan), (64, 3, 1.0), (32, 4, math.inf)]
    for i in range(7):
        block_size, seed, unused = placements[(i + threads) % 3]
        alone = run([sequences[i]], row_options, block_size, seed, unused)[0]
        assert torch.equal(alone, together[i])
    for a, b in zip(run(sequences, row_options, 16, seed=5), together, strict=True):
        assert torch.equal(a, b)


# ---- shared prefixes


def share(sequences: list[Sequence], like: int, tokens: int, others: list[int]) -> None:
    """Gives ``others`` the first ``tokens`` of a sequence's keys and values."""
    for other in others:
        for name in ("key", "value"):
            getattr(sequences[other], name)[:tokens] = getattr(sequences[like], name)[:tokens]


@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_shared_prefix_does_not_change_a_bit(
    threads: int, group: int, block_size: int, dtype: torch.dtype, back_end: str
) -> None:
    """Blocks of a prefix that several sequences' tables name, or the same content in their own."""
    # (query tokens, tokens); a tree of prefixes: 1024 of 0-5, 1536 of 2-5, more than has been
    # stored whole of 4 and 5, which are one prompt; 6 and 7 have another of 700; 8-10 none.
    lengths = [(1, 1100), (1, 1025), (1, 1700), (40, 1800), (1, 1601), (5, 1601)]
    lengths += [(1, 900), (1, 820), (1, 300), (0, 600), (70, 70)]
    sequences = make_sequences(lengths, 2, group, 64, dtype)
    share(sequences, 0, 1024, [1, 2, 3, 4, 5])
    share(sequences, 2, 1536, [3, 4, 5])
    share(sequences, 4, 1600, [5])
    share(sequences, 6, 700, [7])
    # In the order of the batch, sequences with the same prefix are not neighbours.
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(group)).tolist()
    sequences = [sequences[i] for i in order]
    ops.set_num_threads(threads)
    apart = run(sequences, options_for(64), block_size)
    shared = run(sequences, options_for(64), block_size, share_blocks=True)
    for a, b in zip(shared, apart, strict=True):
        assert torch.equal(a, b)


def test_a_shared_prefix_with_a_window_does_not_change_a_bit(
    row_options: Options, back_end: str
) -> None:
    sequences = make_sequences([(1, 900), (3, 700), (1, 520)], 2, 3, 64, torch.bfloat16)
    share(sequences, 0, 512, [1, 2])
    apart = run(sequences, row_options, 16)
    for a, b in zip(run(sequences, row_options, 16, share_blocks=True), apart, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_later_tokens_do_not_reach_a_row_even_by_nan(poison: float, widest: torch.dtype) -> None:
    """Weight 0 times a NaN is NaN; a later token's KV must not be multiplied at all."""
    sequence = make_sequences([(100, 100)], 2, 3, 64, widest)[0]
    clean = run([sequence], options_for(64), 16)[0]
    sequence.key[70:] = poison
    sequence.value[70:] = poison
    assert torch.equal(run([sequence], options_for(64), 16)[0][:70], clean[:70])


def test_a_nan_that_a_row_sees_is_not_hidden(widest: torch.dtype) -> None:
    sequence = make_sequences([(100, 100)], 1, 1, 64, widest)[0]
    sequence.key[30, 0, 5] = math.nan
    result = run([sequence], options_for(64), 16)[0]
    assert result[:30].isfinite().all() and result[30:].isnan().all()


# ---- moving KV ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_size", [64, 80, 96])
def test_store_kv_fills_its_slots_and_no_other(
    head_size: int, dtype: torch.dtype, isa: str
) -> None:
    heads, block_size = 3, 32
    fused = torch.randn(700, 4 * heads, head_size).to(dtype)
    key, value = fused[:, heads : 2 * heads], fused[:, 3 * heads :]
    kv_cache = torch.randn(100, 2, heads, block_size, head_size).to(dtype)
    slots = torch.randperm(100 * block_size)[:700]
    slots[::7] = -1
    expected = kv_cache.clone()
    stored = slots >= 0
    block, offset = slots[stored] // block_size, slots[stored] % block_size
    expected[block, 0, :, offset] = key[stored]
    expected[block, 1, :, offset] = value[stored]
    kv_cache = as_stored(kv_cache)
    ops.store_kv(key, value, kv_cache, slots)
    assert torch.equal(as_plain(kv_cache), expected)


@pytest.mark.parametrize("slot", [800, 2**40])
def test_store_kv_refuses_a_slot_outside_the_cache_and_stores_nothing(slot: int, isa: str) -> None:
    key = torch.randn(600, 3, 64)
    kv_cache = torch.randn(50, 2, 3, 16, 64)
    before = kv_cache.clone()
    slots = torch.arange(600)
    slots[599] = slot
    message = rf"slot_mapping\[599\] is {slot}; the cache has slots 0 to 799"
    with pytest.raises(RuntimeError, match=message):
        ops.store_kv(key, key, kv_cache, slots)
    assert torch.equal(kv_cache, before)
    slots[599] = 799
    ops.store_kv(key, key, kv_cache, slots)
    assert torch.equal(as_plain(kv_cache)[49, :, :, 15], key[599].expand(2, 3, 64))


def test_copy_blocks_copies_in_every_layer_in_the_order_of_the_list(isa: str) -> None:
    arena = torch.randn(5, 9, 2, 2, 8, 64)
    expected = arena.clone()
    pairs = [(0, 3), (3, 7), (4, 4), (1, 8)]
    for source, destination in pairs:
        expected[:, destination] = expected[:, source].clone()
    ops.copy_blocks(arena, torch.tensor(pairs, dtype=torch.int32))
    assert torch.equal(arena, expected)


@pytest.mark.parametrize("bad", [-1, 9])
def test_copy_blocks_refuses_a_block_outside_the_cache_and_copies_nothing(
    bad: int, isa: str
) -> None:
    arena = torch.randn(2, 9, 2, 1, 8, 64)
    before = arena.clone()
    pairs = torch.tensor([(0, 1), (2, bad)], dtype=torch.int32)
    with pytest.raises(RuntimeError, match=rf"block_pairs names block {bad}; .* 0 to 8"):
        ops.copy_blocks(arena, pairs)
    assert torch.equal(arena, before)
