"""Every request field with wrong types and ranges: always a 4xx in OpenAI's shape, never a 5xx."""

import random
from typing import Any

import msgspec
import pytest

from server.client import Client, refused
from server.fakes import VOCAB_SIZE
from vllm_lite.sampling_params import SamplingParams
from vllm_lite.server.protocol import ChatRequest, CompletionRequest, GenerationRequest, Ignored

PATHS = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
}

# Values that a field's type or range excludes.
NUMBER = ["1", True, [], {}, [1]]
WRONG: dict[str, list[Any]] = {
    "model": [1, True, [], {}],
    "max_tokens": [*NUMBER, 0, -1, 1.5, 2**31, 2**70],
    "max_completion_tokens": [*NUMBER, 0, -1, 1.5, 2**31],
    "prompt_logprobs": [*NUMBER, -1, 21, VOCAB_SIZE, 1.5, 2**70],
    "temperature": [*NUMBER, -0.1, 2.01, 1e308],
    "top_p": [*NUMBER, 0, -0.5, 1.1],
    "top_k": [*NUMBER, -2, 1.5, 2**31],
    "min_p": [*NUMBER, -0.1, 1.1],
    "n": [*NUMBER, 0, -1, 1.5, 129, 2**40],
    "seed": [*NUMBER, 1.5, 2**63, -(2**63) - 1],
    "repetition_penalty": [*NUMBER, 0, -1, 1e-39, 1e39],
    "presence_penalty": [*NUMBER, -2.1, 2.1],
    "frequency_penalty": [*NUMBER, -2.1, 2.1],
    "logit_bias": [
        1,
        "x",
        [1],
        {"999999": 5},
        {str(VOCAB_SIZE): 5},
        {"-1": 5},
        {"abc": 1},
        {"1.5": 1},
        {"5": "x"},
        {"5": None},
        {"5": 1e9},
        {"5": -100.5},
        {str(i): 1 for i in range(1025)},
    ],
    "allowed_token_ids": [
        [1] * 301,
        1,
        "x",
        {},
        [],
        [-1],
        [VOCAB_SIZE],
        [1.5],
        [True],
        ["1"],
        [2**70],
    ],
    "stop": [1, True, {}, [1], [None], "", [""], ["x"] * 17, "x" * 1025],
    "stop_token_ids": [
        1,
        "x",
        {},
        [-1],
        [VOCAB_SIZE],
        [1.5],
        [True],
        ["1"],
        [2**70],
        [1] * 301,
        [1] * 1025,
    ],
    "include_stop_str_in_output": [1, "true", [], {}],
    "ignore_eos": [1, "true", [], {}],
    "min_tokens": [*NUMBER, -1, 1.5, 4, 2**31],
    "skip_special_tokens": [1, "true", [], {}],
    "return_tokens_as_token_ids": [1, "true", [], {}],
    "bad_words": [1, True, "x", {}, [1], [""], [" "], ["x"] * 257, ["x" * 257]],
    "response_format": [1, True, "json", [], {}, {"type": 1}, {"type": "json_schema"}],
    "structured_outputs": [1, True, "x", [], {}, {"regex": 1}, {"regex": "("}, {"choice": []}],
    "guided_choice": [1, True, "x", {}, [], [1], [""]],
    "guided_grammar": [1, True, [], {}, "", "x"],
    "guided_json": [1, True, [], "", "x", "[1]", {"type": 1}, {"not": {}}],
    "guided_regex": [1, True, [], {}, "(", "*"],
    "stream": [1, "true", [], {}],
    "stream_options": [1, "x", [], {}, {"include_usage": 1}, {"include_usage": True}],
    "user": [1, True, [], {}],
    "priority": [*NUMBER, 1.5, 2**31, -(2**31) - 1],
    "request_id": [1, [], {}, "", "a b", "x" * 129, "a\n", "é"],
    "cache_salt": [1, True, [], {}, "", "x" * 1025],
    "truncate_prompt_tokens": [*NUMBER, 0, -2, 1.5, 257, 2**31],
    "truncation_side": [1, True, "x", [], {}],
    "return_token_ids": [1, "true", [], {}],
    "documents": [1, "x", {}, [1], ["x"], [{}] * 1025],
    "reasoning_effort": [1, True, [], {}, "", "extreme"],
    "chat_template": [1, True, [], {}, "x", "x" * 70_000],
    "best_of": [*NUMBER, 0, -1, 1.5, 129],
    "use_beam_search": [1, "true", [], {}],
    "length_penalty": [*NUMBER, 2, 10.5, -10.5],
    "early_stopping": [1, "always", [], {}, True, "never"],
    "prompt": [1, True, {}, [], "", [VOCAB_SIZE]],
    "add_special_tokens": [1, "x", [], {}],
    "echo": [1, "true", [], {}],
    "messages": [1, "x", {}, [], [1], [{}], [{"role": "user", "content": "x"}] * 4097],
    "top_logprobs": [*NUMBER, -1, 21, 1.5, 1],
    "add_generation_prompt": [1, "x", [], {}],
    "continue_final_message": [1, "x", [], {}],
    "chat_template_kwargs": [1, "x", [], {"tokenize": 1}],
    "tools": [1, "x", {}, [1], [{}], [{"type": "function", "function": {"name": "f"}}]],
    "tool_choice": [1, True, [], "some", "required", {}, {"type": "custom"}, {"type": "function"}],
    "parallel_tool_calls": [1, "x", [], {}],
    "include_reasoning": [1, "x", [], {}],
}
LOGPROBS = {"/v1/completions": [*NUMBER, -1, 21, 1.5], "/v1/chat/completions": [1, 0, "x", [], {}]}
UNSUPPORTED = [True, 1, "xyz", [1], {"a": 1}]


