"""Drafts change how many steps an output takes, and nothing else."""

import random
from typing import Any

import pytest
import torch
from llguidance import LLParserLimits

from tiny_model import EOS, VOCAB_SIZE, block_bytes
from vllm_lite import (
    LLM,
    BeamSearchParams,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from vllm_lite.config import EngineConfig, SpeculativeConfig
from vllm_lite.stats import EngineStats
from vllm_lite.worker import token_masks
from vllm_lite.worker.sampler import Sampler
from vllm_lite.worker.worker import Worker

Prompt = list[int]
OPTIONS: dict[str, Any] = {"num_threads": 1, "max_model_len": 512, "dtype": "float32"}


def repetitive_prompt(source: random.Random) -> Prompt:
    """A few tokens again and again, the last time cut off, and now and then one that is new."""
    phrase = [source.randrange(2, VOCAB_SIZE) for _ in range(source.randrange(2, 7))]
    tokens = phrase * source.randrange(3, 8) + phrase[: source.randrange(1, len(phrase))]
    for _ in range(source.randrange(3)):
        tokens[source.randrange(len(tokens))] = source.randrange(2, VOCAB_SIZE)
    return tokens


PROMPTS = [repetitive_prompt(random.Random(number)) for number in range(20)]


def config(num_tokens: int, **options: int | None) -> dict[str, Any]:
    return {"method": "ngram", "num_speculative_tokens": num_tokens, **options}


def results(
    outputs: list[RequestOutput],
) -> list[list[tuple[Any, ...]]]:
    """All that a request's user sees of each of its samples."""
    return [
        [
            (
                list(output.prompt_logprobs or ()), sample.token_ids, sample.text,
                sample.finish_reason, sample.stop_reason, sample.logprobs,
                sample.cumulative_logprob,
            )
            for sample in output.outputs
        ]
        for output in outputs
    ]  # fmt: skip


def generate(
    model: str,
    params: SamplingParams | list[SamplingParams],
    prompts: list[Prompt] = PROMPTS,
    **options: Any,
) -> tuple[list[list[tuple[Any, ...]]], EngineStats]:
    with LLM(model, **(OPTIONS | options)) as llm:
        found = results(llm.generate(prompts, params, use_tqdm=False))
        stats = llm.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_used_blocks) == (0, 0, 0)
    return found, stats


def check(
    model: str,
    params: SamplingParams | list[SamplingParams],
    prompts: list[Prompt] = PROMPTS,
    num_tokens: int = 4,
    **options: Any,
) -> EngineStats:
    """The same with and without; some drafts were right, and some were not."""
    expected, without = generate(model, params, prompts, **options)
    assert without.num_drafts == without.num_draft_tokens == without.num_accepted_tokens == 0
    found, stats = generate(
        model, params, prompts, speculative_config=config(num_tokens), **options
    )
    assert found == expected
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_drafts <= stats.num_draft_tokens <= num_tokens * stats.num_drafts
    return stats


@pytest.mark.case("SPC-01")
@pytest.mark.parametrize("max_num_seqs", [1, 8])
def test_greedy_outputs_are_those_without(tiny_model: str, max_num_seqs: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)
    expected, _ = generate(tiny_model, params, max_num_seqs=max_num_seqs)
    for num_tokens in range(1, 6):
        found, stats = generate(
            tiny_model, params, max_num_seqs=max_num_seqs, speculative_config=config(num_tokens)
        )
        assert found == expected, num_tokens
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens, num_tokens


@pytest.mark.case("SPC-01")
def test_sampled_outputs_are_those_without_whatever_the_seed(tiny_model: str) -> None:
    """So their distribution is the same, too."""
    params = [
        SamplingParams(
            temperature=(0.1, 0.3, 1.0)[seed % 3], seed=seed, max_tokens=20, ignore_eos=True,
            top_p=(1.0, 0.9)[seed % 2], top_k=(0, 3, 50)[seed % 3], min_p=(0.0, 0.05)[seed % 2],
            logprobs=2,
        )
        for seed in range(200)
    ]  # fmt: skip
    check(tiny_model, params, [PROMPTS[seed % 20] for seed in range(200)])


