"""What only the CUDA kernels of paged attention have: plans, FP8, unchecked indices."""

import math
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
import torch

from ops.back_ends import CUDA_PARAMS, make_plan, use
from ops.test_attention import (
    TOLERANCE,
    Sequence,
    check,
    make_sequences,
    options_for,
    part,
    reference,
    run,
)
from vllm_lite import ops


@pytest.fixture(params=CUDA_PARAMS, autouse=True)
def back_end(request: pytest.FixtureRequest) -> Iterator[str]:
    with use(request.param):
        yield request.param


SLOPES = torch.tensor([0.5, 0.1, 0.02, 0.3])
# The first has kernels of its own.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 300},
    "window and cap": {"sliding_window": 300, "soft_cap": 8.0},
    "window and alibi": {"sliding_window": 300, "alibi_slopes": SLOPES},
    "cap and alibi": {"soft_cap": 8.0, "alibi_slopes": SLOPES},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [64, 128])
def test_hopper_kernels_give_the_same_bits(
    head_size: int, dtype: torch.dtype, variant: str
) -> None:
    lengths = [(1, 700), (1, 64), (9, 600), (300, 300), (130, 900), (20, 40), (64, 320)]
    sequences = make_sequences(lengths, 2, 2, head_size, dtype)
    options = options_for(head_size, **VARIANTS[variant])
    with_hopper = run(sequences, options, 16)
    ops.allow_hopper_attention(False)
    try:
        without = run(sequences, options, 32, seed=1)
    finally:
        ops.allow_hopper_attention(True)
    for a, b in zip(with_hopper, without, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
def test_split_ranges_give_the_bits_of_whole_items(head_size: int, variant: str) -> None:
    """A plan for one multiprocessor splits nothing of these, one for 10,000 every range."""
    options = options_for(head_size, **VARIANTS[variant])
    sequences = make_sequences([(1, 700), (9, 600), (40, 530)], 1, 4, head_size, torch.bfloat16)
    whole = run(sequences, options, 16, num_multiprocessors=1)
    split = run(sequences, options, 32, seed=3, num_multiprocessors=10_000)
    for a, b in zip(whole, split, strict=True):
        assert torch.equal(a, b)
    check(sequences, options)


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8, 16])
def test_a_decode_has_the_bits_of_its_row_in_the_prefill(group: int) -> None:
    """Also as several tokens at once, as speculative decoding asks for them."""
    sequence = make_sequences([(300, 300)], 1, group, 64, torch.float16)[0]
    whole = run([sequence], options_for(64), 16)[0]
    for begin, end in [(299, 300), (255, 256), (256, 257), (64, 66), (250, 258)]:
        alone = run([part(sequence, begin, end)], options_for(64), 32, seed=end)[0]
        assert torch.equal(alone, whole[begin:end])


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("head_size", [80, 128])
def test_block_sizes(head_size: int, block_size: int) -> None:
    lengths = [(1, 333), (70, 290), (3, 64)]
    check(make_sequences(lengths, 2, 4, head_size, torch.bfloat16), options_for(head_size),
          block_size)  # fmt: skip


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "window, cap and alibi"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
def test_fp8_cache(head_size: int, dtype: torch.dtype, plain: bool) -> None:
    sequences = make_sequences([(1, 300), (50, 90), (3, 600)], 2, 4, head_size, dtype)
    k_scale, v_scale = 0.5, 3.0
    for sequence in sequences:
        sequence.key = sequence.key.to(torch.float8_e4m3fn).to(dtype)
        sequence.value = sequence.value.to(torch.float8_e4m3fn).to(dtype)
    slopes = torch.tensor([2.0**-i for i in range(8)])
    general = {"sliding_window": 100, "soft_cap": 8.0, "alibi_slopes": slopes}
    options = options_for(head_size, **({} if plain else general))
    results = run(sequences, options, 16, fp8_scales=(k_scale, v_scale))
    for sequence, result in zip(sequences, results, strict=True):
        scaled = Sequence(
            sequence.query.double(),
            sequence.key.double() * k_scale,
            sequence.value.double() * v_scale,
        )
        error = (result.double() - reference(scaled, options)).abs().max()
        assert error <= TOLERANCE[dtype] * scaled.value.abs().max()
    split = run(sequences, options, 16, num_multiprocessors=10_000, fp8_scales=(k_scale, v_scale))
    for a, b in zip(results, split, strict=True):
        assert torch.equal(a, b)


def head_256_bits(on_host_capability: str | None = None) -> list[np.ndarray]:
    """Results of prefills whose warps keep totals; on another device in a process of its own."""
    if on_host_capability is not None:
        os.environ["CUDA_ON_HOST_COMPUTE_CAPABILITY"] = on_host_capability
        with use("cuda_on_host"):
            return head_256_bits()
    sequences = make_sequences([(9, 600), (40, 530)], 1, 4, 256, torch.bfloat16)
    return [
        result.view(torch.int16).numpy()
        for options in (options_for(256), options_for(256, soft_cap=8.0))
        for fp8_scales in (None, (0.5, 3.0))
        for result in run(sequences, options, 16, num_multiprocessors=1, fp8_scales=fp8_scales)
    ]


