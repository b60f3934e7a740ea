"""The whole path on real weights: against transformers, and itself in every way of scheduling,
where a request's tokens and logprobs are the same in every bit (test_determinism.py has the rest).
"""

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from engine.smollm2 import PROMPTS, reference_logits
from vllm_lite import LLM, RequestOutput, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=2)
# As far as the other ways of scheduling are followed.
SHORT = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def llm() -> LLM:
    with LLM("smollm2", dtype="float32", max_model_len=512, num_threads=1) as made:
        yield made


@pytest.fixture(scope="module")
def batch(llm: LLM) -> list[RequestOutput]:
    return llm.generate(PROMPTS, GREEDY, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def assert_same(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """Equal tokens, and the same bits of their logprobs, as far as the shorter of the two goes."""
    for output, other in zip(outputs, expected, strict=True):
        ours, theirs = output.outputs[0], other.outputs[0]
        count = min(len(ours.token_ids), len(theirs.token_ids))
        assert ours.token_ids[:count] == theirs.token_ids[:count]
        for position, token in enumerate(ours.token_ids[:count]):
            assert ours.logprobs[position][token] == theirs.logprobs[position][token]


@pytest.mark.case("BIV-03")
def test_greedy_tokens_and_logprobs_are_those_of_transformers(batch: list[RequestOutput]) -> None:
    """Every token is the reference's likeliest after the same prefix, so the whole text is too."""
    for output in batch:
        sample = output.outputs[0]
        assert len(sample.token_ids) == 64
        logits = reference_logits(output.prompt_token_ids, sample.token_ids)
        logprobs = logits.log_softmax(-1)
        for position, token in enumerate(sample.token_ids):
            best = int(logits[position].argmax())
            if token != best:
                # Only where the two are as good as equal.
                assert logits[position, best] - logits[position, token] < 1e-3, (
                    output.prompt,
                    position,
                )
            for candidate, logprob in sample.logprobs[position].items():
                assert logprob.logprob == pytest.approx(
                    logprobs[position, candidate].item(), abs=1e-3
                )


def test_text_is_the_tokenizers_decode(llm: LLM, batch: list[RequestOutput]) -> None:
    for output in batch:
        sample = output.outputs[0]
        assert sample.text == llm.get_tokenizer().decode(sample.token_ids)


@pytest.mark.case("BIV-01")
def test_alone_gives_the_tokens_of_the_batch(llm: LLM, batch: list[RequestOutput]) -> None:
    for prompt, expected in list(zip(PROMPTS, batch, strict=True))[::2]:
        assert_same(llm.generate(prompt, SHORT, use_tqdm=False), [expected])


def test_prefix_hit_gives_the_same_tokens(llm: LLM) -> None:
    head = (
        "You are a helpful assistant who answers briefly and truthfully, in complete sentences. "
        * 3
    )
    prompts = [head + prompt for prompt in PROMPTS[::2]]
    cold = [llm.generate({"prompt": p, "cache_salt": p}, SHORT, use_tqdm=False)[0] for p in prompts]
    assert all(output.num_cached_tokens == 0 for output in cold)
    llm.generate(prompts[0], SHORT, use_tqdm=False)
    warm = llm.generate(prompts, SHORT, use_tqdm=False)
    assert all(output.num_cached_tokens >= 32 for output in warm)
    assert_same(warm, cold)


@pytest.mark.case("SCH-05")
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 16, "max_num_seqs": 8},
        # Prompt and output of a sequence take two or three blocks: not all that begin can end, so
        # that running ones are preempted.
        {"max_model_len": 96, "num_blocks": 16, "max_num_seqs": 16},
    ],
    ids=["chunks of 16 tokens", "pool so small that sequences are preempted"],
)
def test_other_scheduling_gives_the_same_tokens(
    options: dict[str, int], batch: list[RequestOutput]
) -> None:
    options = dict(options)
    if "num_blocks" in options:
        block_bytes = 2 * 30 * 3 * 16 * 64 * 4
        options["kv_cache_memory"] = options.pop("num_blocks") * block_bytes
    with LLM("smollm2", dtype="float32", **{"max_model_len": 512, **options}) as other:
        outputs = other.generate(PROMPTS, SHORT, use_tqdm=False)
        stats = other.engine.stats()
    assert_same(outputs, batch)
    if "kv_cache_memory" in options:
        assert stats.num_preemptions > 0
    assert stats.num_running == stats.num_waiting == stats.kv_used_blocks == 0
    for output in outputs:  # nothing lost, nothing doubled
        sample = output.outputs[0]
        assert sample.text == other.get_tokenizer().decode(sample.token_ids)


