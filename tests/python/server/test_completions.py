"""/v1/completions: prompts, parameters, limits, streams."""

import json

import msgspec
import pytest

from server.client import Client, events, raw_events, refused
from server.fakes import MAX_MODEL_LEN, VOCAB_SIZE, Script
from vllm_lite.errors import EngineDeadError, EngineError, QueueFullError
from vllm_lite.sampling_params import RequestOutputKind
from vllm_lite.server.options import ServerOptions
from vllm_lite.server.protocol import CompletionRequest


def test_answer_has_every_key_that_clients_check(client: Client) -> None:
    body = client.complete(user="u", seed=1).json()
    assert set(body) == {"id", "object", "created", "model", "choices", "usage"}
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["model"] == "fake"
    assert body["choices"] == [
        {
            "index": 0,
            "text": "Hello, world",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 12,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.case("STR-01")
@pytest.mark.parametrize("max_tokens", [1, 2, 10])
@pytest.mark.parametrize("per_output", [1, 3])
def test_stream_joins_to_the_plain_text(client: Client, max_tokens: int, per_output: int) -> None:
    client.engine.script = Script("naïve → 日本語 text", per_output=per_output)
    plain = client.complete(max_tokens=max_tokens).json()["choices"][0]
    chunks = events(client.complete(max_tokens=max_tokens, stream=True))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == plain["text"]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert reasons == [plain["finish_reason"]] == ["length"]
    assert all("usage" not in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_plain_requests_ask_for_one_final_output_and_streams_for_deltas(client: Client) -> None:
    client.complete()
    client.complete(stream=True)
    kinds = [call.params.output_kind for call in client.engine.calls]
    assert kinds == [RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA]


@pytest.mark.case("USG-01", "USG-03", "USG-05")
def test_usage_chunk_comes_once_after_all_finish_chunks(client: Client) -> None:
    client.engine.script.cached = 2
    fields = {"n": 2, "prompt": ["ab", "cde"], "max_tokens": 3}
    plain = client.complete(**fields).json()
    chunks = events(client.complete(**fields, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == plain["usage"]
    assert plain["usage"]["prompt_tokens"] == 5
    assert plain["usage"]["completion_tokens"] == 12
    assert plain["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    finished = [c["choices"][0]["index"] for c in chunks[:-1] if c["choices"][0]["finish_reason"]]
    assert sorted(finished) == [0, 1, 2, 3]
    for index in range(4):
        text = "".join(
            c["choices"][0]["text"] for c in chunks[:-1] if c["choices"][0]["index"] == index
        )
        assert text == plain["choices"][index]["text"] == "Hel"


def test_continuous_usage_counts_up(client: Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(client.complete(stream=True, stream_options=options, max_tokens=3))
    assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 2, 3, 3]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("abc", [[97, 98, 99]]),
        (["a", "b"], [[97], [98]]),
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
        ([VOCAB_SIZE - 1], [[VOCAB_SIZE - 1]]),
    ],
)
@pytest.mark.case("API-06")
def test_prompt_kinds(client: Client, prompt: object, expected: list[list[int]]) -> None:
    body = client.complete(prompt=prompt, max_tokens=1).json()
    assert [call.prompt for call in client.engine.calls] == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    assert len({call.request_id for call in client.engine.calls}) == len(expected)


@pytest.mark.parametrize(
    ("prompt", "word"),
    [
        ("", "empty"),
        ([], "empty"),
        ([[]], "empty"),
        ([""], "empty"),
        (["a", ""], "empty"),
        ([1, VOCAB_SIZE, 5], str(VOCAB_SIZE)),
        ([[1], [2, VOCAB_SIZE]], str(VOCAB_SIZE)),
        ([1, -1], "-1"),
        ([1, 2**62], str(2**62)),
        ([1, 3.7], "3.7"),
        ([[1, 3.7]], "3.7"),
        ([True], "True"),
        ([1, "a"], "mixture"),
        ([[1], 2], "mixture"),
        (["a", None], "None"),
        (7, "7"),
        ({"a": 1}, "object"),
        (None, "null"),
    ],
)
@pytest.mark.case("API-05", "API-06")
def test_bad_prompts_are_refused_before_the_engine(
    client: Client, prompt: object, word: str
) -> None:
    error = refused(client.complete(prompt=prompt), 400, None, word)
    assert error["param"].startswith("prompt")
    assert client.engine.calls == []


def test_prompt_is_required(client: Client) -> None:
    refused(client.post("/v1/completions", json={}), 400, None, "prompt")


@pytest.mark.case("LEN-01", "LEN-05")
def test_prompt_and_output_must_fit_the_context(client: Client) -> None:
    def ask(length: int, **fields: object) -> object:
        return client.complete(prompt=[1] * length, **fields)

    assert ask(MAX_MODEL_LEN - 1).json()["usage"]["completion_tokens"] == 1
    assert client.engine.calls[-1].params.max_tokens == 1
    for length in (MAX_MODEL_LEN, MAX_MODEL_LEN + 1, 10_000):
        error = refused(ask(length, max_tokens=7), 400, "prompt", str(length), "256", "7")
        assert error["code"] == "context_length_exceeded"
        refused(ask(length), 400, "prompt", str(length), "256")
    refused(ask(250, max_tokens=7), 400, "max_tokens", "250", "256", "7", "6")
    refused(ask(250, max_completion_tokens=7), 400, "max_completion_tokens", "250", "256")
    assert ask(250, max_tokens=6, ignore_eos=True).json()["usage"]["completion_tokens"] == 6


def test_output_length_defaults_to_16(client: Client) -> None:
    client.engine.script.ends = False
    assert client.complete().json()["usage"]["completion_tokens"] == 16
    client.complete(prompt=[[1] * 3, [1] * 250])
    assert [call.params.max_tokens for call in client.engine.calls[-2:]] == [16, 6]


@pytest.mark.case("API-03")
def test_max_completion_tokens_wins(client: Client) -> None:
    body = client.complete(max_completion_tokens=5, max_tokens=9, ignore_eos=True).json()
    assert body["usage"]["completion_tokens"] == 5
    assert body["choices"][0]["finish_reason"] == "length"


def test_every_parameter_reaches_the_engine(client: Client) -> None:
    fields = {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "n": 2,
        "seed": 3,
        "stop": ["x", "yy"],
        "stop_token_ids": [4],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "min_tokens": 2,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"5": 2.5},
        "allowed_token_ids": [1, 2],
        "logprobs": 3,
        "skip_special_tokens": False,
    }
    assert client.complete(**fields, priority=-3).status_code == 200
    call = client.engine.calls[0]
    assert call.priority == -3
    for name, value in fields.items():
        expected = {5: 2.5} if name == "logit_bias" else value
        assert getattr(call.params, name) == expected, name


@pytest.mark.case("API-01")
def test_null_means_left_out(client: Client) -> None:
    client.complete()
    for field in msgspec.structs.fields(CompletionRequest):
        if field.name != "prompt":
            assert client.complete(**{field.name: None}).status_code == 200, field.name
    assert all(call.params == client.engine.calls[0].params for call in client.engine.calls)


def test_defaults_come_from_the_model(client: Client) -> None:
    client.engine.model_config.generation_defaults = {"temperature": 0.25, "top_k": 9, "other": 1}
    client.complete(top_k=3)
    params = client.engine.calls[0].params
    assert (params.temperature, params.top_k, params.top_p) == (0.25, 3, 1.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "x"),
        ("vllm_xargs", {"a": 1}),
        ("kv_transfer_params", {}),
        ("spaces_between_special_tokens", False),
        ("logits_processors", ["x"]),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    client: Client, field: str, value: object
) -> None:
    error = refused(client.complete(**{field: value}), 400, field, field)
    assert error["code"] == "unsupported_parameter"


def test_neutral_values_and_unknown_fields_are_taken(client: Client) -> None:
    response = client.complete(
        echo=False, suffix="", best_of=1, response_format={"type": "text"}, nonsense=[1], top_k=-1
    )
    assert response.status_code == 200
    assert client.complete(n=2, best_of=2).status_code == 200


def test_choices_of_one_request_are_bounded(engine: object) -> None:
    client = Client(engine, ServerOptions(max_choices=4))  # type: ignore[arg-type]
    assert client.complete(prompt=["a", "b"], n=2).status_code == 200
    refused(client.complete(prompt=["a", "b"], n=3), 400, "n", "6", "4")
    refused(client.complete(prompt=["a"] * 5), 400, "prompt", "5", "4")


@pytest.mark.case("STP-05")
def test_stop_reason_is_told(client: Client) -> None:
    client.engine.script.stop_reason = "wor"
    assert client.complete().json()["choices"][0]["stop_reason"] == "wor"
    assert events(client.complete(stream=True))[-1]["choices"][0]["stop_reason"] == "wor"


def test_model_name_is_checked(client: Client) -> None:
    assert client.complete(model="alias").json()["model"] == "alias"
    error = refused(client.complete(model="gpt-9"), 404, "model", "gpt-9", "fake")
    assert error["code"] == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
def test_engine_errors_before_the_first_output_have_a_status(client: Client, stream: bool) -> None:
    script = client.engine.script
    script.start_error = QueueFullError("512 requests wait; the limit is 512", retry_after=2.5)
    response = client.complete(stream=stream)
    refused(response, 429, None, "512")
    assert response.headers["retry-after"] == "3"
    script.start_error = EngineDeadError("the engine core is restarting")
    refused(client.complete(stream=stream), 503, None, "restarting")
    script.start_error = ValueError("the request needs 90 blocks; there are 80")
    refused(client.complete(stream=stream), 400, None, "90 blocks")
    script.start_error = EngineError("worker failed")
    refused(client.complete(stream=stream), 500, None, "worker failed")
    script.start_error = KeyError("internal detail")
    error = refused(client.complete(stream=stream), 500)
    assert "detail" not in error["message"].replace("has the details", "")
    assert client.engine.running == 0


@pytest.mark.case("STR-03")
@pytest.mark.parametrize("error", [EngineError("worker died"), KeyError("x"), ValueError("late")])
def test_an_error_in_a_stream_is_its_last_event(client: Client, error: Exception) -> None:
    client.engine.script.error_at = 5
    client.engine.script.error = error
    data = raw_events(client.complete(stream=True))
    assert len(data) == 6
    assert "[DONE]" not in data
    assert '"finish_reason":null' in data[4]
    last = json.loads(data[-1])
    assert last["error"]["type"] == "server_error"
    assert set(last["error"]) == {"message", "type", "param", "code"}
    if not isinstance(error, ValueError):  # which means bad input before any output
        refused(client.complete(), 500)
    assert client.engine.running == 0


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_engine_that_gives_up_is_an_error_not_a_finish(client: Client, reason: str) -> None:
    client.engine.script.last_reason = reason
    refused(client.complete(), 500)
    assert "error" in raw_events(client.complete(stream=True))[-1]


def test_one_failing_prompt_ends_the_others(client: Client) -> None:
    client.engine.script = Script(delay=0.01, error_at=2, error=EngineError("lost"))
    refused(client.complete(prompt=["a", "b", "c"]), 500, None, "lost")
    assert client.engine.running == 0


def test_many_prompts_with_texts_held_back_make_no_empty_chunks(client: Client) -> None:
    client.engine.script = Script("€")
    chunks = events(client.complete(prompt=["a", "b"], stream=True))
    assert [c["choices"][0]["text"] for c in chunks] == ["€", "€"]


@pytest.mark.parametrize("stream", [False, True])
def test_more_choices_than_may_ever_wait_are_refused(client: Client, stream: bool) -> None:
    client.engine.config.max_num_waiting = 6
    words = ("6", "max_num_waiting")
    refused(client.complete(n=7, stream=stream), 400, "n", *words)
    refused(client.complete(prompt=["a"] * 7, stream=stream), 400, "prompt", *words)
    refused(client.complete(prompt=["a"] * 4, n=2, stream=stream), 400, "n", *words)
    refused(client.chat(n=7, stream=stream), 400, "n", *words)
    assert client.complete(prompt=["a"] * 3, n=2, stream=stream).status_code == 200


def test_the_engines_refusal_names_the_field(client: Client) -> None:
    client.engine.script.start_error = ValueError("min_tokens must be 0 where ...")
    refused(client.complete(), 400, "min_tokens")
    client.engine.script.start_error = ValueError("the moon must be full")
    assert refused(client.complete(), 400)["param"] is None
