"""Models: from a checkpoint to something that computes logits."""

import logging
from functools import partial
from typing import Protocol

import torch

from vllm_lite.layers.batch import ForwardBatch
from vllm_lite.loader.gguf import GgufCheckpoint
from vllm_lite.loader.safetensors import SafetensorsCheckpoint
from vllm_lite.loader.weights import Checkpoint, ProgressCallback, load_weights
from vllm_lite.model_config import ModelConfig
from vllm_lite.model_files import ModelFiles
from vllm_lite.models.llama import LlamaForCausalLM

__all__ = ["CausalLM", "ForwardBatch", "load_model"]

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")

_MODELS = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": LlamaForCausalLM,
}


class CausalLM(Protocol):
    """A loaded model. Not to be called from two threads at once."""

    config: ModelConfig
    dtype: torch.dtype  # of weights and activations

    def __call__(self, batch: ForwardBatch, kv_arena: torch.Tensor) -> torch.Tensor:
        """Computes the batch, stores its KV, returns float32 logits ``[num_logits, vocab_size]``.

        kv_arena: ``[num_layers, num_blocks, 2, num_kv_heads, block_size, head_size]`` of ``dtype``
        or, on CUDA, float8_e4m3fn.
        """


def load_model(
    files: ModelFiles,
    config: ModelConfig,
    dtype: torch.dtype,
    max_model_len: int,
    progress: ProgressCallback | None = None,
    device: torch.device = CPU,
    random_weights: bool = False,
) -> CausalLM:
    """Loads the weights onto ``device``, converted to ``dtype`` one tensor at a time.

    max_model_len: positions are below it; it fixes the size of the rope table and the base of
    dynamic rope.
    progress: called with (bytes of the checkpoint done, bytes in all) after each tensor.
    random_weights: no weights are read; for measurements.
    Raises ValueError naming file and tensor (or field) for weights that are missing, surplus,
    damaged or do not fit the configuration.
    """
    if not 1 <= max_model_len <= config.max_position_embeddings:
        raise ValueError(
            f"max_model_len is {max_model_len}; {files.path} allows 1 to "
            f"{config.max_position_embeddings} (after rope scaling)"
        )
    make = partial(_MODELS[config.architecture], config, dtype, max_model_len, device)
    if random_weights:
        return _with_random_weights(make())
    checkpoint: Checkpoint = (
        GgufCheckpoint(files, config) if files.is_gguf else SafetensorsCheckpoint(files.path)
    )
    try:
        model = make(checkpoint.rope_divisors)
        load_weights(model.slots(), checkpoint, model.is_ignorable, progress)
    finally:
        checkpoint.close()
    logger.info(
        "%s: %s, computing in %s (checkpoint: %s)",
        files.path, config.architecture, dtype, config.checkpoint_dtype,
    )  # fmt: skip
    return model


@torch.no_grad()
def _with_random_weights(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Small enough that activations stay finite; the same on every run."""
    generator: torch.Generator | None = None
    for slot in model.slots():
        if generator is None:
            generator = torch.Generator(slot.target.device).manual_seed(0)
        slot.target.normal_(0.0, 0.02, generator=generator)
    return model
