"""The op table: every (op, case, dtype) with a float64 reference, run on each back end.

A case makes its inputs from a seed, runs the op and computes the same in float64. Cases of the
small ops are here; a larger op keeps its own in ``<op>_cases.py`` beside this file, with a list
``CASES`` that ``all_cases`` collects.
"""

import importlib
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from vllm_lite import ops

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Half a unit in the last place of the result's dtype, and a little for float32 arithmetic.
RELATIVE_TOLERANCE = {
    torch.float32: 3e-6,
    torch.bfloat16: 2**-8 * 1.01,
    torch.float16: 2**-11 * 1.01,
}
EXACT_DTYPES = (torch.int32, torch.int64, torch.uint8)
# Near zero: subnormals of float16, cancellation in float32.
ABSOLUTE_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.float16: 2e-6}


@dataclass(frozen=True)
class Result:
    """What the op wrote and, under the same names, the float64 reference."""

    actual: dict[str, torch.Tensor]
    expected: dict[str, torch.Tensor]
    exact: bool = False  # the reference rounded to the dtype must be equal, bit for bit
    absolute: float = 0.0  # tolerance, where an op rounds more than its result


@dataclass(frozen=True)
class OpCase:
    op: str
    name: str
    dtype: torch.dtype
    run: Callable[[torch.Generator, torch.dtype], Result]

    @property
    def id(self) -> str:
        return f"{self.op}-{self.name}-{str(self.dtype).removeprefix('torch.')}"

    def result(self) -> Result:
        # The same inputs on every back end.
        generator = torch.Generator().manual_seed(zlib.crc32(self.id.encode()))
        return self.run(generator, self.dtype)


def assert_matches(result: Result) -> None:
    assert result.actual.keys() == result.expected.keys()
    for name, actual in result.actual.items():
        expected = result.expected[name]
        assert actual.shape == expected.shape, name
        if result.exact or actual.dtype in EXACT_DTYPES:
            assert torch.equal(actual, expected.to(actual.dtype)), name
            continue
        torch.testing.assert_close(
            actual.double(),
            expected,
            rtol=RELATIVE_TOLERANCE[actual.dtype],
            atol=max(ABSOLUTE_TOLERANCE[actual.dtype], result.absolute),
            equal_nan=True,
            msg=partial("{}: {}".format, name),
        )


