"""RMS norm with its weight."""

from collections.abc import Iterator

import torch

from vllm_lite import ops
from vllm_lite.layers.memory import WeightMemory
from vllm_lite.loader.weights import Slot


class RmsNorm:
    __slots__ = ("_epsilon", "_name", "weight")

    def __init__(self, name: str, size: int, epsilon: float, memory: WeightMemory) -> None:
        self._name = name
        self._epsilon = epsilon
        self.weight = memory.tensor(size)

    def slots(self) -> Iterator[Slot]:
        yield Slot(f"{self._name}.weight", self.weight)

    def __call__(
        self, out: torch.Tensor, input: torch.Tensor, residual: torch.Tensor | None = None
    ) -> None:
        """With ``residual``: ``residual += input`` first, and the norm is of the new residual."""
        ops.rms_norm(out, input, self.weight, self._epsilon, residual)
