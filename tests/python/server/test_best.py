"""``n``, ``best_of`` and beam search over HTTP, with the real engine on a tiny model."""

from collections.abc import Iterator
from typing import Any, cast

import pytest

from server.client import Client, events, refused
from server.fakes import FakeEngine
from tiny_model import EOS
from vllm_lite import AsyncLLMEngine, SamplingParams

BEAMS = {"use_beam_search": True, "n": 3, "max_tokens": 8}


@pytest.fixture(scope="module")
def tiny(tiny_model: str) -> Iterator[Client]:
    engine = AsyncLLMEngine(
        tiny_model, num_threads=1, max_num_seqs=8, max_num_waiting=16, max_model_len=256
    )
    yield Client(cast(FakeEngine, engine))
    engine.close()


def choices(response: Any) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    answer: list[dict[str, Any]] = response.json()["choices"]
    assert [choice["index"] for choice in answer] == list(range(len(answer)))
    return answer


@pytest.mark.case("NSA-03")
def test_chunks_of_several_choices_have_their_index_one_role_and_one_end(tiny: Client) -> None:
    response = tiny.chat(n=3, stream=True, logprobs=True, max_tokens=6, seed=5, ignore_eos=True)
    roles, ends, tokens = [], [], dict.fromkeys(range(3), 0)
    for chunk in events(response):
        for choice in chunk["choices"]:
            if "role" in choice["delta"]:
                roles.append(choice["index"])
            if choice["finish_reason"] is not None:
                ends.append(choice["index"])
            if choice["logprobs"] is not None:
                tokens[choice["index"]] += len(choice["logprobs"]["content"])
    assert sorted(roles) == sorted(ends) == [0, 1, 2]
    assert tokens == {0: 6, 1: 6, 2: 6}
    assert response.text.count("[DONE]") == 1


@pytest.mark.case("NSA-05")
def test_best_of_gives_the_likeliest_n_best_first(tiny: Client) -> None:
    fields = {"seed": 3, "max_tokens": 6, "logprobs": 0}
    drawn = choices(tiny.complete(n=4, **fields))
    sums = {choice["text"]: sum(choice["logprobs"]["token_logprobs"]) for choice in drawn}
    best = choices(tiny.complete(n=2, best_of=4, **fields))
    assert [choice["text"] for choice in best] == sorted(sums, key=lambda text: -sums[text])[:2]
    # Also where log-probabilities are not asked for, and none are told then.
    plain = choices(tiny.complete(n=2, best_of=4, seed=3, max_tokens=6))
    assert [choice["text"] for choice in plain] == [choice["text"] for choice in best]
    assert [choice["logprobs"] for choice in plain] == [None, None]


def test_best_of_for_several_prompts(tiny: Client) -> None:
    answer = choices(tiny.complete(prompt=["abc", "def"], best_of=3, max_tokens=4))
    assert len(answer) == 2


@pytest.mark.case("NSA-05")
def test_best_of_is_refused_where_it_has_no_meaning(tiny: Client) -> None:
    refused(tiny.complete(n=2, best_of=4, stream=True), 400, "best_of", "cannot be streamed")
    assert events(tiny.complete(n=2, best_of=2, stream=True, max_tokens=2))
    refused(tiny.complete(n=3, best_of=2), 400, "best_of", "from 3")
    refused(tiny.complete(best_of=129), 400, "best_of")
    refused(tiny.complete(best_of=17), 400, "best_of", "17", "max_num_waiting")
    refused(tiny.complete(**BEAMS, best_of=4), 400, "best_of", "must equal n")


def test_beam_search_gives_its_n_best(tiny: Client) -> None:
    answer = choices(tiny.complete(**BEAMS))
    assert len({choice["text"] for choice in answer}) == 3
    assert {choice["finish_reason"] for choice in answer} <= {"stop", "length"}
    with_logprobs = choices(tiny.complete(**BEAMS, logprobs=0, ignore_eos=True))
    sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in with_logprobs]
    assert sums == sorted(sums, reverse=True)  # all have one length
    chat = choices(tiny.chat(**BEAMS, logprobs=True))
    assert all(choice["logprobs"]["content"] for choice in chat)
    assert tiny.complete(**BEAMS).json() | {"id": 0, "created": 0} == tiny.complete(
        **BEAMS, temperature=0, seed=7, length_penalty=1, early_stopping=False
    ).json() | {"id": 0, "created": 0}


