"""A GGUF file's metadata in the terms of a Hugging Face config.json. Needs no torch.

Keys: ggml's docs/gguf.md; what llama.cpp does with them decides what they mean.
"""

from collections import Counter
from typing import Any

from vllm_lite.gguf_file import GGML_TYPES, GgufFile
from vllm_lite.loader.fields import Fields

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
_FLOAT_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def gguf_fields(gguf: GgufFile) -> Fields:
    """The fields of an equivalent config.json; ValueError naming file and key for what has none."""
    metadata = Fields(gguf.path, gguf.metadata)
    arch = metadata.text("general.architecture")
    if arch not in _ARCHITECTURES:
        raise metadata.error("general.architecture", f"supported: {', '.join(_ARCHITECTURES)}")
    if metadata.integer(f"{arch}.expert_count", 0, minimum=0):
        raise metadata.error(f"{arch}.expert_count", "mixtures of experts are not supported")
    if metadata.integer("split.count", 1, minimum=0) > 1:
        raise metadata.error("split.count", "join the parts with llama-gguf-split --merge")
    if "token_embd.weight" not in gguf.tensors:
        raise ValueError(f"{gguf.path}: tensor token_embd.weight is missing")
    values: dict[str, Any] = {
        name: metadata.integer(f"{arch}.{key}") for name, key in _SIZES.items()
    }
    heads = values["num_attention_heads"]
    head_size = metadata.integer(
        f"{arch}.attention.key_length", max(values["hidden_size"] // heads, 1)
    )
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.integer(f"{arch}.{key}", head_size) != head_size:
            raise metadata.error(f"{arch}.{key}", f"it must be the head size, {head_size}")
    values.update(
        architectures=[_ARCHITECTURES[arch]],
        vocab_size=gguf.tensors["token_embd.weight"].shape[0],
        num_key_value_heads=metadata.integer(f"{arch}.attention.head_count_kv", heads),
        head_dim=head_size,
        rms_norm_eps=metadata.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        tie_word_embeddings="output.weight" not in gguf.tensors,
        rope_theta=metadata.number(f"{arch}.rope.freq_base", 10_000.0),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=[
            gguf.metadata[f"tokenizer.ggml.{name}_token_id"]
            for name in ("eos", "eot", "eom")
            if f"tokenizer.ggml.{name}_token_id" in gguf.metadata
        ],
    )
    _add_rope_scaling(values, metadata, arch)
    _add_window(values, metadata, arch)
    return Fields(gguf.path, values)


def gguf_facts(gguf: GgufFile) -> dict[str, Any]:
    """The ModelConfig fields that the tensors themselves tell."""
    tensors, arch = gguf.tensors, gguf.metadata["general.architecture"]
    matrices = Counter(GGML_TYPES[t.ggml_type][0] for t in tensors.values() if len(t.shape) > 1)
    quantized = any(name not in _FLOAT_DTYPES for name in matrices)
    common = matrices.most_common(1)[0][0]
    return {
        "attention_bias": "blk.0.attn_q.bias" in tensors or arch == "qwen2",
        "attention_output_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "checkpoint_dtype": "quantized" if quantized else _FLOAT_DTYPES[common],
    }


def _add_rope_scaling(values: dict[str, Any], metadata: Fields, arch: str) -> None:
    prefix = f"{arch}.rope.scaling."
    kind = metadata.text(prefix + "type", "none")
    legacy = metadata.number(f"{arch}.rope.scale_linear", 1.0)
    if kind == "none" and legacy == 1.0:
        return
    if kind not in ("none", "linear", "yarn"):
        raise metadata.error(prefix + "type", "supported: none, linear, yarn")
    scaling = {
        "rope_type": "yarn" if kind == "yarn" else "linear",
        "factor": metadata.number(prefix + "factor", legacy),
    }
    original = metadata.get(prefix + "original_context_length")
    if kind == "yarn":
        for key, neutral in (("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0)):
            if metadata.get(prefix + key, neutral) != neutral:
                raise metadata.error(prefix + key, f"only {neutral} is supported")
        for key in ("attn_factor", "yarn_attn_factor"):
            if metadata.number(prefix + key, 1.0) != 1.0:
                raise metadata.error(prefix + key, "only 1 is supported")
        scaling["original_max_position_embeddings"] = original
        scaling["beta_fast"] = metadata.get(prefix + "yarn_beta_fast")
        scaling["beta_slow"] = metadata.get(prefix + "yarn_beta_slow")
    elif original is not None:
        values["max_position_embeddings"] = metadata.integer(prefix + "original_context_length")
    values["rope_scaling"] = scaling


def _add_window(values: dict[str, Any], metadata: Fields, arch: str) -> None:
    """llama.cpp gives these architectures no window; one that would bind is refused."""
    key = f"{arch}.attention.sliding_window"
    window = metadata.integer(key, 0, minimum=0)
    if 0 < window < values["max_position_embeddings"]:
        raise metadata.error(
            key, f"a window below the context length is not supported in GGUF files of {arch}"
        )