@pytest.mark.case("SPC-03")
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_whatever_looks_at_the_tokens_so_far_sees_the_drafts(
    tiny_model: str, num_tokens: int
) -> None:
    """Penalties, minimal lengths and bad words, all in one batch; then the engine goes on."""
    kinds: list[dict[str, Any]] = [
        {"repetition_penalty": 1.05},
        {"repetition_penalty": 0.7},  # rewards
        {"frequency_penalty": 0.02},
        {"frequency_penalty": -1.0},
        {"presence_penalty": 0.3, "temperature": 0.2, "seed": 3},
        {"presence_penalty": -1.0, "frequency_penalty": 0.01, "repetition_penalty": 1.01},
        {"logit_bias": dict.fromkeys(PROMPTS[6], 3.0)},
        {"allowed_token_ids": [*PROMPTS[7], EOS], "min_tokens": 20},
        {"logit_bias": {EOS: 100.0}, "min_tokens": 13},
        {"stop_token_ids": PROMPTS[9], "min_tokens": 7},
        {"bad_words": ["a", "the", "qu ick", "12", "é", "on the"]},
        {"bad_words": ["e r", "f(", "he"], "repetition_penalty": 0.8, "min_tokens": 5},
    ]
    params = [
        SamplingParams(**({"temperature": 0, "max_tokens": 40, "logprobs": 1} | kind))
        for kind in kinds
    ]
    check(tiny_model, params, PROMPTS[: len(kinds)], num_tokens)
    with LLM(tiny_model, speculative_config=config(num_tokens), **OPTIONS) as llm:
        for _ in range(2):
            llm.generate(PROMPTS[: len(kinds)], params, use_tqdm=False)
        assert llm.engine.stats().num_running == 0


def test_counts_of_penalties_are_of_what_was_accepted_alone(tiny_model: str) -> None:
    """A guess that was wrong must leave no trace in the rows' counts."""
    seen: list[torch.Tensor] = []
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, repetition_penalty=0.8)
    with LLM(tiny_model, speculative_config=config(5), max_num_seqs=1, **OPTIONS) as llm:
        with pytest.MonkeyPatch.context() as patch:
            sample = Sampler.sample

            def watch(sampler: Sampler, *args: Any) -> torch.Tensor:
                words = sample(sampler, *args)
                assert sampler._output_counts is not None
                seen.append(sampler._output_counts[0].clone())
                return words

            patch.setattr(Sampler, "sample", watch)
            output = llm.generate([PROMPTS[1]], params, use_tqdm=False)[0].outputs[0]
        stats = llm.engine.stats()
    counts = torch.bincount(torch.tensor(output.token_ids), minlength=VOCAB_SIZE)
    assert seen[-1].tolist() == counts.tolist()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.case("SPC-05")
@pytest.mark.parametrize("chunk", [0, 7])
def test_prompt_logprobs_are_those_without(tiny_model: str, chunk: int) -> None:
    params = [
        SamplingParams(
            temperature=0, max_tokens=1 + 3 * number, ignore_eos=True, logprobs=number % 3,
            prompt_logprobs=1 if number % 2 else None,
        )
        for number in range(20)
    ]  # fmt: skip
    check(tiny_model, params, max_chunk_tokens=chunk, max_num_seqs=4)


@pytest.mark.case("SPC-06")
@pytest.mark.parametrize(
    "limits",
    [
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 3, "max_num_seqs": 1},
        {"max_num_batched_tokens": 5, "max_num_seqs": 2},
        {"max_num_seqs": 65, "max_num_batched_tokens": 70},
        {"max_chunk_tokens": 2},
    ],
)
def test_small_limits_cut_the_drafts(tiny_model: str, limits: dict[str, int]) -> None:
    """Nor is there ever a token too many: outputs end at every length from 1 to 12."""
    params = [
        SamplingParams(temperature=0, max_tokens=1 + number % 12, ignore_eos=True)
        for number in range(60)
    ]
    prompts = [PROMPTS[number % 20] for number in range(60)]
    check(tiny_model, params, prompts, **limits)


@pytest.mark.case("SPC-06")
def test_drafts_end_where_the_models_length_does(tiny_model: str) -> None:
    longest = max(map(len, PROMPTS))
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    for more in (1, 2, 3, 20):
        length = longest + more
        expected, _ = generate(tiny_model, params, max_model_len=length)
        found, stats = generate(
            tiny_model, params, max_model_len=length, speculative_config=config(4)
        )
        assert found == expected
        assert stats.num_draft_tokens > 0
        for prompt, [sample] in zip(PROMPTS, found, strict=True):
            assert len(prompt) + len(sample[1]) == length