@pytest.mark.case("PEN-05")
def test_repetition_penalty_is_that_of_transformers(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, repetition_penalty=1.2)
    output = llm.generate(PROMPTS[0], params, use_tqdm=False)[0]
    ids = output.outputs[0].token_ids
    logits = reference_logits(output.prompt_token_ids, ids)
    seen = list(output.prompt_token_ids)
    for position, token in enumerate(ids):
        penalised = RepetitionPenaltyLogitsProcessor(1.2)(
            torch.tensor([seen]), logits[position][None].clone()
        )[0]
        assert penalised.max() - penalised[token] < 1e-3
        seen.append(token)


def test_chat_answers_sensibly(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    output = llm.chat(question, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)[0]
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
    assert "<|im_end|>" not in output.outputs[0].text


@pytest.mark.case("SED-01")
def test_seeded_sampling_does_not_depend_on_the_batch(llm: LLM) -> None:
    seeded = SamplingParams(temperature=0.8, top_p=0.95, seed=42, max_tokens=24, ignore_eos=True)
    free = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
    alone = tokens(llm.generate(PROMPTS[1], seeded, use_tqdm=False))[0]
    for size in (2, 7):
        prompts = [PROMPTS[1], *PROMPTS[2 : 1 + size]]
        outputs = tokens(llm.generate(prompts, [seeded] + [free] * (size - 1), use_tqdm=False))
        assert outputs[0] == alone


def test_unseeded_requests_differ(llm: LLM) -> None:
    free = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)
    outputs = tokens(llm.generate([PROMPTS[1]] * 4, free, use_tqdm=False))
    assert len({tuple(ids) for ids in outputs}) == 4


def test_creating_an_engine_leaves_the_callers_random_generators_alone() -> None:
    import random

    import numpy as np

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = [draw(), draw()]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    first = draw()
    LLM("smollm2", dtype="float32", max_model_len=64).close()
    assert [first, draw()] == expected


@pytest.mark.case("LPR-06")
def test_prompt_logprobs_are_those_of_transformers(llm: LLM) -> None:
    prompts = PROMPTS[:8]
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    for output in llm.generate(prompts, params, use_tqdm=False):
        ids = output.prompt_token_ids
        logprobs = reference_logits(ids[:1], ids[1:]).log_softmax(-1)
        assert output.prompt_logprobs is not None
        for position, entry in enumerate(output.prompt_logprobs[1:]):
            assert entry is not None
            for token, value in entry.items():
                expected = logprobs[position, token].item()
                assert value.logprob == pytest.approx(expected, abs=1e-3)


def test_the_document_that_answers_has_the_highest_score(llm: LLM) -> None:
    documents = [
        "Paris is the capital and largest city of France.",
        "A banana is a long yellow fruit that grows in bunches.",
        "The heart pumps blood through the body.",
        "Bread is baked from flour, water and yeast.",
    ]
    queries = [
        "What is the capital of France?",
        "Which fruit is long and yellow?",
        "Which organ pumps blood?",
        "What is bread made of?",
    ]
    for answer, query in enumerate(queries):
        scores = [output.outputs.score for output in llm.score(query, documents, use_tqdm=False)]
        assert scores.index(max(scores)) == answer, (query, scores)
