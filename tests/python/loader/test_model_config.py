"""config.json and generation_config.json become a ModelConfig, or a named error."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from checkpoints import make_model, save
from vllm_lite.config import EngineConfig, resolve_dtype_name
from vllm_lite.model_config import ModelConfig, load_model_config
from vllm_lite.model_files import ModelFiles

PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
}


def read(
    directory: Path, generation: dict[str, Any] | None = None, without: str = "", **fields: Any
) -> ModelConfig:
    values = {key: value for key, value in {**PLAIN, **fields}.items() if key != without}
    (directory / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return load_model_config(ModelFiles(directory))


def test_reading_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    read(tmp_path)
    code = (
        "import sys; from pathlib import Path;"
        "from vllm_lite.model_config import load_model_config;"
        "from vllm_lite.model_files import ModelFiles;"
        f"load_model_config(ModelFiles(Path({str(tmp_path)!r})));"
        "assert not {'torch', 'transformers', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_defaults_of_absent_fields(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.num_kv_heads, config.head_size) == (2, 64)
    assert (config.rms_norm_eps, config.rope.theta, config.rope.kind) == (1e-6, 10_000.0, "default")
    assert not config.tie_word_embeddings and not config.attention_bias and not config.qk_norm
    assert config.layer_windows == (0, 0) and config.sliding_window == 0
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())
    assert config.generation_defaults == {}


def test_model_type_stands_in_for_absent_architectures(tmp_path: Path) -> None:
    config = read(tmp_path, without="architectures", model_type="qwen3", num_key_value_heads=1)
    assert config.architecture == "Qwen3ForCausalLM"
    assert config.head_size == 128  # its own default


@pytest.mark.case("SEC-08")
def test_code_in_the_checkpoint_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "modeling.py").write_text("raise SystemExit('ran')")
    config = read(tmp_path, auto_map={"AutoModelForCausalLM": "modeling.Llama"})
    assert config.architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures is .*GPT2LMHeadModel.*supported"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"hidden_size": "128"}, "hidden_size is '128'"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": 129}, "hidden_size is 129"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3.*num_attention_heads"),
        ({"head_dim": 40}, "head_dim is 40; supported: 32, 64"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be at most"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype is 'float8_e4m3fn'"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type is 'longrope'"),
        ({"rope_scaling": {"type": "mrope"}}, "rope_scaling.type is 'mrope'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "rope_scaling.factor is -1"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_theta": 1.0}, "rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_is_not_supported_is_named(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        read(tmp_path, **fields)
    assert "config.json" in str(error.value)


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "max_position_embeddings"])
def test_a_missing_field_is_named(field: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"config\.json: {field} is missing"):
        read(tmp_path, without=field)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000])
def test_a_damaged_file_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        load_model_config(ModelFiles(tmp_path))


LINEAR = {"type": "linear", "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.case("NUM-05", "NUM-06")
@pytest.mark.parametrize(
    ("max_position", "scaling", "limit"),
    [
        (64, LINEAR, 128),
        (64, DYNAMIC, 256),
        (64, LLAMA3, 64),
        (64, YARN, 256),
        # An already scaled max_position_embeddings is not scaled again.
        (256, {**YARN, "original_max_position_embeddings": 64}, 256),
        (80, {**YARN, "original_max_position_embeddings": 64}, 256),
        (256, {"rope_type": "yarn", "original_max_position_embeddings": 64}, 256),
    ],
)
def test_length_limit_after_scaling(
    max_position: int, scaling: dict[str, Any], limit: int, tmp_path: Path
) -> None:
    config = read(tmp_path, max_position_embeddings=max_position, rope_scaling=scaling)
    assert config.max_position_embeddings == limit


def test_both_spellings_of_rope_are_one(tmp_path: Path) -> None:
    old = read(tmp_path, rope_theta=5000.0, rope_scaling={"type": "linear", "factor": 2.0})
    new = read(
        tmp_path, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    )
    nested = {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}}
    assert old == new == read(tmp_path, rope_parameters=nested)
    nested["sliding_attention"] = {"rope_type": "default", "rope_theta": 5000.0}
    with pytest.raises(ValueError, match="rope_parameters"):
        read(tmp_path, rope_parameters=nested)


@pytest.mark.case("NUM-08")
def test_windows(tmp_path: Path) -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 1}
    config = read(tmp_path, **mistral, sliding_window=16)
    assert config.layer_windows == (16, 16) and config.all_layers_windowed
    assert read(tmp_path, **mistral, sliding_window=None).layer_windows == (0, 0)
    qwen = {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 1, "sliding_window": 16}
    assert read(tmp_path, **qwen, use_sliding_window=False).layer_windows == (0, 0)
    config = read(tmp_path, **qwen, use_sliding_window=True, max_window_layers=1)
    assert config.layer_windows == (0, 16)
    assert config.sliding_window == 16 and not config.all_layers_windowed
    types = ["sliding_attention", "full_attention"]
    config = read(tmp_path, **qwen, use_sliding_window=True, layer_types=types)
    assert config.layer_windows == (16, 0)
    with pytest.raises(ValueError, match="layer_types"):
        read(tmp_path, **qwen, use_sliding_window=True, layer_types=types[:1])


@pytest.mark.case("NUM-16")
@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [(2, None, (2,)), (None, [5, 6], (5, 6)), (2, [7, 2], (2, 7)), ([3], 4, (3, 4))],
)
def test_end_tokens_are_the_union(
    in_config: Any, in_generation: Any, expected: tuple[int, ...], tmp_path: Path
) -> None:
    config = read(tmp_path, {"eos_token_id": in_generation}, eos_token_id=in_config)
    assert config.eos_token_ids == expected


def test_special_ids_outside_the_vocabulary_are_dropped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert read(tmp_path, eos_token_id=[2, 100], bos_token_id=-1).eos_token_ids == (2,)
    assert "100" in caplog.text and "-1" in caplog.text


def test_generation_defaults(tmp_path: Path) -> None:
    generation = {"temperature": 0.6, "top_k": 20, "do_sample": True, "transformers_version": "5"}
    config = read(tmp_path, generation)
    assert config.generation_defaults == {"temperature": 0.6, "top_k": 20}
    with pytest.raises(ValueError, match=r"generation_config\.json: top_p"):
        read(tmp_path, {"top_p": "high"})
    with pytest.raises(ValueError, match=r"generation_config\.json: max_new_tokens"):
        read(tmp_path, {"max_new_tokens": 0})


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fields_as_transformers_reads_them(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    files = save(make_model(family).to(dtype), tmp_path)
    config, expected = load_model_config(files), transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.vocab_size == expected.vocab_size
    assert config.num_layers == expected.num_hidden_layers
    assert config.num_kv_heads == expected.num_key_value_heads
    assert config.rms_norm_eps == expected.rms_norm_eps
    assert config.rope.theta == expected.rope_parameters["rope_theta"]
    assert config.max_position_embeddings == expected.max_position_embeddings
    assert config.tie_word_embeddings == expected.tie_word_embeddings
    assert resolve_dtype_name("auto", config) == str(dtype).removeprefix("torch.")


def test_heads_of_32_are_for_the_cpu_alone(tmp_path: Path) -> None:
    model = read(tmp_path, head_dim=32)
    assert EngineConfig(device="cpu").resolve(model).device == "cpu"
    with pytest.raises(ValueError, match="head_dim 32 is not supported on CUDA"):
        EngineConfig(device="cuda").resolve(model)


@pytest.mark.case("NUM-11")
def test_dtype_rule(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert resolve_dtype_name("auto", config) == "bfloat16"
    assert resolve_dtype_name("float16", config) == "float16"
    with pytest.raises(ValueError, match=r"dtype must be one of .*'int8'"):
        EngineConfig(dtype="int8")


def test_without_a_dtype_field_the_weights_tell(tmp_path: Path) -> None:
    files = save(make_model("llama").to(torch.float16), tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    assert (fields.pop("dtype", None), fields.pop("torch_dtype", None)) != (None, None)
    path.write_text(json.dumps(fields))
    assert load_model_config(files).checkpoint_dtype == "float16"
