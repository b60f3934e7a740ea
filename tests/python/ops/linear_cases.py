"""Cases of linear for the op table: every weight format against its own numbers in float64."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ops.op_table import FLOAT_DTYPES, OpCase, Result, normal, random_blocks
from vllm_lite import ops

DENSE_FORMATS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
BLOCK_FORMATS = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
FORMATS = (*DENSE_FORMATS, "int8", *BLOCK_FORMATS)


def packed_buffer(format: str, rows: int, columns: int) -> torch.Tensor:
    """Of bytes that are no zeros, so that padding that packing leaves out shows."""
    size = ops.packed_weight_bytes(format, rows, columns)
    whole = torch.full((size + 63,), 0xFF, dtype=torch.uint8)
    return whole[-whole.data_ptr() % 64 :][:size]


@dataclass(frozen=True)
class Weight:
    """A weight as its file has it, its numbers in float64, and what ops.linear takes."""

    format: str
    source: torch.Tensor
    scales: torch.Tensor | None
    values: torch.Tensor  # float64 [rows, columns]

    def packed(self, *first_rows: int) -> torch.Tensor:
        """Packed at once or, with `first_rows`, in parts that begin there, the last one first."""
        rows, columns = self.values.shape
        packed = packed_buffer(self.format, rows, columns)
        ends = (*first_rows[1:], rows)
        for first, end in reversed(list(zip(first_rows or (0,), ends, strict=True))):
            scales = None if self.scales is None else self.scales[first:end]
            ops.pack_weight(
                packed, self.source[first:end], self.format, rows, columns, first, scales
            )
        return packed


def _block_weight(generator: torch.Generator, format: str, rows: int, columns: int) -> Weight:
    """Quantised normal numbers where gguf can, otherwise random bytes with small scales."""
    import gguf  # CPU tests alone need it

    kind = gguf.GGMLQuantizationType[format]
    if format in ("Q4_0", "Q4_1", "Q8_0"):
        blocks = gguf.quantize(normal(generator, torch.float32, rows, columns).numpy(), kind)
    else:
        block_columns, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        blocks = random_blocks(generator, format, rows * columns // block_columns)
        blocks = blocks.reshape(rows, columns // block_columns * block_bytes)
    values = torch.from_numpy(gguf.dequantize(blocks, kind)).double()
    return Weight(format, torch.from_numpy(blocks), None, values)


def make_weight(generator: torch.Generator, format: str, rows: int, columns: int) -> Weight:
    if format in DENSE_FORMATS:
        source = normal(generator, DENSE_FORMATS[format], rows, columns)
        return Weight(format, source, None, source.double())
    if format == "int8":
        source = torch.randint(-128, 128, (rows, columns), generator=generator, dtype=torch.int8)
        scales = torch.rand(rows, generator=generator) * 0.01 + 1e-4
        return Weight(format, source, scales, source.double() * scales[:, None].double())
    return _block_weight(generator, format, rows, columns)


def sum_tolerance(weight: Weight, x: torch.Tensor) -> float:
    """Of a float32 sum over the columns, and of the scales' rounding.

    The partial sums of n terms of random sign are of the size of sqrt(n) terms, and so are the
    roundings: n of them, each half of 2^-23 of that, make n * term * 2^-24 at random signs; four
    times that is never reached. Sums of blocks, as the formats with scales have them, err less.
    For a quantised weight an input of 16 bits is rounded to steps of 2^-15 of the largest of 32
    numbers, some four times their root mean square: at random 2^-15 of that, times sqrt(n).
    """
    columns = x.shape[1]
    term = (weight.values.square().mean().sqrt() * x.double().square().mean().sqrt()).item()
    is_rounded = weight.format not in DENSE_FORMATS and x.dtype != torch.float32
    rounding = 8 * columns**0.5 * 2.0**-15 if is_rounded else 0.0
    return (4 * columns * 2.0**-24 + rounding) * term


def linear_case(
    format: str, rows: int, columns: int, tokens: int, with_bias: bool = False, out32: bool = False
) -> Callable[..., Result]:
    """The rows of input and out are strided; what is between those of out stays."""

    def run(generator: torch.Generator, dtype: torch.dtype) -> Result:
        weight = make_weight(generator, format, rows, columns)
        x = normal(generator, dtype, tokens, columns + 3)[:, :columns]
        out_dtype = torch.float32 if out32 else dtype
        bias = normal(generator, out_dtype, rows) if with_bias else None
        wide = torch.full((tokens, rows + 5), float("nan"), dtype=out_dtype)
        out = wide[:, :rows]
        ops.linear(out, x, weight.packed(), format, bias)
        expected = x.double() @ weight.values.T
        if bias is not None:
            expected += bias.double()
        return Result(
            {"out": out, "between": wide[:, rows:].isnan().to(torch.uint8)},
            {"out": expected, "between": torch.ones(tokens, 5, dtype=torch.uint8)},
            absolute=sum_tolerance(weight, x),
        )

    return run


# Row counts around a panel of 16 and a group of 64; column counts around a pass of 256.
SHAPES = {
    False: ((1, 32), (15, 64), (16, 576), (17, 256), (192, 1536), (576, 576)),
    True: ((1, 256), (15, 512), (17, 768), (192, 1536), (576, 256)),
}
TOKENS = (1, 2, 3, 5, 17, 200)


def _cases() -> list[OpCase]:
    cases = []
    for format in FORMATS:
        for rows, columns in SHAPES[format.endswith("K")]:
            for dtype in FLOAT_DTYPES:
                name = f"{format}_{rows}x{columns}"
                tokens = TOKENS[zlib.crc32(f"{name}{dtype}".encode()) % len(TOKENS)]
                run = linear_case(format, rows, columns, tokens)
                cases.append(OpCase("linear", f"{name}_{tokens}_tokens", dtype, run))
        for tokens in (4, 70):
            run = linear_case(format, 70, 512, tokens, with_bias=True)
            cases.append(OpCase("linear", f"{format}_bias_{tokens}", torch.bfloat16, run))
            run = linear_case(format, 70, 512, tokens, with_bias=True, out32=True)
            cases.append(OpCase("linear", f"{format}_bias_float32_{tokens}", torch.bfloat16, run))
    for format in (*DENSE_FORMATS, "int8"):  # no blocks: any number of columns
        for columns in (1, 31, 77, 300):
            run = linear_case(format, 33, columns, 9)
            cases += [OpCase("linear", f"{format}_odd_{columns}", dt, run) for dt in FLOAT_DTYPES]
    return cases


CASES = _cases()
