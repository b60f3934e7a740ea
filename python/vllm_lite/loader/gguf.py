"""Weights of a GGUF file, decoded to the model's dtype as they are read."""

from collections.abc import Collection

import torch

from vllm_lite import ops
from vllm_lite.gguf_file import GGML_TYPES, GgufFile
from vllm_lite.model_config import ModelConfig
from vllm_lite.model_files import ModelFiles

_ROPE_DIVISORS = "rope_freqs.weight"
_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufCheckpoint:
    """The file is mapped; a tensor is decoded straight into its place."""

    def __init__(self, files: ModelFiles, config: ModelConfig) -> None:
        """Raises GgufError (a ValueError) naming the file if it is damaged or cut off."""
        self.path = files.path
        with GgufFile(self.path, vocabulary=False) as gguf:
            self._tensors = dict(gguf.tensors)
            interleaved = gguf.metadata.get("general.architecture") == "llama"
        self._data = torch.from_file(
            str(self.path), shared=False, size=self.path.stat().st_size, dtype=torch.uint8
        )
        self.rope_divisors = self._read_rope_divisors(config.rope.rotary_size)
        self._names = {_hugging_face_name(name): name for name in self._tensors}
        # llama.cpp's Llama turns neighbouring elements, so its files have the rows of q and k in
        # that order.
        self._interleaved_heads = (
            {"attn_q": config.num_heads, "attn_k": config.num_kv_heads} if interleaved else {}
        )

    def names(self) -> Collection[str]:
        return self._names.keys()

    def describe(self, name: str) -> str:
        return f"{self.path}: tensor {self._names[name]}"

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[self._names[name]].shape

    def num_bytes(self, name: str) -> int:
        return self._tensors[self._names[name]].num_bytes

    def block_format(self, name: str) -> str | None:
        format = GGML_TYPES[self._tensors[self._names[name]].ggml_type][0]
        return format if format.startswith("Q") else None

    def read_blocks(self, name: str) -> torch.Tensor:
        own_name = self._names[name]
        blocks = self._blocks(own_name).view(self.shape(name)[0], -1)
        num_heads = self._num_interleaved_heads(own_name)
        return blocks if num_heads is None else _halves(blocks, num_heads)

    def read(self, name: str, target: torch.Tensor) -> None:
        own_name = self._names[name]
        num_heads = self._num_interleaved_heads(own_name)
        if num_heads is None:
            self._decode(own_name, target)
            return
        pairs = torch.empty_like(target)
        self._decode(own_name, pairs)
        target.copy_(_halves(pairs, num_heads))

    def close(self) -> None:
        """Drops the map."""
        del self._data

    def _num_interleaved_heads(self, own_name: str) -> int | None:
        parts = own_name.split(".")
        return self._interleaved_heads.get(parts[2]) if len(parts) == 4 else None

    def _blocks(self, own_name: str) -> torch.Tensor:
        tensor = self._tensors[own_name]
        return self._data[tensor.offset : tensor.offset + tensor.num_bytes]

    def _decode(self, own_name: str, target: torch.Tensor) -> None:
        ops.dequantize(target, self._blocks(own_name), self._tensors[own_name].ggml_type)

    def _read_rope_divisors(self, rotary_size: int) -> torch.Tensor | None:
        tensor = self._tensors.get(_ROPE_DIVISORS)
        if tensor is None:
            return None
        if tensor.shape != (rotary_size // 2,):
            raise ValueError(
                f"{self.path}: tensor {_ROPE_DIVISORS} has shape {list(tensor.shape)}; "
                f"it must be [{rotary_size // 2}]"
            )
        divisors = torch.empty(tensor.shape, dtype=torch.float32)
        self._decode(_ROPE_DIVISORS, divisors)
        del self._tensors[_ROPE_DIVISORS]
        return divisors


def _halves(pairs: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of a head: from neighbours that turn together to two halves that do."""
    half = pairs.shape[0] // num_heads // 2
    by_pair = pairs.view(num_heads, half, 2, *pairs.shape[1:])
    return by_pair.transpose(1, 2).reshape(pairs.shape)


def _hugging_face_name(name: str) -> str:
    """``blk.3.ffn_up.weight``: ``model.layers.3.mlp.up_proj.weight``; unknown names stay."""
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in _TOP:
        return f"{_TOP[parts[0]]}.{parts[1]}"
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER:
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
    return name
