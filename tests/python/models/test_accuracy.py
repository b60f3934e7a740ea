"""bfloat16 and quantised weights: as near to float32 as transformers' own bfloat16 run is. And what
an int8 KV cache costs.

The reference is transformers in float32 with the same weights, dequantised where they were
quantised: what quantisation itself costs is no matter of the kernels. Errors are norms over all
logits, relative; both sides round in other places, so the mean over some texts is compared.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from checkpoints import PagedRunner, make_model, prompt, reference_logits, save
from engine.smollm2 import PROMPTS
from loader.test_gguf_model import write_gguf
from vllm_lite.layers.packed_weight import PackedRows
from vllm_lite.model_config import load_model_config
from vllm_lite.model_files import ModelFiles, find_model
from vllm_lite.models import CausalLM, load_model
from vllm_lite.tokenizer import load_tokenizer

TEXTS = [prompt(60, seed) for seed in range(6)]
MARGIN = 1.1


def mean_error(ours: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(ours, expected, strict=True)]
    return sum(errors) / len(errors)


def random_model() -> Any:
    """Of more and wider layers than the other tests' models, as errors add up over them."""
    return make_model("llama", hidden_size=256, intermediate_size=512, num_hidden_layers=6)


def load(files: ModelFiles, dtype: torch.dtype, quantization: str | None = None) -> CausalLM:
    return load_model(files, load_model_config(files), dtype, 128, quantization=quantization)


def check(reference: Any, model: CausalLM) -> None:
    """reference: transformers' model in float32, with the values of ``model``'s weights."""
    expected = [reference_logits(reference, text) for text in TEXTS]
    rounded = copy.deepcopy(reference).to(torch.bfloat16)
    theirs = mean_error([reference_logits(rounded, text) for text in TEXTS], expected)
    ours = mean_error([PagedRunner(model).run(text, [40, 20]) for text in TEXTS], expected)
    assert 0 < ours < MARGIN * theirs


def test_bfloat16(tmp_path: Path) -> None:
    reference = random_model()
    check(reference, load(save(reference, tmp_path), torch.bfloat16))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_gguf_blocks(kind: str, tmp_path: Path) -> None:
    reference = random_model()
    files = write_gguf(tmp_path / "m.gguf", reference, GGMLQuantizationType[kind])
    check(reference, load(files, torch.bfloat16))


def test_int8(tmp_path: Path) -> None:
    """What rounding to int8 itself costs is asserted beside: a scale serves a whole row."""
    reference = random_model()
    exact = [reference_logits(reference, text) for text in TEXTS]
    model = load(save(reference, tmp_path), torch.bfloat16, "int8")
    parameters = dict(reference.named_parameters())
    for slot in model.slots():
        if isinstance(slot.target, PackedRows):
            values = parameters[slot.name].data.to(torch.bfloat16).float()
            scales = values.abs().amax(1, keepdim=True) / 127
            parameters[slot.name].data.copy_((values / scales).round() * scales)
    check(reference, model)
    loss = mean_error([reference_logits(reference, text) for text in TEXTS], exact)
    assert 0 < loss < 0.06


def test_an_int8_kv_cache_moves_smollm2_by_less_than_two_and_a_half_percent() -> None:
    """1.5 to 1.8 % here: what bfloat16 in place of float32 moves it by."""
    files = find_model("smollm2")
    model = load(files, torch.float32)
    tokenizer = load_tokenizer(files)
    texts = ["\n".join(PROMPTS[i : i + 16]) for i in (0, 16)]
    for ids in (tokenizer.encode(text)[:120] for text in texts):
        expected = PagedRunner(model).run(ids, [100, 20])
        ours = PagedRunner(model, kv_dtype=torch.int8).run(ids, [100, 20])
        assert 0.005 < mean_error([ours], [expected]) < 0.025
