"""Tiny random checkpoints made with transformers, and a paged runner to compare with it."""

from pathlib import Path
from typing import Any

import torch
import transformers

from vllm_lite.config import kv_row_size, resolve_dtype_name
from vllm_lite.model_config import load_model_config
from vllm_lite.model_files import ModelFiles
from vllm_lite.models import CausalLM, ForwardBatch, load_model

VOCAB_SIZE = 131

_CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def make_model(family: str, seed: int = 0, **config: Any) -> Any:
    """A transformers model in float32 with eager attention; ``config`` overrides the tiny sizes.

    Every parameter is random, the norms' and biases' too, and attention scores are large enough to
    tell positions
    apart: with transformers' own initial values many mistakes would stay below the tolerance.
    """
    config_class, model_class = _CLASSES[family]
    model = model_class(config_class(**{**_SIZES, **config}, attn_implementation="eager"))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            random = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(
                    0.3 * random if "bias" in _name(model, parameter) else 1 + 0.3 * random
                )
            else:
                parameter.copy_(random * parameter.shape[1] ** -0.5)
    return model.eval()


def save(model: Any, directory: Path, **options: Any) -> ModelFiles:
    """Writes a Hugging Face directory; ``options``: those of save_pretrained."""
    model.save_pretrained(directory, **options)
    return ModelFiles(directory)


def load(files: ModelFiles, max_model_len: int | None = None, dtype: str = "float32") -> CausalLM:
    config = load_model_config(files)
    limit = max_model_len or config.max_position_embeddings
    return load_model(files, config, getattr(torch, resolve_dtype_name(dtype, config)), limit)


def prompt(length: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (length,), generator=generator).tolist()


@torch.inference_mode()
def reference_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """transformers' logits at every position, float32 ``[num_tokens, vocab_size]``."""
    return model(torch.tensor([token_ids])).logits[0].float()


class PagedRunner:
    """Runs sequences through a model with a paged cache: scattered blocks that begin as NaN."""

    def __init__(
        self,
        model: CausalLM,
        num_blocks: int = 64,
        block_size: int = 16,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """kv_dtype: of the cache; the model's if there is none."""
        config = model.config
        kv_dtype = kv_dtype or model.dtype
        row_size = kv_row_size(config.head_size, str(kv_dtype).removeprefix("torch."))
        shape = (config.num_layers, num_blocks, 2, config.num_kv_heads, block_size, row_size)
        self._model = model
        self._block_size = block_size
        # Every bit set is NaN in all of them: of an int8 cache the scales.
        self._arena = (
            torch.full(shape, 255, dtype=torch.uint8)
            .repeat_interleave(kv_dtype.itemsize, -1)
            .view(kv_dtype)
        )
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1))
        self._free = order.to(torch.int32).tolist()
        self._tables = torch.full((8, num_blocks), -1, dtype=torch.int32)
        self._lengths = [0] * 8
        self._num_blocks = [0] * 8

    def step(self, tokens_of_rows: dict[int, list[int]]) -> dict[int, torch.Tensor]:
        """Computes the next tokens of some rows; returns the logits at each of them."""
        token_ids, positions, slots, starts, lengths = [], [], [], [0], []
        for row, tokens in tokens_of_rows.items():
            begin = self._lengths[row]
            self._lengths[row] = begin + len(tokens)
            while self._num_blocks[row] * self._block_size < self._lengths[row]:
                self._tables[row, self._num_blocks[row]] = self._free.pop()
                self._num_blocks[row] += 1
            for position in range(begin, begin + len(tokens)):
                block = int(self._tables[row, position // self._block_size])
                slots.append(block * self._block_size + position % self._block_size)
                positions.append(position)
            token_ids += tokens
            starts.append(len(token_ids))
            lengths.append(self._lengths[row])
        batch = ForwardBatch(
            token_ids=_int32(token_ids),
            positions=_int32(positions),
            slot_mapping=torch.tensor(slots),
            query_start=_int32(starts),
            seq_lens=_int32(lengths),
            rows=_int32(list(tokens_of_rows)),
            block_tables=self._tables,
            logits_indices=_int32(list(range(len(token_ids)))),
        )
        self._model.forward(batch, self._arena)
        logits = self._model.logits(batch.logits_indices)
        assert logits.dtype == torch.float32
        return {
            row: logits[starts[index] : starts[index + 1]].clone()
            for index, row in enumerate(tokens_of_rows)
        }

    def share_blocks(self, source: int, row: int, num_blocks: int) -> None:
        """Begins ``row`` with the first blocks of ``source``, as a prefix hit does."""
        self._tables[row, :num_blocks] = self._tables[source, :num_blocks]
        self._num_blocks[row] = num_blocks
        self._lengths[row] = num_blocks * self._block_size

    def drop_blocks(self, row: int, num_blocks: int) -> None:
        """Frees the first blocks of ``row``: nothing may read them or their entries any more."""
        self._arena[:, self._tables[row, :num_blocks].long()] = float("nan")
        self._tables[row, :num_blocks] = -1

    def run(self, token_ids: list[int], chunks: list[int], row: int = 0) -> torch.Tensor:
        """The logits at every position, in steps of the given sizes; the rest one by one."""
        sizes = [*chunks, *[1] * (len(token_ids) - sum(chunks))]
        logits, begin = [], 0
        for size in sizes:
            logits.append(self.step({row: token_ids[begin : begin + size]})[row])
            begin += size
        return torch.cat(logits)


def _int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _name(model: Any, parameter: torch.nn.Parameter) -> str:
    return next(name for name, other in model.named_parameters() if other is parameter)
