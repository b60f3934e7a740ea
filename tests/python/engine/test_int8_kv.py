"""Engines with an int8 KV cache: blocks that are forked, found again and computed anew.

test_determinism.py has the same with other batches, and test_attention_int8.py the kernels.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tiny_model import VOCAB_SIZE
from vllm_lite import LLM, SamplingParams
from vllm_lite.config import EngineConfig
from vllm_lite.model_config import load_model_config
from vllm_lite.model_files import ModelFiles

OPTIONS: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 256, "num_threads": 1}
Result = list[tuple[int, float]]  # tokens and their logprobs


def random_prompt(length: int) -> list[int]:
    source = random.Random(length)
    return [source.randrange(2, VOCAB_SIZE - 40) for _ in range(length)]


def generate(llm: LLM, prompts: list[list[int]], salt: str = "", **params: Any) -> list[Result]:
    """The samples of the first prompt, then those of the next."""
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=0, **params)
    given = [{"prompt_token_ids": prompt, "cache_salt": salt or "none"} for prompt in prompts]
    return [
        [(t, p[t].logprob) for t, p in zip(sample.token_ids, sample.logprobs or [], strict=True)]
        for output in llm.generate(given, sampling, use_tqdm=False)
        for sample in output.outputs
    ]


@pytest.fixture(scope="module")
def llm(tiny_model: str) -> Iterator[LLM]:
    with LLM(tiny_model, kv_cache_dtype="int8", **OPTIONS) as made:
        yield made


def test_logprobs_are_near_those_of_a_bfloat16_cache(llm: LLM, tiny_model: str) -> None:
    prompt = [random_prompt(100)]
    with LLM(tiny_model, **OPTIONS) as wide:
        expected = generate(wide, prompt, temperature=0)[0]
    result = generate(llm, prompt, temperature=0)[0]
    assert result != expected
    assert result[0][0] == expected[0][0]
    assert result[0][1] == pytest.approx(expected[0][1], abs=0.1)


def test_forks_of_a_partly_filled_block_are_copied_with_their_scales(llm: LLM) -> None:
    """Samples share the prompt's blocks, and each gets its own copy of the one it writes into."""
    prompt = [random_prompt(37)]
    together = generate(llm, prompt, "forked", temperature=1.0, seed=5, n=3)
    alone = [generate(llm, prompt, f"{i}", temperature=1.0, seed=5 + i)[0] for i in range(3)]
    assert together == alone
    assert len({str(result) for result in together}) == 3


def test_blocks_found_again_give_the_same_bits(llm: LLM) -> None:
    prompt = [random_prompt(90)]
    before = llm.engine.stats()
    cold = generate(llm, prompt, "again", temperature=0)
    assert generate(llm, prompt, "again", temperature=0) == cold
    # The last token is computed always: 5 whole blocks of 16.
    assert llm.engine.stats().prefix_hits - before.prefix_hits == 80


def test_preempted_requests_have_the_same_bits(llm: LLM, tiny_model: str) -> None:
    prompts = [random_prompt(length) for length in range(20, 32)]
    expected = generate(llm, prompts, temperature=0)
    config = EngineConfig(model=tiny_model, kv_cache_dtype="int8", **OPTIONS)
    block = config.resolve(load_model_config(ModelFiles(Path(tiny_model)))).block_bytes
    options = OPTIONS | {"max_model_len": 64, "kv_cache_memory": 12 * block}
    with LLM(tiny_model, kv_cache_dtype="int8_per_token_head", **options) as small:
        assert generate(small, prompts, temperature=0) == expected
        assert small.engine.stats().num_preemptions > 0


def test_a_block_takes_a_byte_per_number_and_four_per_vector(tiny_model: str) -> None:
    model = load_model_config(ModelFiles(Path(tiny_model)))
    bytes_of = {
        name: EngineConfig(device="cpu", dtype="bfloat16", kv_cache_dtype=name)
        .resolve(model)
        .block_bytes
        for name in ("auto", "int8", "int8_per_token_head")
    }
    assert bytes_of["int8"] == bytes_of["int8_per_token_head"]
    assert bytes_of["int8"] * 2 * model.head_size == bytes_of["auto"] * (model.head_size + 4)
