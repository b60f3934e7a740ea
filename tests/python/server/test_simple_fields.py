"""Fields that change the prompt or what is told about it, on both of OpenAI's older endpoints."""

import json
import socket
from typing import Any

import pytest

from server.client import Client, events, refused
from server.fakes import BOS, MAX_MODEL_LEN, FakeEngine
from vllm_lite.server.options import ServerOptions

CHAT_IDS = [BOS, *b"user:Hi\nassistant:"]


def test_the_last_tokens_of_a_prompt_are_kept(client: Client) -> None:
    for fields in ({"prompt": "abcdef"}, {"prompt": [1, 2, 3]}, {"prompt": ["ab", "c"]}):
        client.complete(**fields, truncate_prompt_tokens=2)
    client.chat(truncate_prompt_tokens=3)
    client.complete(prompt="x" * 300 + "y", truncate_prompt_tokens=-1, max_tokens=6)
    client.complete(prompt="x" * 300 + "y", truncate_prompt_tokens=-1)
    prompts = [call.prompt for call in client.engine.calls]
    assert prompts[:5] == [[101, 102], [2, 3], [97, 98], [99], CHAT_IDS[-3:]]
    assert [len(prompt) for prompt in prompts[5:]] == [MAX_MODEL_LEN - 6, MAX_MODEL_LEN - 1]
    assert prompts[5][-1] == ord("y")
    client.complete(prompt="abcdef", truncate_prompt_tokens=2, truncation_side="left")
    client.complete(prompt="abcdef", truncate_prompt_tokens=2, truncation_side="right")
    client.chat(truncate_prompt_tokens=3, truncation_side="right")
    last = [call.prompt for call in client.engine.calls[-3:]]
    assert last == [[101, 102], [97, 98], CHAT_IDS[:3]]


def test_truncation_leaves_the_other_limits(client: Client) -> None:
    long = "x" * 300
    refused(client.complete(prompt=long, truncate_prompt_tokens=256), 400, "prompt", "256")
    refused(
        client.complete(prompt=long, truncate_prompt_tokens=-1, max_tokens=300),
        400,
        None,
        "max_model_len",
    )


def test_token_ids_are_told_when_asked_for(client: Client) -> None:
    plain = client.complete(prompt=["a", "bc"], return_token_ids=True, max_tokens=2).json()
    assert [choice["prompt_token_ids"] for choice in plain["choices"]] == [[97], [98, 99]]
    assert [choice["token_ids"] for choice in plain["choices"]] == [[72, 101]] * 2
    plain = client.chat(return_token_ids=True, n=2, max_tokens=2).json()
    assert plain["prompt_token_ids"] == CHAT_IDS
    assert [choice["token_ids"] for choice in plain["choices"]] == [[72, 101]] * 2
    silent = client.complete(return_token_ids=False).text + client.chat().text
    assert "token_ids" not in silent


def test_streams_tell_each_token_id_once(client: Client) -> None:
    client.engine.script.text = "€uro"  # three tokens before the first text
    fields = {"return_token_ids": True, "stream": True}
    ids = list("€uro".encode())
    chunks = [chunk["choices"][0] for chunk in events(client.complete(**fields))]
    assert [i for chunk in chunks for i in chunk["token_ids"]] == ids
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[97, 98, 99]] + [None] * 5
    chunks = events(client.chat(**fields, n=2))
    for index in range(2):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert [i for choice in mine for i in choice.get("token_ids", [])] == ids
    told = [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk]
    assert told == [CHAT_IDS]


def test_a_request_id_is_part_of_the_answers_id(client: Client) -> None:
    for _ in range(2):  # it may come again: the engine has an id of its own
        assert client.complete(request_id="mine-1").json()["id"] == "cmpl-mine-1"
    assert client.chat(request_id="x" * 128).json()["id"] == "chatcmpl-" + "x" * 128
    assert len({call.request_id for call in client.engine.calls}) == 3


def test_a_cache_salt_reaches_the_engine(client: Client) -> None:
    client.complete(cache_salt="tenant")
    client.chat(cache_salt="tenant", stream=True)
    client.complete()
    assert [call.cache_salt for call in client.engine.calls] == ["tenant", "tenant", None]


