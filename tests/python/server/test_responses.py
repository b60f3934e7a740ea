"""/v1/responses: input items, the answer's items, streams of typed events."""

import json
from typing import Any

import msgspec
import openai
import pytest

from server.client import Client, LiveServer, named_events, refused
from server.fakes import Script
from vllm_lite.errors import EngineError
from vllm_lite.server.responses_protocol import ResponsesRequest

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
ALLOWED: dict[str, Any] = {
    "type": "allowed_tools",
    "mode": "auto",
    "tools": [{"type": "function", "name": "f"}],
}


def test_answer_has_every_key_that_clients_check(client: Client) -> None:
    client.engine.script.cached = 3
    body = client.respond(metadata={"a": "b"}, temperature=0.5, user="u", max_output_tokens=50)
    answer = body.json()
    assert answer["id"].startswith("resp_") and answer["object"] == "response"
    assert (answer["status"], answer["incomplete_details"]) == ("completed", None)
    assert (answer["error"], answer["store"], answer["background"]) == (None, False, False)
    (item,) = answer["output"]
    assert item["id"].startswith("msg_")
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    part = {"type": "output_text", "text": "Hello, world", "annotations": [], "logprobs": []}
    assert item["content"] == [part]
    assert answer["usage"] == {
        "input_tokens": 19,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 12,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 31,
    }
    assert answer["metadata"] == {"a": "b"}
    assert (answer["temperature"], answer["top_p"], answer["max_output_tokens"]) == (0.5, 1.0, 50)
    assert answer["text"] == {"format": {"type": "text"}}


def test_a_stream_has_openais_events_in_order(client: Client) -> None:
    plain = client.respond(max_output_tokens=3).json()
    told = named_events(client.respond(max_output_tokens=3, stream=True))
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert [event["type"].removeprefix("response.") for event in told] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 3,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    assert told[0]["response"]["status"] == "in_progress"
    assert told[2]["item"]["status"] == "in_progress" and told[2]["item"]["content"] == []
    assert "".join(e["delta"] for e in told if e["type"].endswith(".delta")) == "Hel"
    assert told[7]["text"] == "Hel" and told[8]["part"]["text"] == "Hel"
    ended = told[-1]["response"]
    assert told[9]["item"] == ended["output"][0]
    assert ended["output"][0]["status"] == "incomplete"
    assert len({e["item_id"] for e in told if "item_id" in e}) == 1
    for answer in (ended, plain):
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        for item in answer["output"]:
            del item["id"]
        del answer["id"], answer["created_at"]
    assert ended == plain


def test_one_step_that_says_all_makes_the_same_events(client: Client) -> None:
    client.engine.script.per_output = 100
    told = named_events(client.respond(stream=True))
    added = next(event for event in told if event["type"] == "response.output_item.added")
    assert added["item"]["status"] == "in_progress" and added["item"]["content"] == []
    assert told[-1]["response"]["output"][0]["content"][0]["text"] == "Hello, world"


def test_items_reach_the_template_as_messages(client: Client) -> None:
    client.respond(
        instructions="Be brief",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": t} for t in ("a", "b")]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [{"type": "summary_text", "text": "hm"}],
            },
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": ""},
            {"type": "function_call_output", "call_id": "c1", "output": "one"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "two"}],
            },
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "done", "annotations": []}],
            },
            {"role": "user", "content": "go on"},
        ],
    )
    (seen,) = client.engine.tokenizer.chats
    calls = [
        {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}, "id": "c1"},
        {"type": "function", "function": {"name": "g", "arguments": {}}, "id": "c2"},
    ]
    assert seen["messages"] == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "one", "tool_call_id": "c1", "name": "f"},
        {"role": "tool", "content": "two", "tool_call_id": "c2", "name": "g"},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "go on"},
    ]


