"""What holds for packed products beyond the op table: bits, packing, refusals."""

from itertools import product as product_of

import pytest
import torch

from ops.linear_cases import BLOCK_FORMATS, FORMATS, Weight, make_weight, packed_buffer
from ops.op_table import FLOAT_DTYPES, normal
from vllm_lite import ops

MANY = 1000  # tokens: more than are prepared at a time, in ranges of several sizes
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 17, 33, 64, 192, 193, 200, 385, 770)


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def product(weight: Weight, x: torch.Tensor, packed: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.full((len(x), len(weight.values)), float("nan"))
    ops.linear(out, x, weight.packed() if packed is None else packed, weight.format)
    return out


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_a_row_has_the_same_bits_among_any_number_of_tokens(
    format: str, dtype: torch.dtype, isa: str
) -> None:
    weight = make_weight(generator(), format, 83, 768)
    packed = weight.packed()
    x = normal(generator(), dtype, MANY, 768)
    whole = product(weight, x, packed)
    assert whole.isfinite().all()
    for count in COUNTS:
        for first in {0, 5, MANY - count}:
            part = product(weight, x[first : first + count], packed)
            assert torch.equal(part, whole[first : first + count]), (count, first)


@pytest.mark.parametrize("tokens", [1, 7, 200])
@pytest.mark.parametrize("format", ["int8", "Q8_0", "Q4_0", "Q6_K"])  # minima meet it unrounded
def test_the_input_of_quantised_weights_is_rounded_to_16_bits_per_block_and_no_further(
    format: str, tokens: int, isa: str
) -> None:
    weight = make_weight(generator(), format, 40, 256)
    x = torch.rand(tokens, 8, 32, generator=generator()) * 2 - 1
    x[:, :, 5] = 1  # of every block the largest
    x = x.reshape(tokens, 256).bfloat16()
    rounded = (x.double() * 32767).round() / 32767
    out = product(weight, x)
    terms = rounded.abs() @ weight.values.T.abs()
    assert ((out - rounded @ weight.values.T).abs() <= terms * 2.0**-21).all()


@pytest.mark.parametrize("exponent", [-99, -101, -110])
@pytest.mark.parametrize("format", ["int8", *BLOCK_FORMATS])
def test_tiny_inputs_lose_digits_and_no_more(format: str, exponent: int, isa: str) -> None:
    """Below 2^-100 a block's scale gets no smaller: steps of 2^-115."""
    weight = make_weight(generator(), format, 20, 256)
    x = (normal(generator(), torch.float32, 3, 256) * 2.0**exponent).bfloat16()
    out = product(weight, x)
    bound = weight.values.abs().sum(-1) * 2.0 ** max(exponent - 14, -115)
    assert ((out - x.double() @ weight.values.T).abs() <= bound).all()


@pytest.mark.parametrize("format", ["bfloat16", "Q4_1"])
def test_threads_change_no_bit(format: str, isa: str) -> None:
    weight = make_weight(generator(), format, 700, 768)
    x = normal(generator(), torch.bfloat16, 300, 768)
    try:
        results = []
        for threads in (1, 2, 3):
            ops.set_num_threads(threads)
            packed = weight.packed()
            results.append([product(weight, x[:n], packed) for n in (1, 30, 100, 300)])
    finally:
        ops.set_num_threads(1)
    for others in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], others, strict=True))


@pytest.mark.parametrize("format", FORMATS)
def test_parts_of_a_stacked_weight_pack_to_the_same_bytes(format: str) -> None:
    weight = make_weight(generator(), format, 83, 256)
    assert torch.equal(weight.packed(0, 7, 16, 35, 80), weight.packed())


@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_block_formats_keep_the_files_size_within_3_percent(format: str) -> None:
    weight = make_weight(generator(), format, 64, 512)
    packed = ops.packed_weight_bytes(format, 64, 512)
    assert 1 <= packed / weight.source.numel() <= 1.03


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_not_finite_stays_visible_and_in_its_row(
    format: str, value: float, isa: str
) -> None:
    weight = make_weight(generator(), format, 20, 256)
    x = normal(generator(), torch.bfloat16, 9, 256)
    clean = product(weight, x)
    x[3, 100] = value
    out = product(weight, x)
    assert not out[3].isfinite().any()
    others = [row for row in range(9) if row != 3]
    assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("format", FORMATS)
def test_padding_of_an_earlier_call_does_not_leak(format: str, isa: str) -> None:
    """The scratch of an input is reused: what a longer or NaN input left must not be seen."""
    weight = make_weight(generator(), format, 20, 256)
    x = normal(generator(), torch.float32, 7, 256)
    expected = product(weight, x)
    product(weight, torch.full((40, 256), float("nan")))
    assert torch.equal(product(weight, x), expected)


def test_no_tokens_is_no_work(isa: str) -> None:
    weight = make_weight(generator(), "Q4_K", 20, 256)
    assert product(weight, torch.empty(0, 256)).shape == (0, 20)


def test_sizes_that_the_format_cannot_have_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"columns are 100; Q4_0 needs .* multiple of 32"):
        ops.packed_weight_bytes("Q4_0", 16, 100)
    with pytest.raises(RuntimeError, match=r"columns are 128; Q6_K needs .* multiple of 256"):
        ops.packed_weight_bytes("Q6_K", 16, 128)
    with pytest.raises(RuntimeError, match="rows are 0"):
        ops.packed_weight_bytes("bfloat16", 0, 32)
    with pytest.raises(ValueError, match=r"'Q3_K', must be one of float32, .*Q6_K"):
        ops.packed_weight_bytes("Q3_K", 16, 256)


