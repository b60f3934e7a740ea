"""Runs the op table; and what holds for every op: independent rows, refused arguments."""

from collections.abc import Callable

import pytest
import torch

from ops.op_table import (
    FLOAT_DTYPES,
    OpCase,
    all_cases,
    assert_matches,
    normal,
    rotary_table,
    shifted,
)
from vllm_lite import ops

CPU_ONLY = ("dequantize", "linear")


@pytest.mark.parametrize(
    "case", [case for case in all_cases() if case.op not in CPU_ONLY], ids=lambda case: case.id
)
def test_matches_the_float64_reference(case: OpCase, back_end: str) -> None:
    assert_matches(case.result())


@pytest.mark.parametrize(
    "case", [case for case in all_cases() if case.op == "dequantize"], ids=lambda case: case.id
)
def test_cpu_op_matches_the_float64_reference(case: OpCase, isa: str) -> None:
    assert_matches(case.result())


@pytest.mark.parametrize(
    "case", [case for case in all_cases() if case.op == "linear"], ids=lambda case: case.id
)
def test_linear_matches_the_float64_reference(case: OpCase, isa: str) -> None:
    assert_matches(case.result())


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype, back_end: str) -> None:
    generator = torch.Generator().manual_seed(5)
    tokens, size = 200, 1000
    x, weight = normal(generator, dtype, tokens, 2 * size), normal(generator, dtype, size)
    table = rotary_table(256, 64)
    positions = torch.arange(tokens, dtype=torch.int32)

    def run(rows: slice) -> tuple[torch.Tensor, ...]:
        part = x[rows]
        normed, activated = torch.empty_like(part[:, :size]), torch.empty_like(part[:, :size])
        residual = part[:, size:].clone()
        ops.rms_norm(normed, part[:, :size].clone(), weight, 1e-5, residual)
        ops.silu_mul(activated, part)
        heads = part[:, : 15 * 64].reshape(-1, 15, 64).clone()
        ops.rope(heads[:, :10], heads[:, 10:], positions[rows], table)
        return normed, residual, activated, heads

    together = run(slice(0, tokens))
    for row in (0, 1, 63, 64, 199):
        alone = run(slice(row, row + 1))
        for whole, single in zip(together, alone, strict=True):
            assert torch.equal(whole[row : row + 1], single)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("size", [128, 1000, 4096, 40000])
def test_a_row_does_not_depend_on_its_alignment(
    size: int, dtype: torch.dtype, back_end: str
) -> None:
    generator = torch.Generator().manual_seed(6)
    x, weight = normal(generator, dtype, 2, 2 * size), normal(generator, dtype, size)

    def run(place: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        normed, activated = place(torch.empty(2, size)).to(dtype), torch.empty(2, size, dtype=dtype)
        ops.rms_norm(normed, place(x[:, :size].contiguous()), weight, 1e-5)
        ops.silu_mul(activated, place(x))
        return normed, activated

    for aligned, unaligned in zip(run(torch.clone), run(shifted), strict=True):
        assert torch.equal(aligned, unaligned)


def test_nan_and_infinity_stay_visible(back_end: str) -> None:
    x = torch.zeros(3, 64)
    x[0, 3], x[1, 3] = float("nan"), float("inf")
    out = torch.empty_like(x)
    ops.rms_norm(out, x, torch.ones(64), 1e-5)
    assert out[0].isnan().all() and out[1, 3].isnan() and (out[2] == 0).all()


def test_no_tokens_is_no_work(back_end: str) -> None:
    empty = torch.empty(0, 64)
    ops.rms_norm(empty, empty, torch.ones(64), 1e-5)
    ops.silu_mul(torch.empty(0, 32), empty)
    heads = torch.empty(0, 1, 64)
    ops.rope(heads, heads.clone(), torch.empty(0, dtype=torch.int32), rotary_table(4, 64))
    ops.rope_store_kv(
        heads, heads.clone(), heads.clone(), torch.empty(0, dtype=torch.int32), rotary_table(4, 64),
        torch.empty(1, 2, 1, 16, 64), torch.empty(0, dtype=torch.int64),
    )  # fmt: skip


def test_no_blocks_is_no_work(isa: str) -> None:
    ops.dequantize(torch.empty(0), torch.empty(0, dtype=torch.uint8), 2)


@pytest.mark.parametrize("position", [-1, 16, 2**31 - 1])
def test_rope_on_cuda_rotates_to_nan_by_a_position_outside_the_table(
    position: int, cuda_back_end: str
) -> None:
    heads, other = torch.ones(2, 1, 64), torch.ones(2, 1, 64)
    ops.rope(heads, other, torch.tensor([0, position], dtype=torch.int32), rotary_table(16, 64))
    assert heads[0].eq(1).all() and other[0].eq(1).all()
    assert heads[1].isnan().all() and other[1].isnan().all()


@pytest.mark.parametrize("position", [-1, 16, 2**31 - 1])
def test_rope_refuses_a_position_outside_the_table(position: int) -> None:
    heads = torch.zeros(2, 1, 64)
    positions = torch.tensor([0, position], dtype=torch.int32)
    with pytest.raises(RuntimeError, match=rf"positions\[1\] is {position}.* 0 to 15"):
        ops.rope(heads, heads.clone(), positions, rotary_table(16, 64))


def test_dequantize_refuses_what_it_cannot_decode() -> None:
    with pytest.raises(RuntimeError, match=r"ggml type 10 is not supported.*Q6_K"):
        ops.dequantize(torch.empty(256), torch.empty(84, dtype=torch.uint8), 10)
    with pytest.raises(RuntimeError, match=r"num_elements is 255.*blocks of 256"):
        ops.dequantize(torch.empty(255), torch.empty(144, dtype=torch.uint8), 12)
    with pytest.raises(RuntimeError, match="blocks does not hold"):
        ops.dequantize(torch.empty(256), torch.empty(143, dtype=torch.uint8), 12)
