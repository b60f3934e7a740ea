"""An engine on a GPU: what it answers is the CPU's answer, with graphs or without, alone or not."""

import re

import pytest

from vllm_lite import LLM, SamplingParams, StructuredOutputsParams

pytestmark = pytest.mark.cuda

PROMPTS = ["The quick", "def f(x):", "Größe", "lazy dog, and it is what they have said. " * 20]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=20)
# Products of two devices differ in the last bits of bfloat16.
TOLERANCE = 0.1


def first_choices(model: str, **options: object) -> list[tuple[int, dict[int, float]]]:
    """Each prompt's first token and the log-probabilities of the likeliest; later ones may have
    gone apart."""
    with LLM(model, max_model_len=1024, dtype="bfloat16", **options) as llm:
        found = []
        for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False):
            sample = output.outputs[0]
            assert sample.logprobs is not None and len(sample.token_ids) == 8, output.error
            likeliest = {token: entry.logprob for token, entry in sample.logprobs[0].items()}
            found.append((sample.token_ids[0], likeliest))
        return found


def test_the_gpu_answers_as_the_cpu_does(tiny_model: str) -> None:
    expected = first_choices(tiny_model, device="cpu")
    # So far ahead that the tolerance leaves no other token.
    ahead = [
        sorted(theirs.values())[-2] < theirs[best] - 2 * TOLERANCE for best, theirs in expected
    ]
    assert sum(ahead) >= 2
    for options in ({}, {"multiprocess": True}, {"enforce_eager": True}):
        found = first_choices(tiny_model, device="cuda", gpu_memory_utilization=0.3, **options)
        for (token, ours), (best, theirs) in zip(found, expected, strict=True):
            assert ours[token] == pytest.approx(theirs[token], abs=TOLERANCE), options
            assert theirs[token] >= theirs[best] - 2 * TOLERANCE, options


def test_graphs_change_no_token(tiny_model: str) -> None:
    def tokens(enforce_eager: bool) -> list[list[int]]:
        with LLM(
            tiny_model, max_model_len=1024, dtype="bfloat16", device="cuda",
            gpu_memory_utilization=0.3, enforce_eager=enforce_eager, max_num_seqs=len(PROMPTS),
        ) as llm:  # fmt: skip
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            return [output.outputs[0].token_ids for output in outputs]

    assert tokens(False) == tokens(True)


def test_masks_are_made_while_graphs_are_captured(tiny_model: str) -> None:
    """A request ends after each few steps, so that a graph of another size is captured."""
    pytest.importorskip("llguidance")
    expressions = [f"(ab|[0-9]c){{{count}}}" for count in (3, 6, 9, 12)]
    params = [
        SamplingParams(seed=1, max_tokens=40, structured_outputs=StructuredOutputsParams(regex=x))
        for x in expressions
    ]
    with LLM(
        tiny_model, max_model_len=1024, dtype="bfloat16", device="cuda",
        gpu_memory_utilization=0.3,
    ) as llm:  # fmt: skip
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for output, expression in zip(outputs, expressions, strict=True):
        assert re.fullmatch(expression, output.outputs[0].text), output


def test_drafts_are_accepted_and_their_tokens_are_the_likeliest(tiny_model: str) -> None:
    """By the scores of the whole output: steps of other sizes may end in other last bits."""
    prompts = [[7, 8, 9 + i] * 20 for i in range(4)]
    with LLM(
        tiny_model, max_model_len=256, dtype="bfloat16", device="cuda", gpu_memory_utilization=0.3,
        speculative_config={"method": "ngram", "num_speculative_tokens": 4},
    ) as llm:  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False
        )
        stats = llm.engine.stats()
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        whole = [ids + answer for ids, answer in zip(prompts, answers, strict=True)]
        scored = llm.generate(
            [{"prompt_token_ids": ids} for ids in whole],
            SamplingParams(max_tokens=0, prompt_logprobs=1),
            use_tqdm=False,
        )
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    for ids, answer, output in zip(prompts, answers, scored, strict=True):
        assert len(answer) == 40 and output.prompt_logprobs is not None
        for token, entries in zip(answer, list(output.prompt_logprobs)[len(ids) :], strict=True):
            assert entries is not None
            best = max(entry.logprob for entry in entries.values())
            assert entries[token].logprob >= best - 2 * TOLERANCE