def test_a_step_computes_its_drafts_and_no_more_than_its_limits(tiny_model: str) -> None:
    plans: list[tuple[int, int]] = []
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with LLM(tiny_model, speculative_config=config(4), max_num_batched_tokens=11, **OPTIONS) as llm:
        launch = Worker.launch
        with pytest.MonkeyPatch.context() as patch:

            def watch(worker: Worker, plan: memoryview) -> Any:
                result = launch(worker, plan)
                plans.append((result._plan.num_tokens, result._plan.num_drafts))
                return result

            patch.setattr(Worker, "launch", watch)
            llm.generate(PROMPTS[:5], params, use_tqdm=False)
        stats = llm.engine.stats()
    assert max(tokens for tokens, _ in plans) == 11
    assert sum(drafts for _, drafts in plans) == stats.num_draft_tokens
    # Each accepted draft saves a step of its sequence.
    assert len(plans) < 5 * 30


def test_grammars_are_asked_about_drafts(tiny_model: str) -> None:
    """Outputs that must repeat themselves, so that many drafts are right."""
    item = '{"name": "value", "number": [1, 2, 3]}'
    kinds: list[dict[str, Any]] = [
        {"regex": r"(abc def ){12}"},
        {"regex": r"([ab]c){5,20}"},
        {"choice": [item * 3, item * 2 + "x"]},
        {"grammar": 'start: ("<" /[a-c]{3}/ ">")~12'},
        {"json": {"type": "array", "items": {"const": {"key": "the value"}}, "minItems": 6}},
        {"json": {"type": "array", "items": {"enum": [10, 100]}, "minItems": 9, "maxItems": 20}},
    ]
    params = [
        SamplingParams(
            temperature=temperature, seed=2, max_tokens=150,
            structured_outputs=StructuredOutputsParams(**kind), bad_words=["bc d"],
            repetition_penalty=1.0 if temperature else 1.1,
        )
        for kind in kinds
        for temperature in (0.0, 1.0)
    ]  # fmt: skip
    stats = check(tiny_model, params, PROMPTS[: len(params)], num_tokens=5)
    assert stats.num_accepted_tokens > 50


def test_grammars_that_cannot_go_back_have_drafts_too(tiny_model: str) -> None:
    """llguidance cannot undo tokens where a rule has max_tokens or a stop; drafts killed these."""
    kinds = [
        'start: "<" x ">"\nx[max_tokens=30]: /[ab]*/',
        'start: (x "c")~6\nx[stop="b"]: /[a-b]*/',
        'start: (x "c")~6\nx[suffix="ba"]: /[ab]*/',
    ]
    params = [
        SamplingParams(
            temperature=temperature, seed=4, max_tokens=80,
            structured_outputs=StructuredOutputsParams(grammar=grammar),
        )
        for grammar in kinds
        for temperature in (0.0, 1.0)
    ]  # fmt: skip
    check(tiny_model, params, PROMPTS[: len(params)], 5)


