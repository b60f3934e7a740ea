"""Dense products."""

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch

from vllm_lite import ops
from vllm_lite.layers.memory import WeightMemory
from vllm_lite.layers.packed_weight import PackedRows, PackedWeight
from vllm_lite.loader.weights import Slot


class Linear:
    """``out = input @ weight.T + bias``; the weight may stack several checkpoint tensors.

    On the CPU neighbours of one format are one packed weight.
    """

    __slots__ = ("_matrices", "_parts", "_weight", "bias")

    def __init__(
        self, parts: Sequence[tuple[str, int]], in_features: int, bias: bool, memory: WeightMemory
    ) -> None:
        """parts: names in the checkpoint, without ``.weight``, and their rows."""
        rows = sum(size for _, size in parts)
        self._parts = tuple(parts)
        self.bias = memory.tensor(rows) if bias else None
        self._weight: torch.Tensor | None = None
        self._matrices: list[PackedWeight] = []
        if not memory.is_packed:
            self._weight = memory.tensor(rows, in_features)
            return
        for format, group in groupby(parts, lambda part: memory.weight_format(f"{part[0]}.weight")):
            size = sum(size for _, size in group)
            self._matrices.append(PackedWeight(format, size, in_features, memory))

    def slots(self) -> Iterator[Slot]:
        start = 0
        for name, size in self._parts:
            yield Slot(f"{name}.weight", self._target(start, size))
            if self.bias is not None:
                yield Slot(f"{name}.bias", self.bias[start : start + size])
            start += size

    def _target(self, start: int, size: int) -> torch.Tensor | PackedRows:
        if self._weight is not None:
            return self._weight[start : start + size]
        for matrix in self._matrices:
            if start < matrix.rows:
                return PackedRows(matrix, start, size)
            start -= matrix.rows
        raise AssertionError("the matrices have all parts' rows")

    def __call__(self, out: torch.Tensor, input: torch.Tensor) -> None:
        """input: ``[num_tokens, in_features]``; out: ``[num_tokens, rows]``."""
        if self._weight is not None:
            # linear(out=) would make a tensor of its own and copy it.
            if self.bias is None:
                torch.mm(input, self._weight.t(), out=out)
            else:
                torch.addmm(self.bias, input, self._weight.t(), out=out)
            return
        start = 0
        for matrix in self._matrices:
            end = start + matrix.rows
            bias = None if self.bias is None else self.bias[start:end]
            matrix.multiply(out[:, start:end], input, bias)
            start = end

    def silu_mul(self, out: torch.Tensor, input: torch.Tensor, products: torch.Tensor) -> None:
        """``out = silu(gate) * up``, where gate is the first half of the products, up the second.

        products: ``[num_tokens, rows]``, used where the two are not one packed weight.
        """
        if len(self._matrices) == 1 and out.shape[1] % ops.PANEL_ROWS == 0:
            self._matrices[0].multiply_gated(out, input, self.bias)
            return
        self(products, input)
        ops.silu_mul(out, products)
