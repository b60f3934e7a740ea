"""/v1/chat/completions: messages, shapes, streams."""

import json

import msgspec
import pytest

from server.client import Client, events, refused
from server.fakes import BOS, MAX_MODEL_LEN
from vllm_lite.server.protocol import ChatRequest


def user(content: object) -> list[object]:
    return [{"role": "user", "content": content}]


def test_answer_has_every_key_that_clients_check(client: Client) -> None:
    body = client.chat().json()
    assert set(body) == {"id", "object", "created", "model", "choices", "usage"}
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello, world", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    assert client.engine.calls[0].prompt == [BOS, *b"user:Hi\nassistant:"]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.case("NSA-03", "USG-05")
def test_stream_has_one_role_and_one_finish_per_index(client: Client, n: int) -> None:
    plain = client.chat(n=n, max_tokens=4).json()
    chunks = events(
        client.chat(n=n, max_tokens=4, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == plain["usage"]
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    for index in range(n):
        mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in mine[1:])
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["length"]
        assert "stop_reason" in mine[-1]
        text = "".join(choice["delta"].get("content", "") for choice in mine)
        assert text == plain["choices"][index]["message"]["content"] == "Hell"


def test_output_length_defaults_to_what_is_left(client: Client) -> None:
    body = client.chat(ignore_eos=True).json()
    assert body["usage"]["total_tokens"] == MAX_MODEL_LEN
    assert body["choices"][0]["finish_reason"] == "length"
    refused(client.chat(messages=user("x" * 300)), 400, "messages", "256")
    refused(client.chat(max_tokens=256), 400, "max_tokens", "256")


@pytest.mark.case("API-03")
def test_max_completion_tokens_wins(client: Client) -> None:
    body = client.chat(max_completion_tokens=5, ignore_eos=True).json()
    assert body["usage"]["completion_tokens"] == 5
    body = client.chat(max_completion_tokens=5, max_tokens=3, ignore_eos=True).json()
    assert body["usage"]["completion_tokens"] == 5


def test_messages_reach_the_template(client: Client) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    response = client.chat(
        messages=[
            {"role": "system", "content": "Be brief", "name": "boss"},
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("one", "two")]},
            {"role": "assistant", "content": None, "tool_calls": [call], "unknown": 1},
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
        ],
        tools=[tool],
        tool_choice="none",
        chat_template_kwargs={"enable_thinking": False},
    )
    assert response.status_code == 200, response.text
    (seen,) = client.engine.tokenizer.chats
    assert seen["messages"] == [
        {"role": "system", "content": "Be brief", "name": "boss"},
        {"role": "user", "content": "one\ntwo"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "type": "function",
                    "function": {"name": "f", "arguments": {"a": 1}},
                    "id": "c1",
                }
            ],
        },
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]
    assert seen["tools"] == [tool]
    assert seen["template_kwargs"] == {"enable_thinking": False}
    assert seen["add_generation_prompt"] is True


def test_continuing_the_last_message_asks_for_no_new_turn(client: Client) -> None:
    client.chat(continue_final_message=True)
    client.chat(add_generation_prompt=False)
    client.chat(add_generation_prompt=True, continue_final_message=False)
    seen = [
        (chat["add_generation_prompt"], chat["continue_final_message"])
        for chat in client.engine.tokenizer.chats
    ]
    assert seen == [(False, True), (False, False), (True, False)]
    both = client.chat(add_generation_prompt=True, continue_final_message=True)
    refused(both, 400, "continue_final_message")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ([1], "messages[0]"),
        ([{"content": "x"}], "messages[0]"),
        ([{"role": 5, "content": "x"}], "messages[0].role"),
        ([{"role": "", "content": "x"}], "messages[0].role"),
        (user(None), "messages[0]"),
        (user(7), "messages[0].content"),
        (user([{"text": "x"}]), "messages[0].content[0]"),
        (user([{"type": "text"}]), "messages[0].content[0].text"),
        ([{"role": "martian", "content": "x"}], "messages"),
        (
            [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}],
                }
            ],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_bad_messages_are_refused_by_name(client: Client, messages: object, param: str) -> None:
    refused(client.chat(messages=messages), 400, param)
    assert client.engine.calls == []


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
@pytest.mark.case("MMD-01")
def test_media_parts_are_refused_without_a_look(client: Client, kind: str) -> None:
    part = {"type": kind, kind: {"url": "file:///etc/passwd"}}
    error = refused(client.chat(messages=user([part])), 400, "messages[0].content[0].type", kind)
    assert error["code"] == "unsupported_parameter"


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"audio": {}}, "audio"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    client: Client, fields: dict[str, object], param: str
) -> None:
    assert refused(client.chat(**fields), 400, param, param)["code"] == "unsupported_parameter"


def test_neutral_values_are_taken(client: Client) -> None:
    response = client.chat(
        tools=[], tool_choice="auto", modalities=["text"], store=True, metadata={"a": "b"}
    )
    assert response.status_code == 200


@pytest.mark.parametrize("name", ["messages", "tools", "chat_template", "add_generation_prompt"])
@pytest.mark.case("SEC-06")
def test_template_arguments_cannot_replace_the_servers(client: Client, name: str) -> None:
    refused(client.chat(chat_template_kwargs={name: "x"}), 400, "chat_template_kwargs", name)


@pytest.mark.case("API-01")
def test_null_means_left_out(client: Client) -> None:
    client.chat()
    names = [f.name for f in msgspec.structs.fields(ChatRequest) if f.name != "messages"]
    for name in names:
        assert client.chat(**{name: None}).status_code == 200, name
    assert client.chat(**dict.fromkeys(names)).status_code == 200
    assert all(call.params == client.engine.calls[0].params for call in client.engine.calls)


def test_length_is_the_models_default_unless_asked(client: Client) -> None:
    client.engine.model_config.generation_defaults = {"max_new_tokens": 7}
    client.chat()
    client.chat(max_tokens=9)
    assert [call.params.max_tokens for call in client.engine.calls] == [7, 9]


def nested(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


@pytest.mark.parametrize("levels", [101, 300, 600, 900, 980, 5000, 200_000])
def test_deep_nesting_is_refused_by_name(client: Client, levels: int) -> None:
    tool = '{"type": "function", "function": {"name": "f", "parameters": VALUE}}'
    call = '"tool_calls": [{"function": {"name": "f", "arguments": VALUE}}]'
    arguments = "messages[0].tool_calls[0].function.arguments"
    for value, fields, param in (
        (nested(levels), '}], "chat_template_kwargs": {"x": VALUE}}', "chat_template_kwargs"),
        (
            nested(levels),
            f'}}], "tool_choice": "none", "tools": [{tool}]}}',
            "tools[0].function.parameters",
        ),
        (nested(levels), f", {call}}}]}}", arguments),
        (json.dumps(nested(levels)), f", {call}}}]}}", arguments),
    ):
        body = '{"messages": [{"role": "user", "content": "x"' + fields.replace("VALUE", value)
        error = refused(client.post("/v1/chat/completions", content=body), 400)
        # Beyond the parser's own limit the whole body is refused.
        assert error["param"] == param or (levels > 900 and error["code"] == "invalid_json"), error
        assert "nested" in error["message"] or levels > 900
    assert client.engine.tokenizer.chats == []


def test_nesting_that_a_schema_may_have_is_taken(client: Client) -> None:
    kwargs = json.loads(nested(99))
    assert client.chat(chat_template_kwargs={"x": kwargs}).status_code == 200
    assert client.engine.tokenizer.chats[0]["template_kwargs"] == {"x": kwargs}
