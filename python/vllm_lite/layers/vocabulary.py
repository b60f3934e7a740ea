"""The two ends of a model: from token ids to activations, and from activations to logits."""

from collections.abc import Iterator

import torch

from vllm_lite import ops
from vllm_lite.layers.memory import WeightMemory
from vllm_lite.layers.packed_weight import PackedRows, PackedWeight
from vllm_lite.loader.weights import Slot


class VocabularyMatrix:
    """``[vocab_size, hidden_size]``: an embedding, a head, or both at once."""

    __slots__ = ("_name", "_weight")

    def __init__(self, name: str, vocab_size: int, hidden_size: int, memory: WeightMemory) -> None:
        """name: in the checkpoint, without ``.weight``."""
        self._name = f"{name}.weight"
        self._weight: torch.Tensor | PackedWeight
        if memory.is_packed:
            format = memory.weight_format(self._name)
            self._weight = PackedWeight(format, vocab_size, hidden_size, memory)
        else:
            self._weight = memory.tensor(vocab_size, hidden_size)

    def slots(self) -> Iterator[Slot]:
        weight = self._weight
        if isinstance(weight, PackedWeight):
            yield Slot(self._name, PackedRows(weight, 0, weight.rows))
        else:
            yield Slot(self._name, weight)

    def embed(
        self, out: torch.Tensor, token_ids: torch.Tensor, last_tokens: torch.Tensor | None
    ) -> None:
        """out: ``[num_tokens, hidden_size]``; the rest: see ``ops.embedding``."""
        weight = self._weight
        if isinstance(weight, PackedWeight):
            ops.packed_embedding(
                out, weight.packed, weight.format, weight.rows, token_ids, last_tokens
            )
        else:
            ops.embedding(out, weight, token_ids, last_tokens)

    def logits(self, out: torch.Tensor, hidden: torch.Tensor) -> None:
        """out: float32 ``[num_logits, vocab_size]``. Rounded to 16 bits, the likeliest tokens are
        often equal.
        """
        weight = self._weight
        if isinstance(weight, PackedWeight):
            weight.multiply(out, hidden)
        elif hidden.dtype == torch.float32:
            torch.mm(hidden, weight.t(), out=out)
        else:
            torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=out)