def test_parameters_reach_the_engine(client: Client) -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "stop": ["x"]}
    client.respond(**fields, max_output_tokens=9, cache_salt="s", priority=2)
    (call,) = client.engine.calls
    for name, value in fields.items():
        assert getattr(call.params, name) == value
    assert (call.params.max_tokens, call.cache_salt, call.priority) == (9, "s", 2)


def test_reasoning_effort_reaches_the_template(client: Client) -> None:
    client.respond(reasoning={"effort": "low", "summary": "auto"})
    client.respond(reasoning={"effort": "none"})
    first, second = [chat["template_kwargs"] for chat in client.engine.tokenizer.chats]
    assert first == {"reasoning_effort": "low"}
    assert second == {"reasoning_effort": "none", "enable_thinking": False}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"include": "x"}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": ALLOWED | {"mode": "any"}}, "tool_choice.mode"),
        ({"tool_choice": ALLOWED | {"tools": []}}, "tool_choice.tools"),
        ({"tool_choice": ALLOWED | {"tools": [{"type": "mcp"}]}}, "tool_choice.tools[0]"),
        ({"tool_choice": ALLOWED}, "tool_choice"),  # no such tool
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [1]}, "input[0]"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"role": "martian", "content": "x"}]}, "input"),
        ({"input": "x" * 300}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10_000}, "max_output_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
        ({"stream": 1}, "stream"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    client: Client, fields: dict[str, object], param: str
) -> None:
    error = refused(client.respond(**fields), 400, None, param.split("[")[0])
    assert error["param"].startswith(param), error
    assert client.engine.calls == []


@pytest.mark.case("API-01")
def test_null_means_left_out(client: Client) -> None:
    client.respond()
    names = [f.name for f in msgspec.structs.fields(ResponsesRequest) if f.name != "input"]
    for name in names:
        assert client.respond(**{name: None}).status_code == 200, name
    assert client.respond(**dict.fromkeys(names)).status_code == 200
    assert all(call.params == client.engine.calls[0].params for call in client.engine.calls)


def test_neutral_values_are_taken(client: Client) -> None:
    response = client.respond(
        background=False,
        truncation="disabled",
        store=True,
        top_logprobs=0,
        include=["reasoning.encrypted_content"],
        service_tier="auto",
        text={"format": {"type": "text"}, "verbosity": "low"},
        stream_options={"include_obfuscation": False},
        tools=[],
    )
    assert response.status_code == 200, response.text
    assert response.json()["store"] is False


def test_an_engines_error_is_the_last_event(client: Client) -> None:
    client.engine.script = Script(error_at=2, error=EngineError("worker died"))
    told = named_events(client.respond(stream=True))
    last = told[-1]
    assert (last["type"], last["message"]) == ("error", "worker died")
    assert last["code"] == "engine_error" and last["sequence_number"] == len(told) - 1
    assert not [event for event in told if event["type"] == "response.completed"]
    refused(client.respond(), 500, None, "worker died")


@pytest.mark.case("API-10")
def test_openai_client_responses(live: LiveServer) -> None:
    client = openai.OpenAI(base_url=live.url + "/v1", api_key="secret", max_retries=0)
    answer = client.responses.create(model="fake", input="Hi", instructions="Be brief")
    assert answer.output_text == "Hello, world"
    assert answer.usage and answer.usage.output_tokens == 12
    check(answer)
    text = ""
    for event in client.responses.create(model="fake", input="Hi", stream=True):
        check(event)
        if event.type == "response.output_text.delta":
            text += event.delta
    assert text == "Hello, world"
    assert event.type == "response.completed"
    with client.responses.stream(model="fake", input="Hi") as stream:
        final = stream.get_final_response()
    assert final.output_text == "Hello, world" and final.status == "completed"


def check(value: Any) -> None:
    """By the client's own types, strictly: it would build any answer without a look."""
    type(value).model_validate(json.loads(value.model_dump_json(by_alias=True, exclude_unset=True)))
