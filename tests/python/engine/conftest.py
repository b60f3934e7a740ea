"""Engines on the tiny model, one for all tests of a file."""

from collections.abc import Iterator

import pytest

from vllm_lite import LLM, EngineArgs, LLMEngine


@pytest.fixture(scope="module")
def llm(tiny_model: str) -> Iterator[LLM]:
    with LLM(tiny_model, num_threads=1, max_num_waiting=6, max_model_len=256) as made:
        yield made


@pytest.fixture(scope="module")
def engine(tiny_model: str) -> Iterator[LLMEngine]:
    args = EngineArgs(model=tiny_model, num_threads=1, max_model_len=256)
    with LLMEngine.from_engine_args(args) as made:
        assert type(made) is LLMEngine
        assert args.max_model_len == made.config.max_model_len == 256
        yield made