def normal(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same values at addresses that are no multiple of 16 bytes."""
    wide = torch.full((tensor.numel() + 1,), float("nan"), dtype=tensor.dtype)
    wide[1:] = tensor.reshape(-1)
    return wide[1:].view(tensor.shape)


# ---- rms_norm


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(normalised, new residual), both float64; the residual as stored, rounded to its dtype."""
    value = x.double()
    if residual is not None:
        stored = (x.float() + residual.float()).to(x.dtype)
        value = stored.double()
    scale = torch.rsqrt(value.square().mean(-1, keepdim=True) + epsilon)
    return value * scale * weight.double(), None if residual is None else value


def rms_norm_case(
    tokens: int, size: int, with_residual: bool, scale: float = 1.0, unaligned: bool = False
) -> Callable[..., Result]:
    def run(generator: torch.Generator, dtype: torch.dtype) -> Result:
        x = (normal(generator, torch.float32, tokens, size) * scale).to(dtype)
        if unaligned:
            x = shifted(x)
        weight = normal(generator, dtype, size)
        residual = normal(generator, dtype, tokens, size) if with_residual else None
        expected, new_residual = rms_norm_reference(x, weight, 1e-5, residual)
        out = torch.full_like(x, float("nan"))
        ops.rms_norm(out, x, weight, 1e-5, residual)
        actual_all, expected_all = {"out": out}, {"out": expected}
        if residual is not None and new_residual is not None:
            actual_all["residual"], expected_all["residual"] = residual, new_residual
        return Result(actual_all, expected_all)

    return run


def rms_norm_in_place_residual(generator: torch.Generator, dtype: torch.dtype) -> Result:
    x, residual = normal(generator, dtype, 5, 576), normal(generator, dtype, 5, 576)
    weight = normal(generator, dtype, 576)
    expected, new_residual = rms_norm_reference(x, weight, 1e-6, residual)
    assert new_residual is not None
    ops.rms_norm(x, x, weight, 1e-6, residual)
    return Result({"out": x, "residual": residual}, {"out": expected, "residual": new_residual})


def rms_norm_heads_in_place(heads: int, kv_heads: int, head_size: int) -> Callable[..., Result]:
    """q and k heads as views into a fused qkv row; v and the other heads must stay as they are."""

    def run(generator: torch.Generator, dtype: torch.dtype) -> Result:
        tokens = 7
        qkv = normal(generator, dtype, tokens, (heads + 2 * kv_heads) * head_size)
        weight = normal(generator, dtype, head_size)
        expected = qkv.double()
        begin, end = heads * head_size, (heads + kv_heads) * head_size
        k = qkv[:, begin:end].view(tokens, kv_heads, head_size)
        expected_k, _ = rms_norm_reference(k, weight, 1e-6)
        expected[:, begin:end] = expected_k.reshape(tokens, -1)
        ops.rms_norm(k, k, weight, 1e-6)
        return Result({"qkv": qkv}, {"qkv": expected})

    return run


RMS_NORM = {
    "one_token": rms_norm_case(1, 576, False),
    "residual": rms_norm_case(9, 2048, True),
    "in_place_residual": rms_norm_in_place_residual,
    "odd_size": rms_norm_case(3, 77, False),
    "odd_size_residual": rms_norm_case(3, 77, True),
    "below_vector": rms_norm_case(2, 3, True),
    "tiny_values": rms_norm_case(2, 256, False, 1e-4),
    "large_values": rms_norm_case(2, 256, False, 200.0),
    "long_rows": rms_norm_case(2, 16384, False),
    "long_rows_residual": rms_norm_case(2, 16384, True),
    "longer_than_registers": rms_norm_case(2, 33000, True),
    "longer_than_registers_odd": rms_norm_case(1, 32771, False),
    "unaligned": rms_norm_case(3, 4096, True, unaligned=True),
    "many_short_rows": rms_norm_case(300, 64, True),
    "rows_of_one_warp": rms_norm_case(5, 264, True),
    "heads_in_qkv": rms_norm_heads_in_place(4, 2, 128),
    "odd_heads_in_qkv": rms_norm_heads_in_place(3, 1, 20),
}

# ---- rope


def rotary_table(max_position: int, rotary_size: int) -> torch.Tensor:
    frequencies = 10000.0 ** -(torch.arange(0, rotary_size, 2).double() / rotary_size)
    angles = torch.arange(max_position).double()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1).float()