def test_what_the_template_may_use(client: Client) -> None:
    documents = [{"title": "a", "text": "b"}]
    client.chat(documents=documents, reasoning_effort="high", chat_template_kwargs={"x": 1})
    client.chat(reasoning_effort="none")
    client.chat(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    client.chat(documents=[], add_special_tokens=True)
    seen = [chat["template_kwargs"] for chat in client.engine.tokenizer.chats]
    assert seen == [
        {"documents": documents, "reasoning_effort": "high", "x": 1},
        {"reasoning_effort": "none", "enable_thinking": False},
        {"reasoning_effort": "none", "enable_thinking": True},
        {"documents": []},
    ]
    special = [chat["add_special_tokens"] for chat in client.engine.tokenizer.chats]
    assert special == [False, False, False, True]
    deep = json.loads('{"a":' * 200 + "1" + "}" * 200)
    refused(client.chat(documents=[deep]), 400, "documents", "nested")


@pytest.mark.case("SEC-06")
def test_templates_of_requests_are_refused_unless_the_operator_allows_them(
    engine: FakeEngine,
) -> None:
    client = Client(engine)
    refused(client.chat(chat_template="{{ 1 }}"), 400, "chat_template", "trust-request")
    for name in ("chat_template", "messages", "documents", "tools", "add_generation_prompt"):
        kwargs = {name: "{{ 1 }}"}
        refused(client.chat(chat_template_kwargs=kwargs), 400, "chat_template_kwargs", name)
    assert engine.calls == []
    client = Client(engine, ServerOptions(trust_request_chat_template=True))
    assert client.chat(chat_template="{{ 1 }}").status_code == 200
    assert engine.tokenizer.chats[-1]["chat_template"] == "{{ 1 }}"
    refused(client.chat(chat_template_kwargs={"chat_template": "x"}), 400, "chat_template_kwargs")


@pytest.mark.case("TPL-03")
@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_text_parts_are_the_text_joined(client: Client, role: str) -> None:
    kinds = ("text", "input_text", "output_text")
    for kind in kinds:
        parts = [{"type": kind, "text": text} for text in ("a", "b")]
        client.chat(messages=[{"role": role, "content": parts}])
    client.chat(messages=[{"role": role, "content": "a\nb"}])
    assert len({tuple(call.prompt) for call in client.engine.calls}) == 1
    unknown = [{"type": "picture", "text": "a"}]
    refused(
        client.chat(messages=[{"role": role, "content": unknown}]),
        400,
        "messages[0].content[0].type",
    )


def test_refusals_of_the_assistant_are_text(client: Client) -> None:
    for fields in (
        {"content": [{"type": "refusal", "refusal": "No."}]},
        {"content": None, "refusal": "No."},
        {"content": "No."},
    ):
        client.chat(messages=[{"role": "assistant"} | fields])
    assert len({tuple(call.prompt) for call in client.engine.calls}) == 1


def test_what_openai_keeps_for_itself_is_ignored(client: Client) -> None:
    fields: dict[str, Any] = {
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "flex",
        "safety_identifier": "x",
        "prompt_cache_key": "x",
        "verbosity": "low",
        "prediction": {"type": "content", "content": "Hello"},
        "modalities": ["text"],
    }
    assert client.chat(**fields).status_code == 200
    client.chat()
    assert client.engine.calls[0].params == client.engine.calls[1].params
    for name, value in (("audio", {}), ("modalities", ["text", "audio"])):
        refused(client.chat(**{name: value}), 400, name)


@pytest.mark.case("MMD-01")
def test_media_are_neither_fetched_nor_opened(client: Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x.png"
        for source in (url, "file:///etc/passwd", "data:image/png;base64,aGk="):
            part = {"type": "image_url", "image_url": {"url": source}}
            turn = {"role": "user", "content": [part]}
            refused(client.chat(messages=[turn]), 400, None, "not supported")
            part = {"type": "input_image", "image_url": source}
            turn = {"role": "user", "content": [part]}
            refused(client.respond(input=[turn]), 400, None, "not supported")
            part = {"type": "image", "source": {"type": "url", "url": source}}
            turn = {"role": "user", "content": [part]}
            response = client.message(messages=[turn])
            assert response.status_code == 400 and "not supported" in response.text
        with pytest.raises(TimeoutError):
            listener.accept()
    assert client.engine.calls == []


@pytest.mark.case("API-08")
def test_a_request_id_costs_each_event_what_it_is_long(client: Client) -> None:
    refused(client.complete(request_id="x" * 1_000_000, stream=True), 400, "request_id")
    chunks = events(client.complete(request_id="x" * 128, stream=True))
    assert all(len(json.dumps(chunk)) < 500 for chunk in chunks)


def test_deep_nesting_is_refused_by_name_on_the_other_routes(client: Client) -> None:
    deep = json.loads('{"a":' * 200 + "1" + "}" * 200)
    turns = [{"role": "user", "content": "x"}]
    use = {"type": "tool_use", "id": "t", "name": "f", "input": deep}
    for response, word in (
        (client.respond(tools=[{"type": "function", "name": "f", "parameters": deep}]), "tools"),
        (
            client.respond(text={"format": {"type": "json_schema", "name": "x", "schema": deep}}),
            "text",
        ),
        (client.message(tools=[{"name": "f", "input_schema": deep}]), "tools"),
        (client.message(messages=[*turns, {"role": "assistant", "content": [use]}]), "messages"),
        (
            client.message(output_config={"format": {"type": "json_schema", "schema": deep}}),
            "output_config",
        ),
    ):
        assert response.status_code == 400, response.text
        message = response.json()["error"]["message"]
        assert message.startswith(word) and "nested" in message, message
    assert client.engine.calls == []
