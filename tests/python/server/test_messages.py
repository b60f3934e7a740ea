"""/v1/messages and /v1/messages/count_tokens: Anthropic's shapes."""

from typing import Any

import anthropic
import msgspec
import pytest

from server.client import Client, LiveServer, named_events
from server.fakes import MAX_MODEL_LEN, FakeEngine, Script
from server.test_responses import check
from vllm_lite.errors import EngineDeadError, EngineError, QueueFullError
from vllm_lite.server.messages_protocol import MessagesRequest
from vllm_lite.server.options import ServerOptions


def refused(response: Any, status: int, kind: str, *words: str) -> None:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"type", "error"} and body["type"] == "error"
    assert set(body["error"]) == {"type", "message"} and body["error"]["type"] == kind
    for word in words:
        assert word in body["error"]["message"], body


def test_answer_has_every_key_that_clients_check(client: Client) -> None:
    client.engine.script.cached = 3
    answer = client.message().json()
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": "Hello, world", "citations": None}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 16,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": 12,
        },
    }


def test_a_stream_has_anthropics_events_in_order(client: Client) -> None:
    told = named_events(client.message(max_tokens=3, stream=True))
    assert [event["type"] for event in told] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert told[0]["message"]["content"] == [] and told[0]["message"]["stop_reason"] is None
    assert told[0]["message"]["usage"]["input_tokens"] == 19
    assert told[1]["content_block"]["text"] == ""
    assert "".join(event["delta"]["text"] for event in told[2:5]) == "Hel"
    assert told[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert told[-2]["usage"]["output_tokens"] == 3


def test_the_stop_sequence_is_told(client: Client) -> None:
    client.engine.script.stop_reason = "wor"
    answer = client.message(stop_sequences=["wor"]).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "wor")
    assert client.engine.calls[0].params.stop == ["wor"]
    told = named_events(client.message(stop_sequences=["wor"], stream=True))
    assert told[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "wor"}


def test_blocks_reach_the_template_as_messages(client: Client) -> None:
    response = client.message(
        system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}],
        messages=[
            {"role": "user", "content": "Hi"},
            {"role": "user", "content": [{"type": "text", "text": "there"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "Looking"},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "text", "text": "one"}],
                        "is_error": False,
                    },
                    {"type": "text", "text": "and?", "cache_control": {"type": "ephemeral"}},
                ],
            },
        ],
    )
    assert response.status_code == 200, response.text
    (seen,) = client.engine.tokenizer.chats
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}, "id": "t1"}
    assert seen["messages"] == [
        {"role": "system", "content": "Be\nbrief"},
        {"role": "user", "content": "Hi\nthere"},
        {
            "role": "assistant",
            "content": "Looking",
            "reasoning_content": "hm",
            "tool_calls": [call],
        },
        {"role": "tool", "content": "one", "tool_call_id": "t1", "name": "f"},
        {"role": "user", "content": "and?"},
    ]
    assert (seen["add_generation_prompt"], seen["continue_final_message"]) == (True, False)


def test_an_assistants_last_message_is_continued(client: Client) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
    assert client.message(messages=turns).status_code == 200
    (seen,) = client.engine.tokenizer.chats
    assert (seen["add_generation_prompt"], seen["continue_final_message"]) == (False, True)


def test_thinking_and_effort_reach_the_template(client: Client) -> None:
    client.message()
    client.message(thinking={"type": "enabled", "budget_tokens": 1024})
    client.message(thinking={"type": "disabled"})
    client.message(output_config={"effort": "max"})
    assert [chat["template_kwargs"] for chat in client.engine.tokenizer.chats] == [
        {},
        {"enable_thinking": True},
        {"enable_thinking": False},
        {"reasoning_effort": "max"},
    ]