def test_a_device_with_little_shared_memory_gives_the_same_bits(back_end: str) -> None:
    """On sm_86 a block has 99 KiB, too few for the totals of heads of 256."""
    if back_end != "cuda_on_host":
        pytest.skip("a device has the memory that it has")
    with ProcessPoolExecutor(1, get_context("spawn")) as processes:
        little = processes.submit(head_256_bits, "86").result()
    for a, b in zip(little, head_256_bits(), strict=True):
        assert np.array_equal(a, b)


def test_a_plan_without_a_window_serves_a_windowed_layer() -> None:
    sequences = make_sequences([(1, 900), (60, 700)], 1, 4, 64, torch.bfloat16)
    windowed = options_for(64, sliding_window=100)
    expected = run(sequences, windowed, 16)
    for multiprocessors in (1, 10_000):
        result = run(sequences, windowed, 16, num_multiprocessors=multiprocessors, plan_window=0)
        for a, b in zip(result, expected, strict=True):
            assert torch.equal(a, b)


# ---- what is refused, and what is not followed


def attend(
    dtype: torch.dtype = torch.bfloat16,
    tokens: int = 1,
    table: list[int] | None = None,
    rows: int = 0,
    length: int = 40,
    start: int = 0,
    **more: Any,
) -> torch.Tensor:
    """`tokens` query tokens of a sequence of 40, in blocks 3, 1, 2 of five of 16 tokens."""
    out = torch.full((tokens, 1, 64), 7.0, dtype=dtype)
    query = torch.ones_like(out)
    kv_cache = torch.ones(5, 2, 1, 16, 64, dtype=dtype)
    tables = torch.tensor([table or [3, 1, 2]], dtype=torch.int32)
    good_start = torch.tensor([0, tokens], dtype=torch.int32)
    lengths = torch.tensor([length], dtype=torch.int32)
    if "plan" not in more:
        more |= make_plan(query, kv_cache, good_start, lengths)
    ops.paged_attention(
        out, query, kv_cache, tables, torch.tensor([rows], dtype=torch.int32),
        good_start + start, lengths, 1.0, **more,
    )  # fmt: skip
    return out


def test_what_is_missing_is_refused() -> None:
    with pytest.raises(RuntimeError, match="float32 has no CUDA kernel"):
        attend(torch.float32)
    with pytest.raises(RuntimeError, match="CUDA needs a plan"):
        attend(plan=None, workspace=torch.zeros(10**7))
    plan = torch.zeros(8, dtype=torch.int32)
    for workspace in (None, torch.zeros(100)):
        with pytest.raises(
            RuntimeError, match=r"workspace has \d+ elements; CUDA needs .* 2162688"
        ):
            attend(plan=plan, workspace=workspace)


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize(
    "wrong",
    [{"table": [3, 5, 2]}, {"table": [3, -1, 2]}, {"table": [3, 1, 2**31 - 1]}, {"rows": 1},
     {"rows": -1}, {"length": 49}],
    ids=str,
)  # fmt: skip
def test_an_index_that_leads_nowhere_gives_nan(wrong: dict[str, Any], tokens: int) -> None:
    assert attend(tokens=tokens).eq(1).all()
    assert attend(tokens=tokens, **wrong)[-1].isnan().all()


@pytest.mark.parametrize("start", [-1, 1, 2**30])
def test_tokens_outside_the_query_are_neither_read_nor_written(start: int) -> None:
    assert attend(tokens=40, start=start).eq(7).all()


def test_a_plan_of_other_sequences_does_not_lead_out_of_the_tensors() -> None:
    plan = torch.tensor([1, 0, 1, *[0] * 5], dtype=torch.int32)
    workspace = torch.zeros(ops.attention_workspace_size(1, 64))
    for item in ([5, 0, 1, 0, 1, -1], [-1, 0, 1, 0, 1, -1], [0, 0, 1, 0, 1, 2**31 - 1]):
        words = torch.tensor([*item, 0, 0], dtype=torch.int32)
        assert attend(plan=torch.cat([plan, words, words]), workspace=workspace).eq(7).all()


def test_no_tokens_is_no_work() -> None:
    empty = torch.empty(0, 1, 64, dtype=torch.bfloat16)
    kv_cache = torch.empty(1, 2, 1, 16, 64, dtype=torch.bfloat16)
    ints = torch.zeros(0, dtype=torch.int32)
    start = torch.zeros(1, dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    ops.paged_attention(empty, empty, kv_cache, table, ints, start, ints, 1.0)


def test_nan_of_a_later_token_does_not_reach_a_row_split_or_not() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        sequence = make_sequences([(100, 330)], 1, 4, 96, dtype)[0]
        clean = run([sequence], options_for(96), 16)[0]
        sequence.key[290:], sequence.value[290:] = math.nan, math.inf
        for multiprocessors in (1, 10_000):
            dirty = run(
                [sequence], options_for(96), 16, num_multiprocessors=multiprocessors
            )[0]  # fmt: skip
            assert torch.equal(dirty[:60], clean[:60])
            assert dirty[60:].isnan().all()