@pytest.mark.case("BEM-05")
def test_beam_search_with_stop_ids_that_are_not_eos(tiny: Client) -> None:
    tokens = choices(tiny.complete(max_tokens=1, temperature=0, logprobs=0,
                                   return_tokens_as_token_ids=True))  # fmt: skip
    stop = int(tokens[0]["logprobs"]["tokens"][0].removeprefix("token_id:"))
    assert stop != EOS
    answer = choices(tiny.complete(**BEAMS, stop_token_ids=[stop], length_penalty=0))
    assert stop in [choice["stop_reason"] for choice in answer]
    assert tiny.get("/health").status_code == 200


@pytest.mark.case("BEM-01")
def test_a_beam_search_wider_than_may_run_is_a_400(tiny: Client) -> None:
    refused(tiny.complete(**BEAMS | {"n": 9}), 400, "n", "max_num_seqs is 8")
    assert len(choices(tiny.complete(**BEAMS | {"n": 8}))) == 8


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.5),
        ("top_p", 0.5),
        ("top_k", 4),
        ("min_p", 0.1),
        ("repetition_penalty", 1.2),
        ("presence_penalty", 1),
        ("frequency_penalty", 1),
        ("logit_bias", {"5": 1}),
        ("allowed_token_ids", [5]),
        ("stop", "x"),
        ("min_tokens", 2),
        ("logprobs", 2),
        ("length_penalty", 11),
        ("length_penalty", "1"),
        ("early_stopping", "always"),
        ("early_stopping", 1),
    ],
)
def test_what_a_beam_search_does_not_take_is_refused_by_name(
    client: Client, field: str, value: object
) -> None:
    refused(client.complete(**BEAMS, **{field: value}), 400, field)
    assert client.engine.calls == []


def test_a_beam_search_is_not_streamed(client: Client) -> None:
    refused(client.complete(**BEAMS, stream=True), 400, "use_beam_search", "cannot be streamed")
    refused(client.chat(**BEAMS, stream=True), 400, "use_beam_search", "cannot be streamed")


@pytest.mark.parametrize(("field", "value"), [("length_penalty", 2), ("early_stopping", True)])
def test_fields_of_beam_search_need_it(client: Client, field: str, value: object) -> None:
    refused(client.complete(**{field: value}), 400, field, "needs use_beam_search")
    assert client.complete(length_penalty=1, early_stopping=False).status_code == 200


def test_the_models_sampling_defaults_are_none_of_a_beam_search(client: Client) -> None:
    client.engine.model_config.generation_defaults = {"temperature": 0.6, "top_p": 0.9}
    response = client.complete(**BEAMS, length_penalty=0.5, early_stopping="never")
    assert response.status_code == 200
    params: SamplingParams = client.engine.calls[0].params
    assert (params.n, params.length_penalty, params.early_stopping) == (3, 0.5, "never")
    assert (params.use_beam_search, params.top_p) == (True, 1.0)


def test_what_cannot_be_fulfilled_is_the_requests_fault(tiny: Client) -> None:
    """It was a 500, though another field of the same request was the cause."""
    impossible = {"structured_outputs": {"regex": "ab"}, "allowed_token_ids": [EOS]}
    for fields in ({}, {"n": 3}, {"best_of": 2}):
        refused(tiny.complete(**impossible, **fields), 400, None, "allowed_token_ids")
    late = {"structured_outputs": {"regex": "[a-z]{3}b"}, "bad_words": ["b"], "max_tokens": 40}
    assert '"type":"invalid_request_error"' in tiny.complete(stream=True, **late).text


@pytest.mark.parametrize(
    ("endpoint", "fields", "param"),
    [
        ("complete", {"echo": True, "logprobs": 0}, "echo"),
        ("complete", {"prompt_logprobs": 0}, "prompt_logprobs"),
        ("complete", {"logprobs": 2}, "logprobs"),
        ("chat", {"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        ("chat", {"response_format": {"type": "json_object"}}, "response_format"),
        ("chat", {"guided_regex": "a"}, "guided_regex"),
    ],
)
def test_what_a_search_cannot_take_is_named_as_it_was_sent(
    tiny: Client, endpoint: str, fields: dict[str, Any], param: str
) -> None:
    error = refused(getattr(tiny, endpoint)(**BEAMS, **fields), 400, param, "use_beam_search")
    assert error["message"].startswith(param)
