"""Llama, and what differs from it by biases, head norms and windows: Mistral, Qwen2, Qwen3."""

from collections.abc import Iterator

import torch

from vllm_lite import ops
from vllm_lite.layers.attention import Attention
from vllm_lite.layers.batch import ForwardBatch
from vllm_lite.layers.buffers import StepBuffers
from vllm_lite.layers.memory import WeightMemory
from vllm_lite.layers.mlp import GatedMlp
from vllm_lite.layers.rms_norm import RmsNorm
from vllm_lite.layers.rope import cos_sin_table
from vllm_lite.layers.vocabulary import VocabularyMatrix
from vllm_lite.loader.weights import Slot
from vllm_lite.model_config import ModelConfig


class DecoderLayer:
    def __init__(
        self,
        name: str,
        config: ModelConfig,
        sliding_window: int,
        cos_sin: torch.Tensor,
        memory: WeightMemory,
    ) -> None:
        hidden_size, epsilon = config.hidden_size, config.rms_norm_eps
        self.input_norm = RmsNorm(f"{name}.input_layernorm", hidden_size, epsilon, memory)
        self.attention = Attention(f"{name}.self_attn", config, sliding_window, cos_sin, memory)
        self.mlp_norm = RmsNorm(f"{name}.post_attention_layernorm", hidden_size, epsilon, memory)
        self.mlp = GatedMlp(f"{name}.mlp", config, memory)

    def slots(self) -> Iterator[Slot]:
        for part in (self.input_norm, self.attention, self.mlp_norm, self.mlp):
            yield from part.slots()


class LlamaForCausalLM:
    """Parameters are undefined until the ``slots`` are filled. Steps share their buffers."""

    def __init__(
        self,
        config: ModelConfig,
        memory: WeightMemory,
        max_model_len: int,
        rope_divisors: torch.Tensor | None = None,
    ) -> None:
        self.config = config
        self.dtype = memory.dtype
        cos_sin = cos_sin_table(config.rope, max_model_len, rope_divisors).to(memory.device)
        vocabulary = config.vocab_size, config.hidden_size, memory
        self._embedding = VocabularyMatrix("model.embed_tokens", *vocabulary)
        self._layers = [
            DecoderLayer(f"model.layers.{index}", config, window, cos_sin, memory)
            for index, window in enumerate(config.layer_windows)
        ]
        self._final_norm = RmsNorm("model.norm", config.hidden_size, config.rms_norm_eps, memory)
        self._head = (
            self._embedding
            if config.tie_word_embeddings
            else VocabularyMatrix("lm_head", *vocabulary)
        )
        self._buffers = StepBuffers(config, memory.dtype, memory.device)
        self._kv_arena: torch.Tensor | None = None
        self._kv_caches: tuple[torch.Tensor, ...] = ()

    def slots(self) -> Iterator[Slot]:
        """Every parameter, once."""
        yield from self._embedding.slots()
        for layer in self._layers:
            yield from layer.slots()
        yield from self._final_norm.slots()
        if not self.config.tie_word_embeddings:
            yield from self._head.slots()

    def is_ignorable(self, name: str) -> bool:
        """Whether a tensor that no slot takes may be there, as it repeats what is known."""
        tied_head = name == "lm_head.weight" and self.config.tie_word_embeddings
        return tied_head or name.endswith(".rotary_emb.inv_freq")

    def reserve(self, num_tokens: int, num_logits: int) -> None:
        """See CausalLM."""
        self._buffers.reserve(num_tokens, num_logits)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv_arena: torch.Tensor) -> None:
        """See CausalLM."""
        buffers = self._buffers
        buffers.resize(batch.token_ids.shape[0])
        residual, normed, projected = buffers.residual, buffers.normed, buffers.projected
        if kv_arena is not self._kv_arena:
            self._kv_arena, self._kv_caches = kv_arena, kv_arena.unbind(0)
        self._embedding.embed(residual, batch.token_ids, batch.last_tokens)
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

    @torch.inference_mode()
    def hidden(self, indices: torch.Tensor) -> torch.Tensor:
        """See CausalLM."""
        buffers = self._buffers
        last, residual = buffers.last(len(indices))
        ops.gather_rows(last, buffers.projected, indices, 1)
        ops.gather_rows(residual, buffers.residual, indices, 1)
        self._final_norm(last, last, residual)
        return last

    @torch.inference_mode()
    def logits(self, indices: torch.Tensor) -> torch.Tensor:
        """See CausalLM."""
        out = self._buffers.logits(len(indices))
        self._head.logits(out, self.hidden(indices))
        return out
