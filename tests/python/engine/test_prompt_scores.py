"""Log-probabilities of prompts' tokens and pooled vectors: against transformers, and the same bits
however they are computed.
"""

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from tiny_model import EOS, MAX_POSITIONS, VOCAB_SIZE, block_bytes
from vllm_lite import (
    LLM,
    AsyncLLMEngine,
    Engine,
    PoolingParams,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from vllm_lite.config import MIN_LOGITS_ROWS
from vllm_lite.scoring import score_prompt
from vllm_lite.worker.hidden_states import Pooler, PromptScorer
from vllm_lite.worker.step_plan import PooledPart

HIDDEN_SIZE = 128
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_model_len": 512}
SCORE = SamplingParams(max_tokens=0, prompt_logprobs=3)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB_SIZE - 40, (length,), generator=generator).tolist()


PROMPTS = [prompt(length, length) for length in (1, 2, 30, 70, 130, 300)]
MEAN, LAST = PoolingParams(pooling_type="MEAN"), PoolingParams()


@pytest.fixture(scope="module")
def llm(tiny_model: str) -> Iterator[LLM]:
    with LLM(tiny_model, **OPTIONS) as made:
        yield made


@pytest.fixture(scope="module")
def reference(tiny_model: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(tiny_model).float().eval()


def score(llm: LLM, prompts: list[list[int]], params: SamplingParams = SCORE) -> list[Any]:
    """Every number that is said of the prompts."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(output.finished and output.error is None for output in outputs)
    return score_values(outputs)


def score_values(outputs: list[Any]) -> list[Any]:
    return [
        [
            None if entry is None else [(i, e.logprob, e.rank) for i, e in entry.items()]
            for entry in output.prompt_logprobs
        ]
        for output in outputs
    ]


def vectors(llm: LLM, params: PoolingParams, prompts: list[list[int]]) -> list[list[float]]:
    return [output.outputs.data for output in llm.encode(prompts, params, use_tqdm=False)]


@pytest.mark.case("LPR-11")
def test_logprobs_are_those_of_transformers(llm: LLM, reference: Any) -> None:
    outputs = llm.generate(PROMPTS, SCORE, use_tqdm=False)
    for ids, output in zip(PROMPTS, outputs, strict=True):
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(ids)
        assert output.prompt_logprobs[0] is None
        with torch.inference_mode():
            expected = reference(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        for position, entry in enumerate(output.prompt_logprobs[1:]):
            assert entry is not None
            row = expected[position]
            own, *others = entry
            assert own == ids[position + 1]
            best = row.topk(3).indices.tolist()
            assert set(best) | {own} == set(entry)
            assert entry[own].rank == 1 + int((row > row[own]).sum())
            for token, value in entry.items():
                assert value.logprob == pytest.approx(row[token].item(), abs=1e-3)
            ranks = [entry[token].rank for token in others]
            assert ranks == sorted(set(ranks))


@pytest.mark.case("LPR-06")
def test_likelihoods_of_continuations_are_those_of_transformers(llm: LLM, reference: Any) -> None:
    context = prompt(20, 7)
    sums = []
    for continuation in (prompt(5, 8), prompt(6, 9)):
        (output,) = llm.generate([context + continuation], SCORE, use_tqdm=False)
        assert output.prompt_logprobs is not None
        ours = sum(output.prompt_logprobs.values()[-len(continuation) :])
        with torch.inference_mode():
            logits = reference(torch.tensor([context + continuation])).logits[0].float()
        rows = logits.log_softmax(-1)[len(context) - 1 : -1]
        expected = rows.gather(1, torch.tensor(continuation)[:, None]).sum().item()
        assert ours == pytest.approx(expected, abs=1e-3)
        sums.append((ours, expected))
    assert (sums[0][0] > sums[1][0]) == (sums[0][1] > sums[1][1])


WAYS: dict[str, dict[str, Any]] = {
    "small budget": {"max_num_batched_tokens": 64},
    "one token": {"max_chunk_tokens": 1},
    "chunks of 7": {"max_chunk_tokens": 7, "max_num_seqs": 2},
    "preempting": {"kv_cache_memory": 33 * block_bytes(), "max_chunk_tokens": 3},
    "asynchronous": {"async_scheduling": True, "max_chunk_tokens": 50},
}


@pytest.mark.case("LPR-08")
@pytest.mark.parametrize("way", WAYS)
def test_scores_and_vectors_are_the_same_bits_in_every_way(
    tiny_model: str, llm: LLM, way: str
) -> None:
    """Alone on one engine; here with others that decode meanwhile, and with a warm prefix cache."""
    expected = [score(llm, [ids])[0] for ids in PROMPTS]
    pooled = [vectors(llm, kind, [ids])[0] for kind in (MEAN, LAST) for ids in PROMPTS]
    with LLM(tiny_model, **OPTIONS | WAYS[way]) as other:
        params: list[Any] = [
            *[SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)] * 3,
            *[SCORE] * len(PROMPTS),
            *[MEAN] * len(PROMPTS), *[LAST] * len(PROMPTS),
        ]  # fmt: skip
        prompts = [*(prompt(100, seed) for seed in (1, 2, 3)), *PROMPTS, *PROMPTS, *PROMPTS]
        for _ in range(2):
            outputs = other._run(prompts, params, [0] * len(prompts), use_tqdm=False)
            assert score_values(outputs[3:9]) == expected
            assert [output.outputs.data for output in outputs[9:]] == pooled
        if way == "preempting":
            assert other.engine.stats().num_preemptions > 0


def test_scored_tokens_are_not_taken_from_the_prefix_cache_but_published(tiny_model: str) -> None:
    ids = prompt(100, 5)
    with LLM(tiny_model, **OPTIONS) as llm:

        def cached(params: Any) -> int:
            return llm._run([ids], [params], [0], use_tqdm=False)[0].num_cached_tokens

        assert cached(SCORE) == 0
        assert cached(SamplingParams(max_tokens=1)) == 96
        assert cached(SCORE) == 0
        assert cached(MEAN) == 0
        assert cached(LAST) == 96
        # Up to the token before the first that is scored.
        for start, expected in ((0, 0), (16, 0), (17, 16), (64, 48), (65, 64), (100, 96)):
            params = SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=start)
            assert cached(params) == expected, start


def test_scores_begin_where_they_are_asked_for(llm: LLM) -> None:
    ids = prompt(50, 3)
    whole = score(llm, [ids])[0]
    for start in (1, 20, 49, 50, 1000):
        params = SamplingParams(max_tokens=0, prompt_logprobs=3, prompt_logprobs_start=start)
        some = score(llm, [ids], params)[0]
        assert some == [None] * min(start, 50) + whole[start:]


def test_samples_and_their_tokens_come_as_without_scores(llm: LLM) -> None:
    ids = prompt(40, 4)
    params = SamplingParams(n=3, seed=5, max_tokens=6, ignore_eos=True, logprobs=1)
    (plain,) = llm.generate([ids], params, use_tqdm=False)
    params.prompt_logprobs = 2
    (scored,) = llm.generate([ids], params, use_tqdm=False)
    assert [s.token_ids for s in plain.outputs] == [s.token_ids for s in scored.outputs]
    assert [s.logprobs for s in plain.outputs] == [s.logprobs for s in scored.outputs]
    assert plain.prompt_logprobs is None
    assert scored.prompt_logprobs is not None and len(scored.prompt_logprobs) == 40


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("max_tokens", [0, 4])
def test_deltas_tell_the_scores_once_and_first(tiny_model: str, n: int, max_tokens: int) -> None:
    with Engine(tiny_model, **OPTIONS, max_chunk_tokens=16) as engine:
        # So that the other samples would take their prompt from the cache at once.
        engine.add_request("warm", prompt(60, 1), SamplingParams(max_tokens=1))
        params = SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=0,
                                output_kind=RequestOutputKind.DELTA)  # fmt: skip
        while engine.has_unfinished_requests():
            engine.step()
        engine.add_request("a", prompt(60, 1), params)
        outputs: list[RequestOutput] = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
    first, *others = outputs
    assert first.prompt_logprobs is not None and len(first.prompt_logprobs.values()) == 59
    assert all(output.prompt_logprobs is None for output in others)
    tokens = dict.fromkeys(range(n), 0)
    for output in outputs:
        for sample in output.outputs:
            tokens[sample.index] += len(sample.token_ids)
    assert tokens == dict.fromkeys(range(n), max_tokens)
    assert outputs[-1].finished


@pytest.mark.case("SEC-03")
def test_counts_beyond_the_cap_are_refused(llm: LLM) -> None:
    for value in (-1, VOCAB_SIZE, VOCAB_SIZE - 1, 21):
        for name in ("prompt_logprobs", "logprobs"):
            with pytest.raises(ValueError, match=f"{name} must be an integer from 0 to 20"):
                llm.generate("a", SamplingParams(**{name: value}))


# --- vectors --------------------------------------------------------------------------------------


def test_vectors_are_those_of_transformers(llm: LLM, reference: Any) -> None:
    for ids in PROMPTS:
        with torch.inference_mode():
            states = reference.model(torch.tensor([ids])).last_hidden_state[0].float()
        for params, expected in ((LAST, states[-1]), (MEAN, states.mean(0))):
            unit = torch.nn.functional.normalize(expected, dim=0)
            (ours,) = vectors(llm, params, [ids])
            torch.testing.assert_close(torch.tensor(ours), unit, atol=1e-5, rtol=0)
            assert math.hypot(*ours) == pytest.approx(1)
            raw = PoolingParams(pooling_type=params.pooling_type, normalize=False, dimensions=5)
            (ours,) = vectors(llm, raw, [ids])
            torch.testing.assert_close(torch.tensor(ours), expected[:5], atol=1e-4, rtol=1e-4)
            short = PoolingParams(pooling_type=params.pooling_type, dimensions=5)
            (ours,) = vectors(llm, short, [ids])
            unit = torch.nn.functional.normalize(expected[:5], dim=0)
            torch.testing.assert_close(torch.tensor(ours), unit, atol=1e-5, rtol=0)


@pytest.mark.case("EMB-05")
@pytest.mark.parametrize("params", [LAST, MEAN], ids=["last", "mean"])
def test_vectors_of_odd_prompts_are_finite(llm: LLM, params: PoolingParams) -> None:
    """A space alone, special tokens alone, the longest prompt, padding of the vocabulary."""
    odd = [" ", [EOS], [0, EOS, EOS, 0], prompt(511), [VOCAB_SIZE - 1]]
    for output in llm.embed(odd, params, use_tqdm=False):
        assert len(output.outputs.embedding) == HIDDEN_SIZE
        assert math.hypot(*output.outputs.embedding) == pytest.approx(1)  # NaN equals nothing


def test_embed_takes_what_generate_takes(llm: LLM) -> None:
    text = "The quick brown"
    ids = llm.get_tokenizer().encode(text)
    outputs = llm.embed([text, ids, {"prompt": text}], use_tqdm=False)
    assert len({tuple(output.outputs.embedding) for output in outputs}) == 1
    assert outputs[0].prompt_token_ids == ids and outputs[0].finished
    assert len(llm.embed(text, use_tqdm=False)[0].outputs.embedding) == HIDDEN_SIZE


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"dimensions": 0}, "dimensions"), ({"dimensions": 1.0}, "dimensions"),
     ({"dimensions": HIDDEN_SIZE + 1}, "dimensions must be at most 128"),
     ({"pooling_type": "CLS"}, "pooling_type must be LAST or MEAN"),
     ({"normalize": 1}, "normalize")],
)  # fmt: skip
def test_wrong_pooling_params_are_refused(llm: LLM, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        llm.embed("a", PoolingParams(**fields))


def test_prompts_that_cannot_be_pooled_are_refused(llm: LLM) -> None:
    for bad, words in (([], "empty"), ([VOCAB_SIZE], "token 0"), ([5] * 512, "max_model_len")):
        with pytest.raises(ValueError, match=words):
            llm.embed([bad])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="2 pooling_params for 1 prompts"):
        llm.embed(["a"], [MEAN, LAST])


# --- scores ---------------------------------------------------------------------------------------


def test_a_score_is_the_mean_probability_of_the_query(llm: LLM, reference: Any) -> None:
    query, documents = "lazy dog", ["The lazy dog", "12345", "東京は日本の首都です。"]
    outputs = llm.score(query, documents, use_tqdm=False)
    for document, output in zip(documents, outputs, strict=True):
        ids, start = score_prompt(llm.get_tokenizer(), query, document)
        assert output.prompt_token_ids == ids
        with torch.inference_mode():
            logprobs = reference(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        own = [logprobs[i - 1, ids[i]].item() for i in range(start, len(ids))]
        assert output.outputs.score == pytest.approx(math.exp(sum(own) / len(own)), rel=1e-3)


@pytest.mark.parametrize(
    ("queries", "documents", "words"),
    [([], ["a"], "at least one"), ("a", [], "at least one"), ("", "a", "query is empty"),
     (["a", "b"], ["c"], "2 queries for 1 documents"), (None, "a", "queries must be"),
     ("a", b"b", "documents must be"), ("a", [None], r"documents\[0\] must be"),
     ([["a"]], "a", r"queries\[0\] must be"), ("a", {"a"}, "documents must be")],
)  # fmt: skip
def test_wrong_pairs_are_refused(llm: LLM, queries: Any, documents: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        llm.score(queries, documents)


# --- through processes ----------------------------------------------------------------------------


def test_the_largest_results_go_through_the_rings(tiny_model: str, llm: LLM) -> None:
    """A step in which every token has the most log-probabilities, and vectors, by the side."""
    ids = prompt(300, 300)
    most = SamplingParams(max_tokens=0, prompt_logprobs=20)
    expected = score(llm, [ids], most)[0]
    (vector,) = vectors(llm, MEAN, [ids])
    options = OPTIONS | {"max_num_batched_tokens": 300, "max_num_seqs": 1}
    engine = AsyncLLMEngine(tiny_model, **options)

    async def run() -> None:
        async for output in engine.generate(ids, most):
            assert score_values([output]) == [expected]
        async for pooled in engine.encode(ids, MEAN):
            assert pooled.outputs.data == vector
        with pytest.raises(ValueError, match="dimensions"):
            async for _ in engine.encode(ids, PoolingParams(dimensions=HIDDEN_SIZE + 1)):
                pass

    try:
        asyncio.run(run())
    finally:
        engine.close()


# --- the worker's part ----------------------------------------------------------------------------


def test_a_token_without_finite_logits_has_rank_0() -> None:
    logits = torch.zeros(MIN_LOGITS_ROWS, 8)
    logits[1, 3] = math.nan
    scored = torch.tensor([[0, 2, 1], [1, 2, 0], [2, 7, 1]], dtype=torch.int32)
    scorer = PromptScorer(torch.device("cpu"))
    logprobs, ranks, top_ids, _ = scorer.score(scored, 1, lambda i: logits[i.long()], None)
    assert ranks.tolist() == [1, 0, 1]
    values = logprobs.view(torch.float32)
    assert values[[0, 2]].tolist() == pytest.approx([-math.log(8)] * 2)
    assert top_ids.tolist() == [0, -1, 0]


def test_a_mean_of_what_is_not_finite_is_nan_and_the_row_is_clean_afterwards() -> None:
    states = torch.ones(4, 3)
    states[2, 1] = math.inf
    pooler = Pooler(2, 3, torch.device("cpu"))

    def mean(first: int, end: int) -> torch.Tensor:
        part = PooledPart(row=1, first=first, end=end, num_tokens=end - first, is_mean=True,
                          ends=True)  # fmt: skip
        return pooler.pool([part], lambda indices: states[indices.long()])[0]

    assert mean(0, 4).isnan().all()
    assert mean(0, 2).tolist() == [1, 1, 1]


def test_the_model_length_leaves_room_for_the_prompt(llm: LLM) -> None:
    assert MAX_POSITIONS > 512
    assert score(llm, [[5] * 511])[0][1] is not None
