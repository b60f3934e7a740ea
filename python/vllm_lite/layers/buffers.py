"""The intermediate values of a forward step."""

import torch

from vllm_lite.model_config import ModelConfig


class StepBuffers:
    """Tensors ``[num_tokens, size]``, overwritten layer by layer, and those of the logits' rows.

    Views are made when the number of tokens changes; they serve every layer, and every following
    step of the same size. The memory moves when a step is larger than any before and than what was
    reserved.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self._head_size = config.head_size
        query_size = config.num_heads * config.head_size
        self._sizes = (
            *[config.hidden_size] * 3,
            sum(self._heads) * config.head_size,
            query_size,
            2 * config.intermediate_size,
            config.intermediate_size,
        )
        self._last_sizes = (config.hidden_size, config.hidden_size)
        self._vocab_size = config.vocab_size
        self._dtype = dtype
        self._device = device
        self._memory: list[torch.Tensor] = []
        self._last_memory: list[torch.Tensor] = []
        self._logits_memory = torch.empty(0)
        self._capacity = -1
        self._last_capacity = -1
        self.num_tokens = -1
        self.resize(0)

    def reserve(self, num_tokens: int, num_logits: int) -> None:
        """Makes room for steps of this size: the memory moves for larger ones alone."""
        if num_tokens > self._capacity:
            self._memory = self._empty(num_tokens, self._sizes)
            self._capacity = num_tokens
            self.num_tokens = -1
        if num_logits > self._last_capacity:
            self._last_memory = self._empty(num_logits, self._last_sizes)
            self._logits_memory = torch.empty(
                num_logits, self._vocab_size, dtype=torch.float32, device=self._device
            )
            self._last_capacity = num_logits

    def resize(self, num_tokens: int) -> None:
        """Points all buffers at memory for ``num_tokens``; a change leaves them undefined."""
        if num_tokens == self.num_tokens:
            return
        self.reserve(num_tokens, 0)
        views = [memory[:num_tokens] for memory in self._memory]
        self.num_tokens = num_tokens
        self.residual, self.normed, self.projected = views[:3]  # projected: what a block adds
        self.qkv, self.attended, self.gate_up, self.activated = views[3:]
        heads = self.qkv.view(num_tokens, sum(self._heads), self._head_size)
        self.query, self.key, self.value = torch.split(heads, self._heads, dim=1)
        self.attended_heads = self.attended.view(num_tokens, self._heads[0], self._head_size)

    def last(self, num_logits: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Two ``[num_logits, hidden_size]``: of what the last block adds, and of the residual."""
        self.reserve(0, num_logits)
        added, residual = (memory[:num_logits] for memory in self._last_memory)
        return added, residual

    def logits(self, num_logits: int) -> torch.Tensor:
        """float32 ``[num_logits, vocab_size]``."""
        self.reserve(0, num_logits)
        return self._logits_memory[:num_logits]

    def _empty(self, rows: int, sizes: tuple[int, ...]) -> list[torch.Tensor]:
        return [torch.empty(rows, size, dtype=self._dtype, device=self._device) for size in sizes]
