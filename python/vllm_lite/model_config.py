"""What a model is: sizes, positions, special tokens. Needs neither torch nor transformers."""

import json
import logging
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_lite.gguf_file import GgufFile
from vllm_lite.loader.fields import Fields, read_json
from vllm_lite.loader.gguf_config import gguf_facts, gguf_fields
from vllm_lite.model_files import ModelFiles
from vllm_lite.rope_config import RopeConfig, read_rope

logger = logging.getLogger(__name__)

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
HEAD_SIZES = (32, 64, 80, 96, 128, 256)  # what the attention kernels are built for; 32: CPU alone
_MAX_LAYERS = 10_000
DTYPES = ("float32", "bfloat16", "float16")

_GENERATION_DEFAULTS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens",
)  # fmt: skip
_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only model; every field has its effective value, defaults filled in."""

    architecture: str  # a value of ARCHITECTURES
    vocab_size: int  # rows of the embedding, and logits of a token
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    rope: RopeConfig
    layer_windows: tuple[int, ...]  # [num_layers], positions a token of the layer sees; 0: all
    max_position_embeddings: int  # the model's length limit, after rope scaling
    tie_word_embeddings: bool
    attention_bias: bool  # of query, key and value
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMS norm of each query and key head, before rope
    checkpoint_dtype: str  # one of DTYPES, or "quantized"
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # config's, then generation_config's (GGUF: eos, eot, eom)
    # Sampling defaults of generation_config.json under its own names: temperature, top_p, top_k,
    # min_p, repetition_penalty, max_new_tokens; only those that are there.
    generation_defaults: Mapping[str, float] = field(default_factory=dict)

    @property
    def sliding_window(self) -> int:
        """The window of the layers that have one; 0: none has. All windows of a model are equal."""
        return max(self.layer_windows)

    @property
    def all_layers_windowed(self) -> bool:
        """Whether KV that has fallen out of the window is needed by no layer."""
        return min(self.layer_windows) > 0


def load_model_config(files: ModelFiles) -> ModelConfig:
    """Reads and checks the configuration of a model.

    Raises ValueError naming file and field for whatever is missing, malformed or not supported.
    """
    if files.is_gguf:
        with GgufFile(files.path, vocabulary=False) as gguf:
            config = _parse(gguf_fields(gguf), Fields(files.path, {}))
            return replace(config, **gguf_facts(gguf))
    fields = read_json(files.path / "config.json")
    generation_path = files.path / "generation_config.json"
    generation = (
        read_json(generation_path) if generation_path.exists() else Fields(generation_path, {})
    )
    return replace(_parse(fields, generation), checkpoint_dtype=_checkpoint_dtype(fields))


def _parse(fields: Fields, generation: Fields) -> ModelConfig:
    architecture = _architecture(fields)
    if fields.get("quantization_config") is not None:
        raise fields.error("quantization_config", "only unquantized weights and GGUF are supported")
    if fields.text("hidden_act", "silu") != "silu":
        raise fields.error("hidden_act", "supported: silu")
    hidden_size = fields.integer("hidden_size")
    num_layers = fields.integer("num_hidden_layers")
    if num_layers > _MAX_LAYERS:
        raise fields.error("num_hidden_layers", f"it must be at most {_MAX_LAYERS}")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = _num_kv_heads(fields, architecture, num_heads)
    head_size = _head_size(fields, architecture, hidden_size, num_heads)
    rope, limit = read_rope(fields, head_size, fields.integer("max_position_embeddings"))
    vocab_size = fields.integer("vocab_size")
    llama, qwen3 = architecture == "LlamaForCausalLM", architecture == "Qwen3ForCausalLM"
    attention_bias = (llama or qwen3) and fields.boolean("attention_bias", False)
    bos = fields.token_ids("bos_token_id") + generation.token_ids("bos_token_id")
    eos = fields.token_ids("eos_token_id") + generation.token_ids("eos_token_id")
    bos, eos = (_inside_vocabulary(fields, ids, vocab_size) for ids in (bos, eos))
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        layer_windows=_layer_windows(fields, architecture, num_layers),
        max_position_embeddings=limit,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        attention_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        attention_output_bias=attention_bias,
        mlp_bias=llama and fields.boolean("mlp_bias", False),
        qk_norm=qwen3,
        checkpoint_dtype="float32",
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(eos),
        generation_defaults=_generation_defaults(generation),
    )


def _architecture(fields: Fields) -> str:
    named = fields.get("architectures", [])
    if not isinstance(named, list) or len(named) > 1:
        raise fields.error("architectures", "it must be a list with one name")
    # Code that a checkpoint brings along (auto_map) is never run; the architecture's name alone
    # decides.
    name = named[0] if named else ARCHITECTURES.get(fields.text("model_type"))
    if name not in ARCHITECTURES.values():
        raise fields.error(
            "architectures" if named else "model_type",
            f"supported: {', '.join(ARCHITECTURES.values())}",
        )
    return str(name)


def _num_kv_heads(fields: Fields, architecture: str, num_heads: int) -> int:
    if "num_key_value_heads" not in fields.values and architecture != "LlamaForCausalLM":
        raise ValueError(f"{fields.path}: num_key_value_heads is missing")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_key_value_heads", f"it must divide num_attention_heads ({num_heads})"
        )
    return num_kv_heads


def _head_size(fields: Fields, architecture: str, hidden_size: int, num_heads: int) -> int:
    if architecture == "Qwen3ForCausalLM":
        head_size = fields.integer("head_dim", 128)
    else:
        head_size = fields.integer("head_dim", max(hidden_size // num_heads, 1))
        if fields.get("head_dim") is None and hidden_size % num_heads:
            raise fields.error("hidden_size", f"it must be a multiple of the {num_heads} heads")
    if head_size not in HEAD_SIZES:
        raise ValueError(
            f"{fields.path}: head_dim is {head_size}; supported: {', '.join(map(str, HEAD_SIZES))}"
        )
    return head_size


def _layer_windows(fields: Fields, architecture: str, num_layers: int) -> tuple[int, ...]:
    """transformers' rules: none in Llama; in Qwen with use_sliding_window; in Mistral everywhere.

    A list ``layer_types`` decides layer by layer where there is a window.
    """
    if architecture == "LlamaForCausalLM":
        return (0,) * num_layers
    qwen = architecture.startswith("Qwen")
    if qwen and not fields.boolean("use_sliding_window", False):
        return (0,) * num_layers
    if "sliding_window" in fields.values and fields.values["sliding_window"] is None:
        return (0,) * num_layers
    window = fields.integer("sliding_window", 4096)
    types = fields.get("layer_types")
    if types is None:
        first = fields.integer("max_window_layers", 28, minimum=0) if qwen else 0
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    known = {"sliding_attention": window, "full_attention": 0}
    if not isinstance(types, list) or len(types) != num_layers or not known.keys() >= set(types):
        raise fields.error(
            "layer_types", f"it must list {' or '.join(known)} for each of {num_layers} layers"
        )
    return tuple(known[layer] for layer in types)


def _inside_vocabulary(fields: Fields, ids: list[int], vocab_size: int) -> list[int]:
    for token in ids:
        if not 0 <= token < vocab_size:
            logger.warning(
                "%s: special token id %d is outside the vocabulary of %d and is not used",
                fields.path, token, vocab_size,
            )  # fmt: skip
    return list(dict.fromkeys(token for token in ids if 0 <= token < vocab_size))


def _generation_defaults(generation: Fields) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in _GENERATION_DEFAULTS:
        value: Any = generation.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise generation.error(name, "it must be a number")
        if name == "max_new_tokens" and (not isinstance(value, int) or value < 1):
            raise generation.error(name, "it must be an integer of at least 1")
        found[name] = value
    return found


def _checkpoint_dtype(fields: Fields) -> str:
    """The dtype that config.json names, or else that of the first tensor in the weights."""
    name = fields.get("dtype", fields.get("torch_dtype"))
    if name is None:
        return _first_tensor_dtype(fields.path.parent)
    if not isinstance(name, str) or name.removeprefix("torch.") not in DTYPES:
        raise fields.error(
            "dtype" if fields.get("dtype") else "torch_dtype", f"supported: {', '.join(DTYPES)}"
        )
    return name.removeprefix("torch.")


def _first_tensor_dtype(directory: Path) -> str:
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(min(length, path.stat().st_size)))
            dtypes = [header[name]["dtype"] for name in header if name != "__metadata__"]
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise ValueError(f"{path}: damaged safetensors header ({error})") from error
        for dtype in dtypes:
            if dtype in _SAFETENSORS_DTYPES:
                return _SAFETENSORS_DTYPES[dtype]
    raise ValueError(f"{directory}: neither config.json nor a safetensors file tells the dtype")
