"""Logits equal transformers' at every position: prompts, chunks and decode, paged."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import PagedRunner, load, make_model, prompt, reference_logits, save

TOLERANCE = 1e-4

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-head-80": ("llama", {"hidden_size": 160, "head_dim": 80}),
    "llama-head-96": ("llama", {"hidden_size": 192, "head_dim": 96, "num_key_value_heads": 2}),
    "llama-head-128": ("llama", {"head_dim": 128, "num_attention_heads": 4}),
    "llama-head-256": ("llama", {"head_dim": 256}),
    "llama-mlp-biases": ("llama", {"mlp_bias": True}),
    "llama-mlp-of-no-whole-panels": ("llama", {"intermediate_size": 200}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"rms_norm_eps": 1e-6}),
    "qwen3-large-epsilon": ("qwen3", {"rms_norm_eps": 1e-2}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
}


def check(reference: Any, directory: Path, length: int, chunks: list[int]) -> None:
    runner = PagedRunner(load(save(reference, directory)))
    tokens = prompt(length)
    expected = reference_logits(reference, tokens)
    torch.testing.assert_close(runner.run(tokens, chunks), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.case("NUM-10", "NUM-13")
@pytest.mark.parametrize("case", FAMILIES)
def test_whole_prompt_then_decode(case: str, tmp_path: Path) -> None:
    family, config = FAMILIES[case]
    check(make_model(family, **config), tmp_path, length=45, chunks=[37])


@pytest.mark.case("NUM-13")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_chunked_prompt(family: str, tmp_path: Path) -> None:
    check(make_model(family), tmp_path, length=50, chunks=[7] * 6)


def test_sequences_in_one_step_do_not_mix(tmp_path: Path) -> None:
    reference = make_model("llama")
    runner = PagedRunner(load(save(reference, tmp_path)))
    texts = {row: prompt(length, seed=row) for row, length in ((2, 40), (5, 23), (0, 31))}
    expected = {row: reference_logits(reference, tokens) for row, tokens in texts.items()}
    # A decode, a whole prompt and a chunk in each step.
    steps = [{2: (0, 39)}, {2: (39, 40), 5: (0, 23), 0: (0, 9)}, {0: (9, 31)}]
    for step in steps:
        logits = runner.step({row: texts[row][begin:end] for row, (begin, end) in step.items()})
        for row, (begin, end) in step.items():
            torch.testing.assert_close(
                logits[row], expected[row][begin:end], atol=TOLERANCE, rtol=0
            )


@pytest.mark.case("NUM-10")
@pytest.mark.parametrize("head_size", [32, 64])
def test_head_size_is_read_and_not_derived_from_hidden_size(head_size: int, tmp_path: Path) -> None:
    """head_dim used to be taken as hidden_size / heads (24 here)."""
    config = {"hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    check(make_model("llama", head_dim=head_size, **config), tmp_path, length=20, chunks=[15])


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.7,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "truncate": False,
    },
}


@pytest.mark.case("NUM-05", "NUM-06")
@pytest.mark.parametrize("kind", ROPES)
def test_rope_scaling(kind: str, tmp_path: Path) -> None:
    rope = {"rope_theta": 5000.0, **ROPES[kind]}
    reference = make_model("llama", rope_parameters=rope, max_position_embeddings=256)
    check(reference, tmp_path, length=251, chunks=[101, 140])


@pytest.mark.case("NUM-06")
@pytest.mark.parametrize("max_model_len", [60, 128], ids=["below-original", "above-original"])
def test_dynamic_rope_has_the_base_of_max_model_len(max_model_len: int, tmp_path: Path) -> None:
    """transformers moves the base with the text; for max_model_len tokens the two must agree."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5000.0}
    reference = make_model("llama", rope_parameters=rope, max_position_embeddings=64)
    model = load(save(reference, tmp_path), max_model_len)
    tokens = prompt(max_model_len)
    expected = reference_logits(reference, tokens)
    for chunks in ([max_model_len - 5], [7] * (max_model_len // 7)):
        logits = PagedRunner(model).run(tokens, chunks)
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


WINDOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": 16}),
    "qwen2-off": (
        "qwen2",
        {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 0},
    ),
    "qwen2-upper-layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen3-interleaved": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 16,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
}


@pytest.mark.case("NUM-08")
@pytest.mark.parametrize("chunks", [[100], [7] * 14], ids=["whole", "chunks-of-7"])
@pytest.mark.parametrize("case", WINDOWS)
def test_sliding_window(case: str, chunks: list[int], tmp_path: Path) -> None:
    family, config = WINDOWS[case]
    check(make_model(family, **config), tmp_path, length=150, chunks=chunks)


@pytest.mark.case("NUM-08")
def test_blocks_that_fell_out_of_the_window_are_not_read(tmp_path: Path) -> None:
    reference = make_model("mistral", sliding_window=16)
    runner = PagedRunner(load(save(reference, tmp_path)))
    tokens = prompt(130)
    expected = reference_logits(reference, tokens)
    runner.run(tokens[:100], [7] * 14)
    runner.drop_blocks(row=0, num_blocks=(101 - 16) // 16)
    logits = runner.run(tokens[100:], [3])
    torch.testing.assert_close(logits, expected[100:], atol=TOLERANCE, rtol=0)


@pytest.mark.case("NUM-08")
@pytest.mark.parametrize("case", ["mistral", "qwen3-interleaved"])
def test_a_cached_prefix_serves_another_sequence(case: str, tmp_path: Path) -> None:
    family, config = WINDOWS[case]
    reference = make_model(family, **config)
    runner = PagedRunner(load(save(reference, tmp_path)))
    first = prompt(70)
    second = [*first[:48], *prompt(30, seed=1)]
    runner.run(first, [70])
    runner.share_blocks(source=0, row=3, num_blocks=3)
    logits = runner.run(second[48:], [25], row=3)
    expected = reference_logits(reference, second)[48:]
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.case("NUM-11")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_half_precision_stays_near_float32(family: str, dtype: str, tmp_path: Path) -> None:
    """Stated tolerance: an error below 2 % (bfloat16) or 0.3 % (float16) of the logits' size."""
    reference = make_model(family)
    tokens = prompt(40)
    expected = reference_logits(reference, tokens)
    runner = PagedRunner(load(save(reference, tmp_path), dtype=dtype))
    error = (runner.run(tokens, [30]) - expected).square().mean().sqrt()
    assert error < {"bfloat16": 2e-2, "float16": 3e-3}[dtype] * expected.square().mean().sqrt()


@pytest.mark.case("NUM-11")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_large_activations_do_not_overflow_inside_the_ops(dtype: str, tmp_path: Path) -> None:
    """Squares of the residual, and attention scores, pass 65504: both are taken in float32."""

    def enlarge(name: str, factor: float) -> Callable[[Any], None]:
        return lambda model: dict(model.named_parameters())[name].data.mul_(factor)

    reference = make_model("llama")
    enlarge("model.embed_tokens.weight", 5000.0)(reference)
    enlarge("model.layers.0.self_attn.q_proj.weight", 60.0)(reference)
    enlarge("model.layers.0.self_attn.k_proj.weight", 60.0)(reference)
    tokens = prompt(40)
    expected = reference_logits(reference, tokens)
    logits = PagedRunner(load(save(reference, tmp_path), dtype=dtype)).run(tokens, [40])
    assert logits.isfinite().all()
    error = (logits - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < 0.1


def test_only_the_asked_logits_are_returned_in_their_order(tmp_path: Path) -> None:
    reference = make_model("llama")
    model = load(save(reference, tmp_path))
    tokens = prompt(12)
    PagedRunner(model).step({0: tokens})
    logits = model.logits(torch.tensor([11, 3, 4], dtype=torch.int32))
    expected = reference_logits(reference, tokens)[[11, 3, 4]]
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def test_the_tiny_models_can_tell_mistakes(tmp_path: Path) -> None:
    """The comparison would be empty if positions or windows hardly moved these logits."""
    tokens = prompt(60)
    plain = reference_logits(make_model("mistral", sliding_window=None), tokens)
    window = reference_logits(make_model("mistral", sliding_window=16), tokens)
    assert (plain - window)[30:].abs().max() > 100 * TOLERANCE
    base = {"rope_theta": 10_000.0}
    one = reference_logits(make_model("llama", rope_parameters=base), tokens)
    yarn = make_model("llama", rope_parameters={**base, **ROPES["yarn"]})
    assert (one - reference_logits(yarn, tokens))[10:].abs().max() > 100 * TOLERANCE
    assert math.isfinite(one.abs().max())