def rope_reference(x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    half = table.shape[1] // 2
    angles = table.double()[positions.long()][:, None]
    cos, sin = angles[..., :half], angles[..., half:]
    out = x.double().clone()
    first, second = x[..., :half].double(), x[..., half : 2 * half].double()
    out[..., :half] = first * cos - second * sin
    out[..., half : 2 * half] = second * cos + first * sin
    return out


def rope_case(
    tokens: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    rotary_size: int,
    unaligned: bool = False,
) -> Callable[..., Result]:
    """query and key are views into a fused qkv row; v must stay as it is."""

    def run(generator: torch.Generator, dtype: torch.dtype) -> Result:
        qkv = normal(generator, dtype, tokens, heads + 2 * kv_heads, head_size)
        if unaligned:
            qkv = shifted(qkv)
        table = rotary_table(512, rotary_size)
        positions = torch.randint(0, 512, (tokens,), generator=generator, dtype=torch.int32)
        positions[0], positions[-1] = 0, 511
        expected = qkv.double()
        rotated = rope_reference(qkv[:, : heads + kv_heads], table, positions)
        expected[:, : heads + kv_heads] = rotated
        ops.rope(qkv[:, :heads], qkv[:, heads : heads + kv_heads], positions, table)
        return Result({"qkv": qkv}, {"qkv": expected})

    return run


ROPE = {
    "head64": rope_case(5, 9, 3, 64, 64),
    "head128": rope_case(33, 8, 2, 128, 128),
    "one_token": rope_case(1, 4, 4, 128, 128),
    "partial_rotary": rope_case(4, 4, 1, 80, 32),
    "odd_half": rope_case(4, 2, 2, 80, 54),
    "unaligned": rope_case(3, 4, 2, 64, 64, unaligned=True),
    "more_heads_than_threads": rope_case(2, 96, 8, 128, 128),
}

# ---- silu_mul


def silu_mul_case(
    tokens: int, size: int, scale: float = 1.0, unaligned: bool = False
) -> Callable[..., Result]:
    def run(generator: torch.Generator, dtype: torch.dtype) -> Result:
        gate_up = (normal(generator, torch.float32, tokens, 2 * size) * scale).to(dtype)
        if unaligned:
            gate_up = shifted(gate_up)
        gate, up = gate_up[:, :size].double(), gate_up[:, size:].double()
        out = torch.empty(tokens, size, dtype=dtype)
        ops.silu_mul(out, gate_up)
        return Result({"out": out}, {"out": gate / (1 + torch.exp(-gate)) * up})

    return run


SILU_MUL = {
    "one_token": silu_mul_case(1, 1536),
    "batch": silu_mul_case(31, 1536),
    "odd_size": silu_mul_case(3, 101),
    "below_vector": silu_mul_case(2, 1),
    "saturating": silu_mul_case(3, 128, 60.0),
    "long_rows": silu_mul_case(2, 16384),
    "unaligned": silu_mul_case(5, 136, unaligned=True),
}

# ---- dequantize


GGML_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


def random_blocks(generator: torch.Generator, name: str, num_blocks: int) -> np.ndarray:
    """Bytes of every value in the packed parts and finite scales."""
    import gguf  # CPU tests alone need it

    _, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    raw = torch.randint(0, 256, (num_blocks, block_bytes), generator=generator, dtype=torch.uint8)
    blocks = raw.numpy()
    scales = {
        "Q4_0": [0],
        "Q4_1": [0, 2],
        "Q8_0": [0],
        "Q4_K": [0, 2],
        "Q5_K": [0, 2],
        "Q6_K": [208],
    }
    for offset in scales.get(name, []):
        scale = torch.randn(num_blocks, 1, generator=generator).numpy().astype(np.float16) * 0.01
        blocks[:, offset : offset + 2] = scale.astype(np.float16).view(np.uint8)
    if name == "F16":  # no NaN or infinity: those have several bit patterns
        blocks[:, 1] &= 0xBB
    if name in ("F32", "BF16"):
        blocks[:, -1] &= 0xBF
    return blocks


def dequantize_case(name: str, num_blocks: int) -> Callable[..., Result]:
    def run(generator: torch.Generator, dtype: torch.dtype) -> Result:
        import gguf

        kind = gguf.GGMLQuantizationType[name]
        blocks = random_blocks(generator, name, num_blocks)
        flat = blocks.reshape(-1)
        if name == "F32":
            flat = flat.view(np.float32)
        elif name == "F16":
            flat = flat.view(np.float16)
        expected = torch.from_numpy(gguf.dequantize(flat, kind).astype(np.float32)).reshape(-1)
        out = torch.full(expected.shape, float("nan"), dtype=dtype)
        ops.dequantize(out, torch.from_numpy(blocks.reshape(-1)), int(kind))
        return Result({"out": out}, {"out": expected.to(dtype)}, exact=True)

    return run


DEQUANTIZE = {name: dequantize_case(name, 131) for name in GGML_TYPES} | {
    f"{name}_one_block": dequantize_case(name, 1) for name in GGML_TYPES
}


def make_cases(
    op: str, runs: dict[str, Callable[..., Result]], dtypes: Iterable[torch.dtype] = FLOAT_DTYPES
) -> list[OpCase]:
    return [OpCase(op, name, dtype, run) for name, run in runs.items() for dtype in dtypes]


CASES = [
    *make_cases("rms_norm", RMS_NORM),
    *make_cases("rope", ROPE),
    *make_cases("silu_mul", SILU_MUL),
    *make_cases("dequantize", DEQUANTIZE),
]


def all_cases() -> list[OpCase]:
    """The cases of this file and of every ``*_cases.py`` beside it."""
    cases = list(CASES)
    for path in sorted(Path(__file__).parent.glob("*_cases.py")):
        cases += importlib.import_module(f"{__package__}.{path.stem}").CASES
    return cases