def wrong_values(path: str, field: str) -> list[Any]:
    if field == "logprobs":
        return LOGPROBS[path]
    if any(f.name == field and f.type is Ignored for f in msgspec.structs.fields(PATHS[path])):
        return []
    values = WRONG.get(field, UNSUPPORTED)
    # Neutral values of fields that are not supported are fine.
    return [v for v in values if not (v is True and field == "spaces_between_special_tokens")]


def fields_of(request: type[GenerationRequest]) -> list[str]:
    return [field.name for field in msgspec.structs.fields(request)]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.case("SMP-01", "SMP-03", "PEN-01")
def test_wrong_types_and_ranges_are_400_naming_the_field(client: Client, path: str) -> None:
    """Also: each wrong value alone, and the engine never sees it."""
    good = GOOD[path]
    count = 0
    for field in fields_of(PATHS[path]):
        for value in wrong_values(path, field):
            response = client.post(path, json=good | {field: value})
            assert response.status_code == 400, (field, value, response.text)
            error = refused(response, 400, None, field)
            assert error["param"].split("[")[0].split(".")[0] == field, (field, value, error)
            count += 1
    assert count > 200
    assert client.engine.calls == []
    assert client.post(path, json=good).status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_rules_and_messages_are_those_of_sampling_params(client: Client, path: str) -> None:
    shared = set(SamplingParams.__struct_fields__) & set(fields_of(PATHS[path]))
    shared.remove("structured_outputs")  # another type
    if path == "/v1/chat/completions":
        shared.remove("logprobs")  # a bool
    for field in sorted(shared):
        for value in wrong_values(path, field):
            if field == "max_tokens" and value == 0:  # needs echo, which is not the engine's
                continue
            with pytest.raises(ValueError) as offline:
                SamplingParams(**{"max_tokens": 3, field: value}).validate_for(VOCAB_SIZE)
            error = refused(client.post(path, json=GOOD[path] | {field: value}), 400, None, field)
            assert error["message"] == str(offline.value)
    assert len(shared) > 20


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.case("SMP-03")
def test_random_bodies_never_give_5xx(client: Client, path: str) -> None:
    rng = random.Random(7)
    names = [*fields_of(PATHS[path]), "unknown"]

    def value(depth: int = 0) -> Any:
        kind = rng.randrange(11 if depth < 3 else 8)
        match kind:
            case 0:
                return None
            case 1:
                return rng.choice([True, False])
            case 2:
                return rng.choice([0, 1, -1, 2, 3, 257, 299, 300, 2**31, 2**63, 2**64, -(2**63)])
            case 3:
                return rng.choice([0.0, -0.0, 0.5, 1.0, 1.5, -1e-9, 1e300, 5e-324])
            case 4 | 5 | 6 | 7:
                words = ["", "a", "fake", "none", "text", "auto", "\0", "€", "5", "user", "x" * 300]
                return rng.choice(words)
            case 8:
                return [value(depth + 1) for _ in range(rng.randrange(4))]
            case 9:
                keys = ["role", "content", "type", "text", "5", "include_usage", "name", "function"]
                return {rng.choice(keys): value(depth + 1) for _ in range(rng.randrange(4))}
        return {"role": "user", "content": value(depth + 1), "tool_calls": value(depth + 1)}

    good = 0
    for _ in range(500):
        body = dict(GOOD[path]) if rng.random() < 0.7 else {}
        body |= {rng.choice(names): value() for _ in range(rng.randrange(1, 4))}
        response = client.post(path, json=body)
        if response.status_code == 200:
            good += 1
        else:
            assert response.status_code in (400, 404), (body, response.text)
            refused(response, response.status_code)
    assert good > 10  # the bodies are not all nonsense
    assert client.engine.running == 0
