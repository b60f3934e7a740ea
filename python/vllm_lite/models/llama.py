"""Llama, and what differs from it by biases, head norms and windows: Mistral, Qwen2, Qwen3."""

from collections.abc import Iterator

import torch

from vllm_lite import ops
from vllm_lite.layers.attention import Attention
from vllm_lite.layers.batch import ForwardBatch
from vllm_lite.layers.buffers import StepBuffers
from vllm_lite.layers.memory import Allocate, WeightMemory
from vllm_lite.layers.mlp import GatedMlp
from vllm_lite.layers.rms_norm import RmsNorm
from vllm_lite.layers.rope import cos_sin_table
from vllm_lite.loader.weights import Slot
from vllm_lite.model_config import ModelConfig


class DecoderLayer:
    def __init__(
        self,
        name: str,
        config: ModelConfig,
        sliding_window: int,
        cos_sin: torch.Tensor,
        allocate: Allocate,
    ) -> None:
        hidden_size, epsilon = config.hidden_size, config.rms_norm_eps
        self.input_norm = RmsNorm(f"{name}.input_layernorm", hidden_size, epsilon, allocate)
        self.attention = Attention(f"{name}.self_attn", config, sliding_window, cos_sin, allocate)
        self.mlp_norm = RmsNorm(f"{name}.post_attention_layernorm", hidden_size, epsilon, allocate)
        self.mlp = GatedMlp(f"{name}.mlp", config, allocate)

    def slots(self) -> Iterator[Slot]:
        for part in (self.input_norm, self.attention, self.mlp_norm, self.mlp):
            yield from part.slots()


class LlamaForCausalLM:
    """Parameters are undefined until the ``slots`` are filled. Steps share their buffers."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        max_model_len: int,
        device: torch.device,
        rope_divisors: torch.Tensor | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        allocate = WeightMemory(dtype, device)
        cos_sin = cos_sin_table(config.rope, max_model_len, rope_divisors).to(device)
        # Logits are float32: rounded to bfloat16, the likeliest tokens are often equal. cuBLAS
        # writes float32 from 16-bit operands; on the CPU the head's matrix has to be float32. A
        # tied embedding is the head's matrix, and reading it rounds to the model's dtype.
        head_dtype = torch.float32 if device.type == "cpu" else dtype
        allocate_head = WeightMemory(head_dtype, device)
        allocate_embedding = allocate_head if config.tie_word_embeddings else allocate
        self._embedding = allocate_embedding(config.vocab_size, config.hidden_size)
        self._layers = [
            DecoderLayer(f"model.layers.{index}", config, window, cos_sin, allocate)
            for index, window in enumerate(config.layer_windows)
        ]
        self._final_norm = RmsNorm("model.norm", config.hidden_size, config.rms_norm_eps, allocate)
        self._lm_head = (
            self._embedding
            if config.tie_word_embeddings
            else allocate_head(config.vocab_size, config.hidden_size)
        )
        self._buffers = StepBuffers(config, dtype, device)
        self._kv_arena: torch.Tensor | None = None
        self._kv_caches: tuple[torch.Tensor, ...] = ()

    def slots(self) -> Iterator[Slot]:
        """Every parameter, once."""
        yield Slot("model.embed_tokens.weight", self._embedding)
        for layer in self._layers:
            yield from layer.slots()
        yield from self._final_norm.slots()
        if not self.config.tie_word_embeddings:
            yield Slot("lm_head.weight", self._lm_head)

    def is_ignorable(self, name: str) -> bool:
        """Whether a tensor that no slot takes may be there, as it repeats what is known."""
        tied_head = name == "lm_head.weight" and self.config.tie_word_embeddings
        return tied_head or name.endswith(".rotary_emb.inv_freq")

    @torch.inference_mode()
    def __call__(self, batch: ForwardBatch, kv_arena: torch.Tensor) -> torch.Tensor:
        """Computes the batch, stores its KV, returns float32 logits ``[num_logits, vocab_size]``.

        kv_arena: ``[num_layers, num_blocks, 2, num_kv_heads, block_size, head_size]`` of the
        model's dtype or, on CUDA, float8_e4m3fn.
        """
        buffers = self._buffers
        buffers.resize(batch.token_ids.shape[0])
        residual, normed, projected = buffers.residual, buffers.normed, buffers.projected
        if kv_arena is not self._kv_arena:
            self._kv_arena, self._kv_caches = kv_arena, kv_arena.unbind(0)
        ops.embedding(residual, self._embedding, batch.token_ids, batch.last_tokens)
        added: torch.Tensor | None = None  # what the residual still lacks
        for layer, kv_cache in zip(self._layers, self._kv_caches, strict=True):
            if added is None:
                layer.input_norm(normed, residual)
            else:
                layer.input_norm(normed, added, residual)
            layer.attention(buffers, batch, kv_cache)
            layer.mlp_norm(normed, projected, residual)
            layer.mlp(buffers)
            added = projected
        return self._logits(projected, residual, batch.logits_indices)

    def _logits(
        self, added: torch.Tensor, residual: torch.Tensor, indices: torch.Tensor
    ) -> torch.Tensor:
        last = added.index_select(0, indices)
        self._final_norm(last, last, residual.index_select(0, indices))
        if last.is_cuda:
            return torch.mm(last, self._lm_head.t(), out_dtype=torch.float32)
        return torch.nn.functional.linear(last.float(), self._lm_head)
