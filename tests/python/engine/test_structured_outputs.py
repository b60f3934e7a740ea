"""Grammars and bad words: what an output may be, beside all else that a request can ask for."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
from llguidance import LLParserLimits

from engine.delayed import DelayedDevice
from tiny_model import EOS, block_bytes
from vllm_lite import LLM, RequestOutput, SamplingParams
from vllm_lite.sampling_params import StructuredOutputsParams
from vllm_lite.worker import token_masks

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "é"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PROMPTS = ["The quick", "def f(x):", "Größe", "東京", "lazy dog, and", "it is", "12345", "café"]


def structured(**options: Any) -> SamplingParams:
    kind = {name: options.pop(name) for name in tuple(options) if name in KINDS}
    defaults: dict[str, Any] = {"max_tokens": 400, "temperature": 1.0, "seed": 1}
    return SamplingParams(
        structured_outputs=StructuredOutputsParams(**kind) if kind else None, **(defaults | options)
    )


KINDS = StructuredOutputsParams.__struct_fields__


def texts(llm: LLM, prompts: str | list[str], params: Any) -> list[str]:
    return [
        sample.text
        for output in llm.generate(prompts, params, use_tqdm=False)
        for sample in output.outputs
    ]


@pytest.fixture(scope="module")
def llm(tiny_model: str) -> Iterator[LLM]:
    """Of random weights: what it writes fits only because it must."""
    with LLM(tiny_model, num_threads=1, max_model_len=512, max_num_seqs=8) as made:
        yield made


def check_schema(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"name", "age", "tags"}
    assert isinstance(value["name"], str) and len(value["name"]) <= 8
    assert 0 <= value["age"] <= 150 and len(value["tags"]) <= 3
    assert set(value["tags"]) <= {"a", "b", "é"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outputs_are_what_was_asked_for(llm: LLM, temperature: float) -> None:
    params = [
        structured(json=SCHEMA),
        structured(json=json.dumps(SCHEMA)),
        structured(regex=r"(\d{3}-)?[a-f]{2,5}", temperature=temperature),
        structured(choice=["red", "green", "blue"], temperature=temperature),
        structured(grammar='start: "<" ("a" | "bc")~2 ">"', temperature=temperature),
        structured(grammar='root ::= "x" [0-9] "y"', temperature=temperature),
    ]
    outputs = llm.generate(PROMPTS[:6], params, use_tqdm=False)
    assert [one.outputs[0].finish_reason for one in outputs] == ["stop"] * 6
    assert [one.outputs[0].stop_reason for one in outputs] == [None] * 6
    first, second, third, fourth, fifth, sixth = (one.outputs[0].text for one in outputs)
    check_schema(first)
    check_schema(second)
    assert re.fullmatch(r"(\d{3}-)?[a-f]{2,5}", third)
    assert fourth in {"red", "green", "blue"}
    assert re.fullmatch(r"<(a|bc){2}>", fifth) and re.fullmatch(r"x[0-9]y", sixth)


def test_json_object_is_an_object_or_its_beginning(llm: LLM) -> None:
    for seed in range(4):
        (output,) = llm.generate(
            PROMPTS[0], structured(json_object=True, seed=seed, max_tokens=100), use_tqdm=False
        )
        assert output.outputs[0].text.startswith("{")
        if output.outputs[0].finish_reason == "stop":
            assert isinstance(json.loads(output.outputs[0].text), dict)


@pytest.mark.case("SOT-06")
def test_white_space_is_bounded(llm: LLM) -> None:
    space = llm.get_tokenizer().encode(" ")
    params = structured(
        json=SCHEMA, logit_bias=dict.fromkeys(space, 100.0), max_tokens=500, temperature=0.0
    )
    (output,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    text = output.outputs[0].text
    assert max(map(len, re.findall(r"(?<=[{,:\[])[ \n\r\t]+", text))) == 64
    if output.outputs[0].finish_reason == "stop":
        check_schema(text)


@pytest.mark.case("SOT-08")
def test_a_number_may_end_when_it_is_one(llm: LLM) -> None:
    digits = [token for digit in "0123456789" for token in llm.get_tokenizer().encode(digit)]
    params = structured(json={"type": "number"}, temperature=1.0, allowed_token_ids=[*digits, EOS])
    for seed in range(4):
        params.seed = seed
        (output,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
        assert output.outputs[0].finish_reason == "stop"
        assert isinstance(json.loads(output.outputs[0].text), int)
    (output,) = llm.generate(PROMPTS[0], structured(json={}, max_tokens=40), use_tqdm=False)
    if output.outputs[0].finish_reason == "stop":
        json.loads(output.outputs[0].text)


@pytest.mark.case("SOT-10")
@pytest.mark.parametrize(
    "pattern",
    [
        r"[\x00-\u2e7f]{1,9}",
        "[\u0430-\u044f]{3}",
        "é|日本",
        "(?s:.){3}",
        "x?🙂{1,2}",
        r"[^a-z\n]{4}",
    ],
)
def test_characters_are_whole(llm: LLM, pattern: str) -> None:
    params = [structured(regex=pattern, seed=seed, max_tokens=300) for seed in range(6)]
    for output in llm.generate(PROMPTS[:6], params, use_tqdm=False):
        sample = output.outputs[0]
        if sample.finish_reason == "stop":
            assert re.fullmatch(pattern, sample.text), sample.text


def test_neighbours_chunks_and_preemption_change_nothing(tiny_model: str) -> None:
    params = [
        structured(json=SCHEMA, seed=3, logprobs=2),
        structured(regex="[a-z ]{40}", seed=4),
        structured(seed=5, bad_words=["a", "the"], max_tokens=40, ignore_eos=True),
        structured(seed=6, max_tokens=40, ignore_eos=True),
    ]
    prompts = ["The quick brown fox jumps " * 2, "def f(x):", "Größe", "東京"]

    def run(llm: LLM, chosen: list[int]) -> list[Any]:
        outputs = llm.generate(
            [prompts[i] for i in chosen], [params[i] for i in chosen], use_tqdm=False
        )
        return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs]

    with LLM(tiny_model, num_threads=1, max_model_len=256) as llm:
        alone = [run(llm, [i])[0] for i in range(4)]
        assert run(llm, [0, 1, 2, 3]) == alone
    with LLM(tiny_model, num_threads=1, max_model_len=256, max_num_batched_tokens=8) as llm:
        assert run(llm, [0, 1, 2, 3, 0, 1]) == [*alone, *alone[:2]]
    small = {"max_model_len": 96, "block_size": 16, "kv_cache_memory": 7 * block_bytes(16)}
    with LLM(tiny_model, num_threads=1, **small) as llm:
        for one in params:
            one.max_tokens = 60
        expected = [run(llm, [i])[0] for i in range(4)]
        assert run(llm, [0, 1, 2, 3] * 3) == expected * 3
        assert llm.engine.stats().num_preemptions > 0


@pytest.mark.parametrize("multiprocess", [False, True], ids=["in process", "in processes"])
def test_asynchronous_scheduling_gives_the_same(
    tiny_model: str, multiprocess: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [structured(json=SCHEMA, seed=seed) for seed in range(4)]
    params += [structured(regex="(ab|c){2,9}", n=3, seed=9), structured(bad_words=["e"], seed=2)]
    # Of which one is preempted now and then.
    pool = {"max_model_len": 160, "block_size": 16, "kv_cache_memory": 12 * block_bytes(16)}

    def run(**options: Any) -> list[RequestOutput]:
        with LLM(tiny_model, num_threads=1, **pool, **options) as llm:
            return llm.generate(PROMPTS[:6], params, use_tqdm=False)

    def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
        return [[sample.token_ids for sample in output.outputs] for output in outputs]

    for one in params:
        one.max_tokens = 120
    expected = tokens(run(async_scheduling=False))
    device = DelayedDevice(monkeypatch)
    assert tokens(run(async_scheduling=True, multiprocess=multiprocess)) == expected
    if not multiprocess:
        assert device.num_placeholders > 0


def test_samples_of_one_prompt_each_have_their_own_state(llm: LLM) -> None:
    outputs = texts(llm, PROMPTS[0], structured(json=SCHEMA, n=6))
    for text in outputs:
        check_schema(text)
    assert len(set(outputs)) > 1


@pytest.mark.case("LPR-05")
def test_logprobs_are_the_models_own(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[0], structured(choice=["Größe"], logprobs=5), use_tqdm=False)
    sample = output.outputs[0]
    assert sample.text == "Größe" and sample.logprobs is not None
    for token, position in zip(sample.token_ids, sample.logprobs, strict=True):
        ranks = [one.rank for one in position.values()]
        assert next(iter(position)) == token and sorted(ranks)[:5] == [1, 2, 3, 4, 5]
        assert all(math.isfinite(one.logprob) for one in position.values())
    # What a model of random weights would hardly have chosen.
    assert any(position[token].rank > 5 for token, position in zip(
        sample.token_ids, sample.logprobs, strict=True))  # fmt: skip


def test_stop_strings_and_ids_end_an_output_early(llm: LLM) -> None:
    (output,) = llm.generate(
        PROMPTS[0], structured(choice=["one two"], stop=[" t"]), use_tqdm=False
    )
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("one", " t")
    (token, *_) = llm.get_tokenizer().encode("o")
    (output,) = llm.generate(
        PROMPTS[0],
        structured(regex="[no]{30}", stop_token_ids=[token], logit_bias={token: 50.0}),
        use_tqdm=False,
    )
    assert output.outputs[0].stop_reason == token


def test_min_tokens_keeps_an_output_going_only_while_the_grammar_can(llm: LLM) -> None:
    params = [
        structured(regex="a{1,50}", min_tokens=10, logit_bias={EOS: 100.0}),
        structured(choice=["ab"], min_tokens=10, logit_bias={EOS: 100.0}),
    ]
    long, short = llm.generate(PROMPTS[:2], params, use_tqdm=False)
    assert len(long.outputs[0].token_ids) >= 10 and long.outputs[0].finish_reason == "stop"
    assert short.outputs[0].text == "ab" and short.outputs[0].finish_reason == "stop"


def test_ignore_eos_goes_on_as_long_as_the_grammar_can(llm: LLM) -> None:
    params = [
        structured(regex="a{1,9}", ignore_eos=True, logit_bias={EOS: 100.0}),
        structured(regex="a+", ignore_eos=True, logit_bias={EOS: 100.0}, max_tokens=12),
    ]
    whole, cut = llm.generate(PROMPTS[:2], params, use_tqdm=False)
    assert (whole.outputs[0].text, whole.outputs[0].finish_reason) == ("a" * 9, "stop")
    assert cut.outputs[0].finish_reason == "length" and set(cut.outputs[0].text) == {"a"}


def test_masks_that_leave_no_token_end_their_request_alone(llm: LLM) -> None:
    (b, *_) = llm.get_tokenizer().encode("b")
    params = [
        structured(choice=["xyz"], allowed_token_ids=[b]),
        structured(choice=["b"], bad_words=["b"]),
        structured(regex="[ab]{3}", allowed_token_ids=[b, EOS]),
    ]
    masked, bad, fine = llm.generate(PROMPTS[:3], params, use_tqdm=False)
    for output in (masked, bad):
        assert output.outputs[0].finish_reason == "error"
        assert "no token is left" in (output.error or "")
    assert fine.outputs[0].text == "bbb"


@pytest.mark.parametrize("words", [["e"], [" the"], ["quick brown"], ["12", "é"]])
def test_bad_words_are_never_completed(llm: LLM, words: list[str]) -> None:
    tokenizer = llm.get_tokenizer()
    sequences = [
        tokenizer.encode(prefix + word.strip(), add_special_tokens=False)
        for word in words
        for prefix in ("", " ")
    ]
    wanted = {token: 12.0 for sequence in sequences for token in sequence}

    def found(bad_words: list[str] | None) -> bool:
        params = [
            structured(bad_words=bad_words, logit_bias=wanted, seed=seed, max_tokens=60)
            for seed in range(4)
        ]
        return any(
            output.outputs[0].token_ids[at : at + len(sequence)] == sequence
            for output in llm.generate(PROMPTS[:4], params, use_tqdm=False)
            for sequence in sequences
            for at in range(60)
        )

    assert found(None) and not found(words)


def test_special_text_is_not_a_special_token(llm: LLM) -> None:
    (output,) = llm.generate(
        PROMPTS[0], structured(choice=["a<|eos|>b", "a<|eos|>c"]), use_tqdm=False
    )
    assert output.outputs[0].text in ("a<|eos|>b", "a<|eos|>c")
    assert EOS not in output.outputs[0].token_ids[:-1]


@pytest.mark.case("SMP-08")
def test_requests_of_every_kind_run_together(llm: LLM) -> None:
    base = {"max_tokens": 12, "ignore_eos": True}
    params = [
        structured(**base),
        structured(logit_bias={5: 3.0}, **base),
        structured(presence_penalty=1.0, repetition_penalty=1.2, **base),
        structured(regex="[a-z]{8}"),
        structured(seed=77, **base),
        structured(min_tokens=4, max_tokens=12),
        structured(logprobs=3, **base),
        structured(n=2, **base),
    ]
    alone = [texts(llm, prompt, one) for prompt, one in zip(PROMPTS, params, strict=True)]
    assert texts(llm, PROMPTS, params) == [text for one in alone for text in one]


def test_a_grammar_that_becomes_too_complex_fails_its_request_alone(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = LLParserLimits(step_max_items=40, verbose_errors=False)
    monkeypatch.setattr(token_masks, "limits", lambda: few)
    wide = "start: " + " ".join(f'("{letter}" "x"*)?' for letter in "abcdefghijklmnopqrstuvwxyz")
    params = [structured(grammar=wide), structured(choice=["red"]), structured(max_tokens=5)]
    with LLM(tiny_model, num_threads=1, max_model_len=128) as llm:
        hard, easy, free = llm.generate(PROMPTS[:3], params, use_tqdm=False)
    assert hard.outputs[0].finish_reason == "error" and "too complex" in (hard.error or "")
    assert easy.outputs[0].text == "red" and free.outputs[0].finish_reason in ("length", "stop")
