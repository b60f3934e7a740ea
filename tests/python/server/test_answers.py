"""Answers of the real engine on a tiny model: keys that clients look for, true counts, one BOS."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import openai.types
import openai.types.chat
import pytest
from pydantic import BaseModel
from tokenizers import Tokenizer, processors

from engine.test_model_defaults import changed_copy
from server.client import Client, events
from server.fakes import FakeEngine
from tiny_model import CHAT_TEMPLATE, EOS
from vllm_lite import LLM, AsyncLLMEngine, SamplingParams

OPTIONS: dict[str, Any] = {"num_threads": 1, "max_model_len": 256}
BOS = 0
MESSAGES = [{"role": "user", "content": "The quick"}]
GREEDY = {"temperature": 0, "max_tokens": 30}


@pytest.fixture(scope="module")
def tiny(tiny_model: str) -> Iterator[Client]:
    engine = AsyncLLMEngine(tiny_model, **OPTIONS)
    yield Client(cast(FakeEngine, engine))
    engine.close()


def strict_json(text: str) -> Any:
    return json.loads(text, parse_constant=lambda name: pytest.fail(name))


@pytest.mark.case("API-10")
@pytest.mark.parametrize("logprobs", [False, True])
def test_answers_have_every_key_that_openai_documents(tiny: Client, logprobs: bool) -> None:
    options = {"include_usage": True}
    types: dict[str, tuple[type[BaseModel], type[BaseModel], dict[str, Any]]] = {
        "/v1/chat/completions": (
            openai.types.chat.ChatCompletion,
            openai.types.chat.ChatCompletionChunk,
            {"messages": MESSAGES, "logprobs": logprobs},
        ),
        "/v1/completions": (
            openai.types.Completion,
            openai.types.Completion,
            {"prompt": "The quick", "logprobs": 2 if logprobs else None},
        ),
    }
    for path, (whole_type, event_type, fields) in types.items():
        body = {**fields, **GREEDY, "n": 2}
        whole = tiny.post(path, json=body).json()
        whole_type.model_validate(whole, strict=True)
        assert {"id", "object", "created", "model", "choices", "usage"} <= whole.keys()
        usage = whole["usage"]
        assert {"prompt_tokens", "completion_tokens", "total_tokens"} <= usage.keys()
        for choice in whole["choices"]:
            assert {"index", "finish_reason", "logprobs"} <= choice.keys()
            assert (choice["logprobs"] is not None) == logprobs
            if path == "/v1/chat/completions":
                message = choice["message"]
                assert message["role"] == "assistant" and isinstance(message["content"], str)
                assert message["refusal"] is None
        chunks = events(tiny.post(path, json=body | {"stream": True, "stream_options": options}))
        for chunk in chunks:
            if path == "/v1/completions":  # the client has no type of its own for these
                choices = [c | {"finish_reason": "stop"} for c in chunk["choices"]]
                event_type.model_validate(chunk | {"choices": choices}, strict=True)
            else:
                event_type.model_validate(chunk, strict=True)
            assert {"id", "object", "created", "model", "choices", "usage"} <= chunk.keys()
            assert (chunk["id"], chunk["model"]) == (chunks[0]["id"], whole["model"])
    vectors = tiny.post("/v1/embeddings", json={"input": ["a", "b"]}).json()
    openai.types.CreateEmbeddingResponse.model_validate(vectors, strict=True)
    for card in tiny.get("/v1/models").json()["data"]:
        openai.types.Model.model_validate(card, strict=True)


@pytest.mark.case("USG-03")
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"ignore_eos": True}, "length"),
        ({"ignore_eos": True, "max_tokens": 1}, "length"),
        ({"logit_bias": {str(EOS): 100}, "min_tokens": 5}, "stop"),
        ({"ignore_eos": True, "stop": True}, "stop"),
        ({"ignore_eos": True, "stop": True, "include_stop_str_in_output": True}, "stop"),
    ],
    ids=["length", "one token", "eos", "stop string", "shown stop string"],
)
def test_counts_are_those_of_the_tokens(
    tiny: Client, fields: dict[str, Any], reason: str, n: int
) -> None:
    body: dict[str, Any] = {"prompt": "The quick", **GREEDY, "return_token_ids": True, "n": n}
    body |= {"allowed_token_ids": [*range(30, 90), EOS], "repetition_penalty": 1.1}
    if "stop" in fields:
        text = tiny.complete(**body, ignore_eos=True).json()["choices"][0]["text"]
        fields = fields | {"stop": [text[9:12]]}
    body |= fields
    plain = tiny.complete(**body).json()
    tokens = [len(choice["token_ids"]) for choice in plain["choices"]]
    assert [choice["finish_reason"] for choice in plain["choices"]] == [reason] * n
    prompt = len(plain["choices"][0]["prompt_token_ids"])
    usage = plain["usage"]
    assert usage["prompt_tokens"] == prompt
    assert usage["completion_tokens"] == sum(tokens)
    assert usage["total_tokens"] == prompt + sum(tokens)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = events(tiny.complete(**body, stream=True, stream_options=options))
    streamed = [choice for chunk in chunks for choice in chunk["choices"]]
    assert sum(len(choice["token_ids"]) for choice in streamed) == sum(tokens)
    without_cache = {k: v for k, v in usage.items() if k != "prompt_tokens_details"}
    assert {k: v for k, v in last["usage"].items() if k in without_cache} == without_cache
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == sum(tokens)


@pytest.mark.case("LPR-05")
@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [40], "logprobs": 5},
        {"guided_regex": "[xyz]{4}", "logprobs": 5},
        {"echo": True, "logprobs": 1, "temperature": 1, "top_k": 1},
        {"bad_words": ["the", "dog"], "logprobs": 5},
    ],
)
def test_logprobs_beside_masks_are_finite_json(tiny: Client, fields: dict[str, Any]) -> None:
    body = {"prompt": "The quick", "temperature": 0, "max_tokens": 4, **fields}
    response = tiny.complete(**body)
    assert response.status_code == 200, response.text
    logprobs = strict_json(response.text)["choices"][0]["logprobs"]
    values = [value for value in logprobs["token_logprobs"] if value is not None]
    assert len(values) >= 4 and all(-1000 < value <= 0 for value in values)  # none is the floor
    for chunk in (e for e in tiny.complete(**body, stream=True).text.split("data: ") if e):
        if not chunk.startswith("[DONE]"):
            strict_json(chunk)


@pytest.mark.case("TPL-01")
def test_all_four_ways_in_give_a_chat_one_bos_and_a_text_the_tokenizers(
    tiny_model: str, tmp_path: Path
) -> None:
    """The tokenizer puts BOS before texts, and the template prints it, too."""
    model = changed_copy(
        tiny_model,
        tmp_path / "model",
        tokenizer_config={"chat_template": "{{ bos_token }}" + CHAT_TEMPLATE},
    )
    backend = Tokenizer.from_file(f"{model}/tokenizer.json")
    backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair=None, special_tokens=[("<|bos|>", BOS)]
    )
    backend.save(f"{model}/tokenizer.json")
    bare = backend.encode("The quick", add_special_tokens=False).ids
    with LLM(model, **OPTIONS) as llm:
        params = SamplingParams(max_tokens=1)
        text = llm.generate("The quick", params, use_tqdm=False)[0].prompt_token_ids
        chat = llm.chat(MESSAGES, params, use_tqdm=False)[0].prompt_token_ids
    assert text == [BOS, *bare]
    assert chat.count(BOS) == 1 and chat[0] == BOS
    engine = AsyncLLMEngine(model, **OPTIONS)
    try:
        client = Client(cast(FakeEngine, engine))
        fields = {"prompt": "The quick", "max_tokens": 1, "return_token_ids": True}
        for special, expected in ((None, text), (True, text), (False, bare)):
            answer = client.complete(**fields, add_special_tokens=special).json()
            assert answer["choices"][0]["prompt_token_ids"] == expected
        for special in (None, False, True):  # never a second one
            answer = client.chat(
                messages=MESSAGES, max_tokens=1, return_token_ids=True, add_special_tokens=special
            ).json()
            assert answer["prompt_token_ids"] == chat
        # As it is given: nothing is taken away from a text that begins with one.
        doubled = client.complete(**fields | {"prompt": "<|bos|>The quick"}).json()
        assert doubled["choices"][0]["prompt_token_ids"] == [BOS, BOS, *bare]
    finally:
        engine.close()