def test_pack_weight_refuses_what_does_not_fit() -> None:
    packed = packed_buffer("bfloat16", 20, 64)
    source = torch.zeros(8, 64, dtype=torch.bfloat16)

    def refused(match: str, *args: object) -> None:
        with pytest.raises(RuntimeError, match=match):
            ops.pack_weight(*args)  # type: ignore[arg-type]

    refused("rows 13 to 21 are not within the weight's 20", packed, source, "bfloat16", 20, 64, 13)
    refused("rows -1 to 7", packed, source, "bfloat16", 20, 64, -1)
    refused(r"packed has 4095 bytes.*\[20, 64\].* 4096", packed[:-1], source, "bfloat16", 20, 64, 0)
    refused(r"source is \[8, 32\].*\[num_rows, 64\]", packed, source[:, :32], "bfloat16", 20, 64, 0)
    refused("source must have the format's dtype", packed, source.half(), "bfloat16", 20, 64, 0)
    refused("scales go with int8", packed, source, "bfloat16", 20, 64, 0, torch.ones(8))
    int8 = packed_buffer("int8", 20, 64)
    refused("scales go with int8", int8, source.to(torch.int8), "int8", 20, 64, 0)
    refused("scales has 7.* 8", int8, source.to(torch.int8), "int8", 20, 64, 0, torch.ones(7))
    blocks = torch.zeros(8, 35, dtype=torch.uint8)
    refused(r"\[num_rows, 36\]", packed_buffer("Q4_0", 20, 64), blocks, "Q4_0", 20, 64, 0)


def test_memory_at_an_odd_address_is_refused() -> None:
    whole = torch.zeros(ops.packed_weight_bytes("bfloat16", 16, 32) + 64, dtype=torch.uint8)
    odd = whole[(-whole.data_ptr() % 64) + 2 :][:1024]
    with pytest.raises(RuntimeError, match="pack_weight: packed must begin at a multiple of 64"):
        ops.pack_weight(odd, torch.zeros(16, 32, dtype=torch.bfloat16), "bfloat16", 16, 32, 0)


def test_linear_refuses_what_does_not_fit() -> None:
    packed = make_weight(generator(), "bfloat16", 20, 64).packed()
    out, x = torch.empty(3, 20), torch.empty(3, 64)

    def refused(match: str, *args: object) -> None:
        with pytest.raises(RuntimeError, match=match):
            ops.linear(*args)  # type: ignore[arg-type]

    refused(r"out is \[2, 20\] and input \[3, 64\]", out[:2], x, packed, "bfloat16")
    refused(r"packed has 4096 bytes.*\[40, 64\].* 6144", torch.empty(3, 40), x, packed, "bfloat16")
    refused(r"packed has 4096 bytes", out, x, packed, "int8")
    refused("rows of out and input must be contiguous", out, torch.empty(64, 3).T, packed,
            "bfloat16")  # fmt: skip
    refused("input's dtype or float32", out.half(), x, packed, "bfloat16")
    refused("dtype must be float32, bfloat16 or float16", out, x.double(), packed, "bfloat16")
    refused(r"bias is \[19\], must be contiguous \[20\]", out, x, packed, "bfloat16",
            torch.zeros(19))  # fmt: skip
    refused("of out's dtype", out, x, packed, "bfloat16", torch.zeros(20).half())


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_the_gated_activation_has_the_bits_of_the_two_ops(
    format: str, dtype: torch.dtype, isa: str
) -> None:
    def of_normal_numbers(values: torch.Tensor) -> torch.Tensor:
        """AVX-512-BF16 stores others as zeros."""
        return values.where(values.abs() >= torch.finfo(values.dtype).tiny, 0)

    size, columns = 208, 512  # 13 panels: a group is not whole
    packed = make_weight(generator(), format, 2 * size, columns).packed()
    x = normal(generator(), dtype, 400, columns)
    bias = normal(generator(), dtype, 2 * size)
    for tokens, with_bias in product_of((1, 2, 5, 16, 33, 200, 400), (None, bias)):
        products = torch.empty(tokens, 2 * size, dtype=dtype)
        expected, out = (torch.full((tokens, size), 7, dtype=dtype) for _ in range(2))
        ops.linear(products, x[:tokens], packed, format, with_bias)
        ops.silu_mul(expected, products)
        ops.linear_silu_mul(out, x[:tokens], packed, format, with_bias)
        assert torch.equal(of_normal_numbers(out), of_normal_numbers(expected)), tokens


def test_the_gated_activation_refuses_rows_that_are_no_whole_panels() -> None:
    packed = make_weight(generator(), "bfloat16", 40, 64).packed()
    out, x = torch.empty(3, 20), torch.empty(3, 64)
    with pytest.raises(RuntimeError, match="gated, it has 20 rows, must have a multiple of 16"):
        ops.linear_silu_mul(out, x, packed, "bfloat16")
    with pytest.raises(RuntimeError, match=r"linear_silu_mul: packed has .*\[64, 64\]"):
        ops.linear_silu_mul(torch.empty(3, 32), x, packed, "bfloat16")
    with pytest.raises(RuntimeError, match=r"linear_silu_mul: bias is \[16\].*\[32\]"):
        ops.linear_silu_mul(
            out[:, :16], x, packed[: len(packed) // 3 * 2], "bfloat16", torch.zeros(16)
        )