def test_parameters_reach_the_engine(client: Client) -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7}
    client.message(**fields, max_tokens=9)
    (call,) = client.engine.calls
    assert call.params.max_tokens == 9
    for name, value in fields.items():
        assert getattr(call.params, name) == value


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": MAX_MODEL_LEN}, "max_tokens: 256"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "martian", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages: "),
        (user({"type": "image", "source": {}}), "messages[0].content[0].type"),
        (user({"type": "document", "source": {}}), "messages[0].content[0].type"),
        (user({"type": "text"}), "messages[0].content[0].text"),
        (user({"type": "tool_use", "id": "x", "name": "f"}), "messages[0].content[0].type"),
        (user({"type": "tool_result"}), "messages[0].content[0].tool_use_id"),
        (
            user({"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}),
            "messages[0].content[0].content[0].type",
        ),
        ({"system": 1}, "system"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"temperature": 3}, "temperature"),
        ({"tools": [{"name": "x", "type": "bash_20250124"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "perhaps"}}, "thinking.type"),
        ({"mcp_servers": [{"url": "http://127.0.0.1"}]}, "mcp_servers"),
        ({"stream": 1}, "stream"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    client: Client, fields: dict[str, object], word: str
) -> None:
    refused(client.message(**fields), 400, "invalid_request_error", word)
    assert client.engine.calls == []


@pytest.mark.case("API-01")
def test_null_means_left_out(client: Client) -> None:
    client.message()
    required = ("messages", "max_tokens")
    names = [f.name for f in msgspec.structs.fields(MessagesRequest) if f.name not in required]
    for name in names:
        assert client.message(**{name: None}).status_code == 200, name
    assert client.message(**dict.fromkeys(names)).status_code == 200
    assert all(call.params == client.engine.calls[0].params for call in client.engine.calls)


def test_errors_have_anthropics_shape(client: Client) -> None:
    refused(client.message(model="other"), 404, "not_found_error", "other")
    refused(client.post("/v1/messages", content=b"{"), 400, "invalid_request_error")
    refused(client.get("/v1/messages"), 405, "invalid_request_error")
    script = client.engine.script
    for stream in (False, True):
        script.start_error = QueueFullError("full", retry_after=2)
        response = client.message(stream=stream)
        refused(response, 429, "rate_limit_error", "full")
        assert response.headers["retry-after"] == "2"
        script.start_error = EngineDeadError("gone")
        refused(client.message(stream=stream), 503, "overloaded_error", "gone")
        script.start_error = KeyError("x")
        refused(client.message(stream=stream), 500, "api_error")
    client.engine.script = Script(error_at=2, error=EngineError("worker died"))
    told = named_events(client.message(stream=True))
    assert told[-1] == {"type": "error", "error": {"type": "api_error", "message": "worker died"}}
    assert "message_stop" not in [event["type"] for event in told]
    client.state.draining = True
    refused(client.message(), 503, "overloaded_error", "shutting down")


def test_count_tokens_is_what_the_prompt_has(client: Client) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "system": "Be brief"}
    counted = client.post("/v1/messages/count_tokens", json=body)
    usage = client.message(**body).json()["usage"]
    assert counted.json() == {"input_tokens": usage["input_tokens"]}
    refused(
        client.post("/v1/messages/count_tokens", json={}), 400, "invalid_request_error", "messages"
    )


def test_x_api_key_opens_these_routes_alone(engine: FakeEngine) -> None:
    client = Client(engine, ServerOptions(api_keys=("secret", "other")))
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        for header in ({"x-api-key": "other"}, {"authorization": "Bearer secret"}):
            assert client.post(path, json=body, headers=header).status_code == 200
        twice = [("x-api-key", "secret"), ("x-api-key", "no")]
        for headers in ({}, {"x-api-key": "no"}, {"x-api-key": ""}, twice):
            response = client.post(path, json=body, headers=headers)
            refused(response, 401, "authentication_error")
    for path in ("/v1/chat/completions", "/v1/models", "/v1/messages/", "//v1/messages"):
        assert client.post(path, json=body, headers={"x-api-key": "secret"}).status_code == 401


@pytest.mark.case("API-10")
def test_anthropic_client(live: LiveServer) -> None:
    client = anthropic.Anthropic(base_url=live.url, api_key="secret", max_retries=0)
    fields: Any = {
        "model": "fake",
        "max_tokens": 50,
        "messages": [{"role": "user", "content": "Hi"}],
    }
    answer = client.messages.create(**fields, system="Be brief")
    check(answer)
    assert answer.content[0].type == "text" and answer.content[0].text == "Hello, world"
    assert (answer.stop_reason, answer.usage.output_tokens) == ("end_turn", 12)
    for event in client.messages.create(**fields, stream=True):
        check(event)
    with client.messages.stream(**fields) as stream:
        assert "".join(stream.text_stream) == "Hello, world"
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn" and final.usage.output_tokens == 12
    counted = client.messages.count_tokens(model="fake", messages=fields["messages"])
    assert counted.input_tokens == final.usage.input_tokens
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**fields | {"max_tokens": 1000})
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**fields | {"model": "other"})
    live.engine.script = Script(error_at=5, error=EngineError("worker died"))
    with (
        pytest.raises(anthropic.APIStatusError, match="worker died"),
        client.messages.stream(**fields) as stream,
    ):
        list(stream.text_stream)
    other = anthropic.Anthropic(base_url=live.url, auth_token="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        other.messages.create(**fields)
