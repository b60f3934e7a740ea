"""The models of the workloads in the formats that the engines read, each written once.

* ``smollm2``: the built-in model's Q4_1 file, decoded and rounded to bfloat16.
* ``llama-1b``: random weights in workloads.LLAMA_1B_SHAPE, with SmolLM2's tokenizer.

Both as Hugging Face directory and as BF16 GGUF file, with the same values.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from vllm_lite.gguf_file import GgufFile
from vllm_lite.gguf_tokenizer import build_gguf_tokenizer
from vllm_lite.loader.gguf import GgufCheckpoint
from vllm_lite.loader.gguf_config import gguf_fields
from vllm_lite.model_config import load_model_config
from vllm_lite.model_files import find_model
from workloads import LLAMA_1B, LLAMA_1B_SHAPE, SMOLLM2

_GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def directory_of(model: str, models: Path) -> Path:
    """The Hugging Face directory of a model, written if it is not there."""
    directory = models / model
    if not directory.exists():
        unfinished = _fresh(models / f"{model}.unfinished")
        {SMOLLM2: _write_smollm2, LLAMA_1B: _write_llama_1b}[model](unfinished)
        os.rename(unfinished, directory)
    return directory


def gguf_of(model: str, models: Path) -> Path:
    """The BF16 GGUF file of a model, written if it is not there."""
    path = models / f"{model}-bf16.gguf"
    if not path.exists():
        directory = directory_of(model, models)
        unfinished = path.with_suffix(".unfinished")
        _write_gguf(directory, unfinished)
        os.rename(unfinished, path)
    return path


def _fresh(directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def _write_smollm2(directory: Path) -> None:
    files = find_model(SMOLLM2)
    checkpoint = GgufCheckpoint(files, load_model_config(files))
    tensors = {}
    for name in checkpoint.names():
        tensors[name] = torch.empty(checkpoint.shape(name), dtype=torch.bfloat16)
        checkpoint.read(name, tensors[name])
    checkpoint.close()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    _write_config(directory, {})
    _write_tokenizer(directory)


def _write_llama_1b(directory: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**LLAMA_1B_SHAPE)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    tensors = model.state_dict()
    if LLAMA_1B_SHAPE["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    _write_config(directory, LLAMA_1B_SHAPE)
    _write_tokenizer(directory)


def _write_config(directory: Path, changes: dict[str, Any]) -> None:
    """SmolLM2's config.json with some fields changed."""
    with GgufFile(find_model(SMOLLM2).path) as source:
        fields = {**gguf_fields(source).values, **changes}
    fields["head_dim"] = fields["hidden_size"] // fields["num_attention_heads"]
    # Both spellings of the dtype: transformers 4 and 5.
    fields.update(model_type="llama", hidden_act="silu", dtype="bfloat16", torch_dtype="bfloat16")
    (directory / "config.json").write_text(json.dumps(fields, indent=2))


def _write_tokenizer(directory: Path) -> None:
    with GgufFile(find_model(SMOLLM2).path) as source:
        tokenizer = build_gguf_tokenizer(source.metadata)
        tokens = source.metadata["tokenizer.ggml.tokens"]
    tokenizer.backend.save(str(directory / "tokenizer.json"))
    special = {f"{name}_token": tokens[i] for name, i in tokenizer.special_ids.items()}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": tokenizer.chat_templates.get("default"),
        **{name: special[name] for name in ("bos_token", "eos_token") if name in special},
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def _write_gguf(directory: Path, path: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(path, "llama")
    _add_metadata(writer, config)
    with safe_open(directory / "model.safetensors", "pt") as source:
        for name in source.keys():  # noqa: SIM118 (no mapping)
            tensor = source.get_tensor(name)
            for projection, num_heads in heads.items():
                if projection in name:
                    tensor = _neighbours(tensor, num_heads)
            if tensor.dim() == 1:
                writer.add_tensor(_gguf_name(name), tensor.float().numpy())
            else:
                # numpy has no bfloat16.
                data = tensor.contiguous().view(torch.uint8).numpy()
                kind = gguf.GGMLQuantizationType.BF16
                writer.add_tensor(_gguf_name(name), data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    writer.close()


def _add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    with GgufFile(find_model(SMOLLM2).path) as source:
        tokenizer = {k: v for k, v in source.metadata.items() if k.startswith("tokenizer.")}
    for key, value in tokenizer.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, list(value))


def _neighbours(halves: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of a head as llama.cpp turns them: pairs side by side."""
    half = halves.shape[0] // num_heads // 2
    return halves.view(num_heads, 2, half, -1).transpose(1, 2).reshape(halves.shape)


def _gguf_name(name: str) -> str:
    if name in _GGUF_NAMES:
        return _GGUF_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[rest.removesuffix('.weight')]}.weight"
