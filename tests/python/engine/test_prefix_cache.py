"""The prefix cache on a tiny model: what it may reuse, and that nobody's text shows it."""

import random
from collections.abc import Iterator

import pytest

from tiny_model import VOCAB_SIZE, block_bytes
from vllm_lite import LLM, Engine, RequestOutput, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
BLOCK = 16


def random_prompt(source: random.Random, length: int) -> list[int]:
    return [source.randrange(2, VOCAB_SIZE) for _ in range(length)]


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def results(outputs: list[RequestOutput]) -> list[object]:
    """Tokens and the bits of their logprobs."""
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


@pytest.fixture(scope="module")
def cold(tiny_model: str) -> Iterator[LLM]:
    """Reuses nothing."""
    with LLM(tiny_model, num_threads=1, max_model_len=2048, enable_prefix_caching=False) as made:
        yield made


@pytest.fixture
def llm(tiny_model: str) -> Iterator[LLM]:
    with LLM(tiny_model, num_threads=1, max_model_len=2048, block_size=BLOCK) as made:
        yield made


@pytest.mark.case("PFX-01", "USG-06")
@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_a_prompt_of_whole_blocks_is_computed_in_part_when_it_comes_again(
    llm: LLM, cold: LLM, num_blocks: int
) -> None:
    prompt = random_prompt(random.Random(num_blocks), num_blocks * BLOCK)
    first, second = run(llm, [prompt])[0], run(llm, [prompt])[0]
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == (num_blocks - 1) * BLOCK
    assert results([first]) == results([second]) == results(run(cold, [prompt]))


@pytest.mark.case("PFX-05")
@pytest.mark.parametrize("pool_blocks", [400, 100], ids=["roomy", "evicting"])
def test_a_long_prompt_gives_the_same_each_time(
    tiny_model: str, cold: LLM, pool_blocks: int
) -> None:
    source = random.Random(5)
    prompt, other = random_prompt(source, 1464), random_prompt(source, 1200)
    expected = results(run(cold, [prompt]))
    cached = []
    with LLM(
        tiny_model, num_threads=1, max_num_seqs=1, max_model_len=1500, block_size=BLOCK,
        kv_cache_memory=pool_blocks * block_bytes(),
    ) as small:  # fmt: skip
        for _ in range(4):
            (output,) = run(small, [prompt])
            assert results([output]) == expected
            cached.append(output.num_cached_tokens)
            run(small, [other])
    assert cached[0] == 0
    for tokens in cached[1:]:
        assert tokens == 1456 if pool_blocks == 400 else tokens < 1456


@pytest.mark.case("PFX-03")
def test_a_prefix_evicted_while_its_request_waits_is_computed_anew(
    tiny_model: str, cold: LLM
) -> None:
    source = random.Random(3)
    prompt, large = random_prompt(source, 100), random_prompt(source, 40)
    with Engine(
        tiny_model, num_threads=1, max_model_len=256, block_size=BLOCK,
        kv_cache_memory=16 * block_bytes(),
    ) as engine:  # fmt: skip

        def finish() -> dict[str, RequestOutput]:
            last = {}
            while engine.has_unfinished_requests():
                last |= {output.request_id: output for output in engine.step()}
            return last

        engine.add_request("warm", prompt, GREEDY)
        assert finish()["warm"].num_cached_tokens == 0
        engine.add_request("again", prompt, GREEDY)
        assert finish()["again"].num_cached_tokens == 96  # it is there
        # Grows until the pool is its own, while the other has found its prefix and finds no room.
        long = SamplingParams(temperature=0, max_tokens=210, ignore_eos=True)
        engine.add_request("large", large, long)
        for _ in range(100):
            engine.step()
        engine.add_request("waits", prompt, GREEDY)
        engine.step()
        assert engine.stats().num_waiting == 1
        output = finish()["waits"]
    assert output.num_cached_tokens < 96
    assert results([output]) == results(run(cold, [prompt]))


@pytest.mark.case("PFX-08")
@pytest.mark.parametrize("chunk", [0, 64])
def test_prompts_that_come_together_with_a_common_beginning_equal_their_solo_runs(
    tiny_model: str, cold: LLM, chunk: int
) -> None:
    source = random.Random(8)
    common = random_prompt(source, 200)
    prompts = [[*common, *random_prompt(source, length)] for length in (30, 45, 3)]
    with LLM(
        tiny_model, num_threads=1, max_model_len=512, max_chunk_tokens=chunk, block_size=BLOCK
    ) as llm:
        outputs = run(llm, prompts)
    assert results(outputs) == [results(run(cold, [prompt]))[0] for prompt in prompts]


@pytest.mark.case("PFX-10")
def test_only_whole_equal_blocks_of_a_stored_prompt_are_reused(llm: LLM, cold: LLM) -> None:
    source = random.Random(10)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=0)
    for pair in range(200):
        length = source.choice([BLOCK, 2 * BLOCK, source.randrange(1, 3 * BLOCK)])
        common = random_prompt(source, length)
        # The tokens right behind the common part differ: else it would be longer.
        first, second = ([*common, end, *random_prompt(source, 20)] for end in (2, 3))
        run(llm, [first], params)
        output = run(llm, [second], params)
        assert output[0].num_cached_tokens == length // BLOCK * BLOCK, (pair, length)
        assert results(output) == results(run(cold, [second], params)), (pair, length)
