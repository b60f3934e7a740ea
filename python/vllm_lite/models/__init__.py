"""Models: from a checkpoint to something that computes logits."""

import logging
from collections.abc import Iterable
from typing import Protocol

import torch

from vllm_lite.layers.batch import ForwardBatch
from vllm_lite.layers.memory import WeightMemory
from vllm_lite.loader.gguf import GgufCheckpoint
from vllm_lite.loader.safetensors import SafetensorsCheckpoint
from vllm_lite.loader.weights import Checkpoint, ProgressCallback, Slot, load_weights
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
    dtype: torch.dtype  # of activations

    def slots(self) -> Iterable[Slot]:
        """Every parameter, once."""

    def is_ignorable(self, name: str) -> bool:
        """Whether a tensor that no slot takes may be there, as it repeats what is known."""

    def reserve(self, num_tokens: int, num_logits: int) -> None:
        """Makes room for steps of this size: what ``forward`` and ``logits`` compute in does not
        move until a larger one comes.
        """

    def forward(self, batch: ForwardBatch, kv_arena: torch.Tensor) -> None:
        """Computes the batch's last activations and stores its KV.

        kv_arena: ``[num_layers, num_blocks, 2, num_kv_heads, block_size, head_size]`` of ``dtype``
        or what else ``ops.paged_attention`` takes.
        """

    def hidden(self, indices: torch.Tensor) -> torch.Tensor:
        """Of tokens of the batch (int32): ``[len(indices), hidden_size]``, what the last norm
        gives, until the next call of this or of ``logits``.
        """

    def logits(self, indices: torch.Tensor) -> torch.Tensor:
        """Of tokens of the batch (int32): float32 ``[len(indices), vocab_size]``, until the next
        call.
        """


def load_model(
    files: ModelFiles,
    config: ModelConfig,
    dtype: torch.dtype,
    max_model_len: int,
    progress: ProgressCallback | None = None,
    device: torch.device = CPU,
    random_weights: bool = False,
    quantization: str | None = None,
) -> CausalLM:
    """Loads the weights onto ``device``, one tensor at a time.

    They are converted to ``dtype``, but on the CPU those that a GGUF file has in blocks stay as
    they are.
    quantization: "int8", on the CPU: matrices become 8-bit integers with a scale per row.

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
    plain = quantization or str(dtype).removeprefix("torch.")
    make = _MODELS[config.architecture]
    if random_weights:
        memory = WeightMemory(dtype, device, lambda _: plain)
        return _with_random_weights(make(config, memory, max_model_len))
    checkpoint: Checkpoint = (
        GgufCheckpoint(files, config) if files.is_gguf else SafetensorsCheckpoint(files.path)
    )

    def weight_format(name: str) -> str:
        is_there = name in checkpoint.names()  # if not, load_weights says so
        return (checkpoint.block_format(name) if is_there else None) or plain

    try:
        memory = WeightMemory(dtype, device, weight_format)
        model = make(config, memory, max_model_len, checkpoint.rope_divisors)
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
        target = slot.target
        if isinstance(target, torch.Tensor):
            values = target
        else:
            values = torch.empty(target.shape, dtype=model.dtype)
        if generator is None:
            generator = torch.Generator(values.device).manual_seed(0)
        values.normal_(0.0, 0.02, generator=generator)
        if not isinstance(target, torch.Tensor):
            target.pack(values)
    return model