def test_a_draft_after_which_a_grammar_is_too_complex_is_a_guess_like_any_other(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request ends if the model goes there, at the same token, and only then."""
    few = LLParserLimits(step_max_items=100, verbose_errors=False)
    monkeypatch.setattr(token_masks, "limits", lambda: few)
    wide = " ".join(f'("{letter}" "x"*)?' for letter in "abcdefghijklmnopqrstuvwxyz")
    grammar = StructuredOutputsParams(grammar=f'start: ("a" | "b" | "{{" w)+\nw: {wide}')
    with LLM(tiny_model, **OPTIONS) as llm:
        prompt = llm.get_tokenizer().encode("ab{ba{aa{bb{" * 3, add_special_tokens=False)
        brace = llm.get_tokenizer().encode("{", add_special_tokens=False)[-1]
    params = [
        SamplingParams(
            temperature=1.0, seed=seed, max_tokens=40, structured_outputs=grammar,
            logit_bias={brace: bias},
        )
        for seed in range(4)
        for bias in (-100.0, 2.0)
    ]  # fmt: skip
    expected, _ = generate(tiny_model, params, [prompt] * len(params))
    found, stats = generate(
        tiny_model, params, [prompt] * len(params),
        speculative_config=config(4, prompt_lookup_min=1),
    )  # fmt: skip
    assert found == expected
    assert stats.num_draft_tokens > 0
    reasons = [sample[3] for [sample] in expected]
    assert "error" not in reasons[::2] and set(reasons[1::2]) == {"error"}


def test_stops_within_accepted_drafts_end_the_output_there(tiny_model: str) -> None:
    """A few tokens alone are allowed, so that they soon repeat; every way to stop."""
    with LLM(tiny_model, **OPTIONS) as llm:
        ids = llm.get_tokenizer().encode("a b c d", add_special_tokens=False)
    common: dict[str, Any] = {
        "temperature": 0, "max_tokens": 60, "logprobs": 1, "frequency_penalty": 0.03,
        "allowed_token_ids": [*ids, EOS],
    }  # fmt: skip
    plain = SamplingParams(**common, ignore_eos=True)
    [[sample], *_], _ = generate(tiny_model, plain, PROMPTS[:1])
    text = sample[2]
    stops: list[dict[str, Any]] = [
        {"stop": [text[10:14]]},
        {"stop": [text[10:14]], "include_stop_str_in_output": True},
        {"stop": [text[5:6]], "min_tokens": 17},
        {"stop_token_ids": [ids[0]], "min_tokens": 9},
        {"stop_token_ids": ids, "min_tokens": 23, "include_stop_str_in_output": True},
        {"logit_bias": {EOS: 2.0}, "min_tokens": 11},
    ]
    params = [SamplingParams(**(common | {"ignore_eos": True} | stop)) for stop in stops[:-1]]
    params.append(SamplingParams(**(common | stops[-1])))
    stats = check(tiny_model, params, [PROMPTS[0]] * len(params))
    assert stats.num_accepted_tokens > 10


def test_preemption_changes_nothing(tiny_model: str) -> None:
    params = [
        SamplingParams(
            temperature=number % 2 / 5, seed=number, max_tokens=60, ignore_eos=True, logprobs=1,
            repetition_penalty=(1.0, 0.9)[number % 2],
        )
        for number in range(20)
    ]  # fmt: skip
    expected, _ = generate(tiny_model, params)
    found, stats = generate(
        tiny_model, params, speculative_config=config(3), max_model_len=160,
        kv_cache_memory=12 * block_bytes(), max_chunk_tokens=9,
    )  # fmt: skip
    assert found == expected
    assert stats.num_preemptions > 0
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_samples_have_drafts_and_beams_have_none(tiny_model: str) -> None:
    params = [
        SamplingParams(n=4, temperature=0.2, seed=number, max_tokens=25, ignore_eos=True)
        for number in range(6)
    ]
    check(tiny_model, params, PROMPTS[:6])
    beams = BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True)
    found = []
    for speculative in (None, config(4)):
        with LLM(tiny_model, speculative_config=speculative, **OPTIONS) as llm:
            found.append(
                [
                    (sequence.tokens, sequence.cum_logprob)
                    for output in llm.beam_search(PROMPTS[:6], beams)
                    for sequence in output.sequences
                ]
            )
            assert llm.engine.stats().num_draft_tokens == 0
    assert found[0] == found[1]


def test_a_worker_in_a_process_of_its_own(tiny_model: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    check(tiny_model, params, PROMPTS[:6], multiprocess=True)


# --- options --------------------------------------------------------------------------------------


def test_lengths_of_n_grams_stand_for_one_another() -> None:
    for given, expected in (
        ({}, (2, 5)),
        ({"prompt_lookup_min": 3}, (3, 3)),
        ({"prompt_lookup_max": 4, "prompt_lookup_min": None}, (4, 4)),
        ({"prompt_lookup_min": 1, "prompt_lookup_max": 4}, (1, 4)),
    ):
        made = EngineConfig(speculative_config=config(4, **given)).speculative_config
        assert isinstance(made, SpeculativeConfig)
        assert made.ngram_lengths == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_speculative_tokens": 3}, "speculative_config.method is missing"),
        ({"method": "ngram"}, "speculative_config.num_speculative_tokens is missing"),
        (config(0), "num_speculative_tokens must be an integer from 1 to 16, got 0"),
        (config(17), "num_speculative_tokens must be an integer from 1 to 16, got 17"),
        (config(2) | {"method": "eagle"}, "method must be ngram, got 'eagle'"),
        (config(2) | {"num_speculative_tokens": True}, "must be an integer from 1 to 16, got True"),
        (config(2, prompt_lookup_max=65), "prompt_lookup_max must be an integer from 1 to 64"),
        (config(2, prompt_lookup_min=-1), "prompt_lookup_min must be an integer from 1 to 64"),
        (config(2, prompt_lookup_min=0, prompt_lookup_max=3), "integer from 1 to 64, got 0"),
        (config(2, prompt_lookup_min=4, prompt_lookup_max=3), "must be at most prompt_lookup_max"),
        (config(2) | {"model": "x"}, "speculative_config.model is not supported; there are method"),
        ("ngram", "speculative_config must be a dict or None, got 'ngram'"),
    ],
)
def test_a_wrong_configuration_is_refused_by_name(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match="speculative_config") as caught:
        EngineConfig(speculative_config=given)
    assert message in str(caught.value)


def test_drafts_and_asynchronous_scheduling_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="speculative_config and async_scheduling exclude"):
        EngineConfig(speculative_config=config(2), async_scheduling=True)
