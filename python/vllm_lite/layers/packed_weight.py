"""Matrices as the CPU's products read them."""

from dataclasses import dataclass

import torch

from vllm_lite import ops
from vllm_lite.layers.memory import WeightMemory
from vllm_lite.loader.weights import Checkpoint, read_values


class PackedWeight:
    """A matrix ``[rows, columns]`` in a format of ``ops.WEIGHT_FORMATS``."""

    __slots__ = ("columns", "dtype", "format", "packed", "rows")

    def __init__(self, format: str, rows: int, columns: int, memory: WeightMemory) -> None:
        self.format = format
        self.rows = rows
        self.columns = columns
        self.dtype = memory.dtype
        self.packed = memory.bytes(ops.packed_weight_bytes(format, rows, columns))

    def multiply(
        self, out: torch.Tensor, input: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        """``out = input @ self.T + bias``; out: ``[num_tokens, rows]``, float32 or as input."""
        ops.linear(out, input, self.packed, self.format, bias)

    def multiply_gated(
        self, out: torch.Tensor, input: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        """``silu(gate) * up``, where gate is the first half of the product's columns."""
        ops.linear_silu_mul(out, input, self.packed, self.format, bias)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Some rows of a packed weight, as a place where a tensor of the checkpoint goes."""

    weight: PackedWeight
    first_row: int
    num_rows: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, self.weight.columns

    def load(self, checkpoint: Checkpoint, name: str) -> None:
        format = self.weight.format
        if format == checkpoint.block_format(name):
            self._pack(checkpoint.read_blocks(name))
            return
        values = torch.empty(self.shape, dtype=self.weight.dtype)
        read_values(checkpoint, name, values)
        self.pack(values)

    def pack(self, values: torch.Tensor) -> None:
        """values: of this shape, in the weight's dtype."""
        if self.weight.format != "int8":
            self._pack(values)
            return
        scales = values.abs().amax(dim=1).float() / 127
        numbers = values.float() / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        self._pack(numbers.round_().to(torch.int8), scales)

    def _pack(self, source: torch.Tensor, scales: torch.Tensor | None = None) -> None:
        weight = self.weight
        ops.pack_weight(
            weight.packed, source, weight.format, weight.rows, weight.columns, self.first_row,
            scales,
        )  # fmt: skip
