"""Dense products."""

from collections.abc import Iterator, Sequence

import torch

from vllm_lite.layers.memory import Allocate
from vllm_lite.loader.weights import Slot


class Linear:
    """``out = input @ weight.T + bias``; the weight may stack several checkpoint tensors."""

    __slots__ = ("_parts", "bias", "weight")

    def __init__(
        self, parts: Sequence[tuple[str, int]], in_features: int, bias: bool, allocate: Allocate
    ) -> None:
        """parts: names in the checkpoint, without ``.weight``, and their rows."""
        rows = sum(size for _, size in parts)
        self._parts = tuple(parts)
        self.weight = allocate(rows, in_features)
        self.bias = allocate(rows) if bias else None

    def slots(self) -> Iterator[Slot]:
        start = 0
        for name, size in self._parts:
            yield Slot(f"{name}.weight", self.weight[start : start + size])
            if self.bias is not None:
                yield Slot(f"{name}.bias", self.bias[start : start + size])
            start += size

    def __call__(self, out: torch.Tensor, input: torch.Tensor) -> None:
        """input: ``[num_tokens, in_features]``; out: ``[num_tokens, rows]``."""
        if input.is_cuda:
            # linear(out=) would make a tensor of its own and copy it.
            if self.bias is None:
                torch.mm(input, self.weight.t(), out=out)
            else:
                torch.addmm(self.bias, input, self.weight.t(), out=out)
            return
        torch.nn.functional.linear(
            input,
            self.weight,
            self.bias,
            out=out,  # type: ignore[call-arg]  # the stub lacks it
        )
