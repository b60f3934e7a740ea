"""Calls of tools and reasoning over HTTP: shapes, streams, what constrains the output, refusals."""

import json
from collections.abc import Iterator
from typing import Any

import llguidance
import openai
import pytest

from server.client import Client, LiveServer, events, named_events, refused
from server.fakes import SPECIAL, FakeEngine, FakeTokenizer, Script
from vllm_lite.server.options import ServerOptions

TEMPLATE = '<tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call>'
THINKING = TEMPLATE + "<think>\n\n</think>"
F = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
G = {"type": "function", "function": {"name": "g"}}
CALL_F = '<tool_call>\n{"name": "f", "arguments": {"a": 1, "s": "}é"}}\n</tool_call>'
CALL_G = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'


def client_of(
    text: str, template: str | None = TEMPLATE, *, per_output: int = 1, **options: Any
) -> Client:
    engine = FakeEngine(Script(text, per_output=per_output))
    engine.tokenizer.chat_template = template
    return Client(engine, ServerOptions(**options))


def joined(chunks: list[Any], index: int) -> dict[str, Any]:
    """One choice of a stream put together as OpenAI's clients do it."""
    message: dict[str, Any] = {"role": None, "content": None, "tool_calls": []}
    finish = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            if choice["finish_reason"]:
                finish.append(choice["finish_reason"])
            delta = choice["delta"]
            message["role"] = delta.get("role", message["role"])
            for name in ("content", "reasoning", "reasoning_content"):
                if delta.get(name):
                    message[name] = (message.get(name) or "") + delta[name]
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(message["tool_calls"]):
                    assert call["type"] == "function" and call["id"] and call["function"]["name"]
                    message["tool_calls"].append(
                        {key: call[key] for key in ("id", "type")}
                        | {"function": dict(call["function"])}
                    )
                    continue
                assert set(call) == {"index", "function"}, "id, type and name come once"
                assert set(call["function"]) == {"arguments"}
                last = message["tool_calls"][call["index"]]
                last["function"]["arguments"] += call["function"]["arguments"]
    assert len(finish) == 1
    return message | {"finish_reason": finish[0]}


def without_ids(calls: list[Any]) -> list[Any]:
    assert len({call["id"] for call in calls}) == len(calls)
    return [
        (call["type"], call["function"]["name"], call["function"]["arguments"]) for call in calls
    ]


@pytest.mark.case("TCL-03")
@pytest.mark.case("TCL-05")
@pytest.mark.case("TCL-08")
@pytest.mark.parametrize("per_output", [1, 7, 1000])
def test_streamed_calls_equal_the_plain_ones(per_output: int) -> None:
    client = client_of(f"See:\n\n{CALL_F}\n{CALL_G}\n", per_output=per_output)
    fields: dict[str, Any] = {"tools": [F, G], "n": 2}
    plain = client.chat(**fields).json()
    chunks = events(client.chat(stream=True, stream_options={"include_usage": True}, **fields))
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == plain["usage"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    for index, choice in enumerate(plain["choices"]):
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        assert message["role"] == "assistant" and message["content"] == "See:"
        assert without_ids(message["tool_calls"]) == [
            ("function", "f", '{"a": 1, "s": "}é"}'),
            ("function", "g", "{}"),
        ]
        stream = joined(chunks, index)
        assert stream["content"] == "See:" and stream["finish_reason"] == "tool_calls"
        assert without_ids(stream["tool_calls"]) == without_ids(message["tool_calls"])
    assert client.engine.tokenizer.chats[0]["tools"] == [F, G]


def test_content_is_null_beside_calls_alone_and_text_without_calls_is_plain() -> None:
    message = client_of(CALL_G).chat(tools=[G]).json()["choices"][0]["message"]
    assert message["content"] is None
    client = client_of("No call <tool_cal")
    choice = client.chat(tools=[G]).json()["choices"][0]
    assert choice["message"] == {
        "role": "assistant",
        "content": "No call <tool_cal",
        "refusal": None,
    }
    assert choice["finish_reason"] == "stop"
    assert joined(events(client.chat(tools=[G], stream=True)), 0)["content"] == "No call <tool_cal"


def test_without_tools_or_with_choice_none_nothing_is_looked_for() -> None:
    client = client_of(CALL_F)
    for fields in ({}, {"tools": [F], "tool_choice": "none"}):
        message = client.chat(**fields).json()["choices"][0]["message"]
        assert message["content"] == CALL_F and "tool_calls" not in message


REQUIRED = '[{"name": "f", "parameters": {"a": 12}}, {"name": "g", "parameters": {}}]'


@pytest.mark.case("TCL-01")
@pytest.mark.parametrize("template", [None, TEMPLATE, THINKING])
@pytest.mark.parametrize("stream", [False, True])
def test_required_constrains_the_output_to_calls(template: str | None, stream: bool) -> None:
    client = client_of(REQUIRED, template)
    response = client.chat(tools=[F, G], tool_choice="required", stream=stream)
    if stream:
        message = joined(events(response), 0)
        reason = message["finish_reason"]
    else:
        message = response.json()["choices"][0]["message"]
        reason = response.json()["choices"][0]["finish_reason"]
    assert without_ids(message["tool_calls"]) == [
        ("function", "f", '{"a": 12}'),
        ("function", "g", "{}"),
    ]
    assert message["content"] is None and reason == "tool_calls"
    structured = client.engine.calls[0].params.structured_outputs
    assert structured is not None and isinstance(structured.json, dict)
    assert accepts(structured.compiled, REQUIRED)
    for wrong in ("[]", "Hello", '[{"name": "h", "parameters": {}}]',
                  '[{"name": "f", "parameters": {"a": "x"}}]',
                  '[{"name": "g", "parameters": {"a": 1}}]'):  # fmt: skip
        assert not accepts(structured.compiled, wrong)


def accepts(grammar: str, text: str) -> bool:
    class Bytes:
        eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)
        tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

        def __call__(self, text: bytes) -> list[int]:
            return list(text)

    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    return bool(matcher.consume_tokens(list(text.encode())) and matcher.is_accepting())


@pytest.mark.case("TCL-06")
@pytest.mark.parametrize("max_tokens", [3, 40])
def test_a_call_cut_by_the_length_is_told_as_far_as_it_came(max_tokens: int) -> None:
    client = client_of(REQUIRED)
    fields: dict[str, Any] = {"tools": [F, G], "tool_choice": "required", "max_tokens": max_tokens}
    chunks = events(client.chat(stream=True, stream_options={"include_usage": True}, **fields))
    assert chunks[-1]["usage"]["completion_tokens"] == max_tokens
    stream = joined(chunks, 0)
    assert stream["finish_reason"] == "length"
    plain = client.chat(**fields).json()["choices"][0]
    assert plain["finish_reason"] == "length"
    arguments = [call["function"]["arguments"] for call in stream["tool_calls"]]
    if max_tokens == 3:
        assert arguments == [] and stream["content"] == plain["message"]["content"] == '[{"'
    else:
        assert arguments == ['{"a": 12}'] and plain["message"]["tool_calls"]


def test_a_named_function_makes_the_output_its_arguments() -> None:
    client = client_of('{"a": 1}')
    choice = {"type": "function", "function": {"name": "f"}}
    for stream in (False, True):
        response = client.chat(tools=[F, G], tool_choice=choice, stream=stream)
        message = (
            joined(events(response), 0) if stream else response.json()["choices"][0]["message"]
        )
        assert without_ids(message["tool_calls"]) == [("function", "f", '{"a": 1}')]
        assert message["content"] is None
    structured = client.engine.calls[0].params.structured_outputs
    assert accepts(structured.compiled, '{"a": 1}')
    assert not accepts(structured.compiled, '{"a": "x"}')


def test_references_of_a_schema_hold_where_it_is_part_of_another() -> None:
    node = {
        "type": "object",
        "properties": {"v": {"const": {"$ref": "#"}}, "next": {"$ref": "#/$defs/$ref"}},
        "required": ["v"],
        "additionalProperties": False,
    }
    tree = {"$defs": {"$ref": node}, "properties": {"$ref": {"$ref": "#/$defs/$ref"}}}
    function = {"name": "t", "parameters": tree | {"additionalProperties": False}}
    client = client_of("[]")
    client.chat(tools=[{"type": "function", "function": function}, F], tool_choice="required")
    grammar = client.engine.calls[0].params.structured_outputs.compiled
    leaf = '{"v":{"$ref":"#"}}'
    good = f'[{{"name":"t","parameters":{{"$ref":{{"v":{{"$ref":"#"}},"next":{leaf}}}}}}}]'
    assert accepts(grammar, good)
    assert not accepts(grammar, good.replace(leaf, '{"v":1}'))


def test_a_demanded_call_has_only_the_arguments_that_its_function_declares() -> None:
    """Models without end wrote more; a client for vLLM takes additionalProperties out."""

    def grammar_of(parameters: dict[str, Any], **choice: Any) -> str:
        client = client_of("[]")
        tool = {"type": "function", "function": {"name": "t", "parameters": parameters}}
        assert client.chat(tools=[tool], **choice).status_code == 200
        return str(client.engine.calls[0].params.structured_outputs.compiled)

    point = {"properties": {"x": {"type": "integer"}}, "required": ["x"]}
    schema = {"$defs": {"p": point}, "properties": {"at": {"anyOf": [{"$ref": "#/$defs/p"}]}}}
    named = grammar_of(schema, tool_choice={"type": "function", "function": {"name": "t"}})
    assert accepts(named, '{"at":{"x":1}}')
    assert not accepts(named, '{"at":{"x":1},"b":2}')
    assert not accepts(named, '{"at":{"x":1,"y":2}}')
    required = grammar_of(schema, tool_choice="required")
    call = '[{"name":"t","parameters":{"at":{"x":1}}}]'
    assert accepts(required, call)
    assert not accepts(required, call.replace("1}", '1,"y":2}'))
    for is_open in (
        point | {"additionalProperties": True},
        point | {"required": ["x", "b"]},
        point | {"minProperties": 2},
        {"allOf": [point, {"properties": {"b": {"const": 2}}}]},
    ):
        assert accepts(
            grammar_of(is_open, tool_choice="required"), '[{"name":"t","parameters":{"x":1,"b":2}}]'
        )


def test_a_schema_with_an_id_is_part_of_another() -> None:
    """Its references were looked for in the whole, which its id had made another's."""
    parameters = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "http://x/",
        "properties": {"a": {"$ref": "#/definitions/a"}},
        "definitions": {"a": {"const": 1}},
    }
    client = client_of("[]")
    client.chat(tools=[tool(parameters=parameters)], tool_choice="required")
    grammar = client.engine.calls[0].params.structured_outputs.compiled
    assert accepts(grammar, '[{"name":"f","parameters":{"a":1}}]')
    assert not accepts(grammar, '[{"name":"f","parameters":{"a":2}}]')


def test_without_parallel_calls_there_is_one() -> None:
    client = client_of(f"{CALL_F}\n{CALL_G}")
    for stream in (False, True):
        response = client.chat(tools=[F, G], parallel_tool_calls=False, stream=stream)
        message = (
            joined(events(response), 0) if stream else response.json()["choices"][0]["message"]
        )
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]
        assert message["content"] is None
    client.chat(tools=[F], tool_choice="required", parallel_tool_calls=False)
    grammar = client.engine.calls[-1].params.structured_outputs.compiled
    one = '{"name":"f","parameters":{}}'
    assert accepts(grammar, f"[{one}]") and not accepts(grammar, f"[{one},{one}]")


def test_allowed_tools_are_those_that_the_model_sees() -> None:
    client = client_of(CALL_G)
    for mode in ("auto", "required"):
        allowed = {"mode": mode, "tools": [G | {"function": {"name": "g"}}]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        assert client.chat(tools=[F, G], tool_choice=choice).status_code == 200
        assert client.engine.tokenizer.chats[-1]["tools"] == [G]
    assert client.engine.calls[0].params.structured_outputs is None
    grammar = client.engine.calls[1].params.structured_outputs.compiled
    assert accepts(grammar, '[{"name":"g","parameters":{}}]')
    assert not accepts(grammar, '[{"name":"f","parameters":{}}]')


def test_reasoning_is_told_apart_and_can_be_left_out() -> None:
    client = client_of(f"<think>\nHm, <tool_call>.\n</think>\n\n{CALL_G}", THINKING)
    plain = client.chat(tools=[G]).json()["choices"][0]["message"]
    stream = joined(events(client.chat(tools=[G], stream=True)), 0)
    for message in (plain, stream):
        assert message["reasoning"] == message["reasoning_content"] == "Hm, <tool_call>."
        assert message["content"] is None
        assert without_ids(message["tool_calls"]) == [("function", "g", "{}")]
    for stream_it in (False, True):
        response = client.chat(tools=[G], stream=stream_it, include_reasoning=False)
        assert "Hm" not in response.text and '"g"' in response.text
    client.engine.script = Script("Just so")
    body = client.chat().json()
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Just so",
        "refusal": None,
    }


@pytest.mark.parametrize("shown", [True, False])
def test_tokens_of_reasoning_are_counted(shown: bool) -> None:
    client = client_of(f"<think>Hm, so</think>{CALL_G}", THINKING)
    fields: dict[str, Any] = {"tools": [G], "n": 2, "include_reasoning": shown}
    details = {"reasoning_tokens": 2 * len("Hm, so")}  # a token is a byte here
    usage = client.chat(**fields).json()["usage"]
    assert usage["completion_tokens_details"] == details
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(client.chat(**fields, stream=True, stream_options=options))
    assert chunks[-1]["usage"] == usage
    assert all("completion_tokens_details" not in chunk["usage"] for chunk in chunks[:-1])
    answer = client.respond(tools=[{"type": "function", **G["function"]}]).json()
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": len("Hm, so")}
    assert "completion_tokens_details" not in client_of("x", TEMPLATE).chat().json()["usage"]


def test_reasoning_that_the_prompt_begins_needs_no_mark() -> None:
    client = client_of("Hm.</think>Yes", THINKING)
    client.engine.tokenizer.opening = "assistant:<think>\n"
    message = client.chat().json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "Yes")
    client.engine.tokenizer.opening = "assistant:<think>\n\n</think>\n\n"
    assert client.chat().json()["choices"][0]["message"]["content"] == "Hm.</think>Yes"
    # What a user writes is no mark.
    client.engine.tokenizer.opening = "assistant:"
    asked = [{"role": "user", "content": "What is <think>"}]
    message = client.chat(messages=asked).json()["choices"][0]["message"]
    assert message["content"] == "Hm.</think>Yes"
    # A message that is continued within its reasoning.
    last = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "<think>H" + "m" * 50},
    ]
    message = client.chat(messages=last, continue_final_message=True).json()["choices"][0][
        "message"
    ]
    assert (message["reasoning"], message["content"]) == ("Hm.", "Yes")


def test_a_grammar_leaves_no_place_for_reasoning() -> None:
    client = client_of('{"a": 1}', THINKING)
    client.engine.tokenizer.opening = "assistant:<think>\n"
    message = client.chat(response_format={"type": "json_object"}).json()["choices"][0]["message"]
    assert message["content"] == '{"a": 1}' and "reasoning" not in message


def test_an_operator_chooses_or_turns_off_the_parsers() -> None:
    text = f"<think>a</think>{CALL_F}"
    client = client_of(text, THINKING, reasoning_parser="none", tool_call_parser="llama3_json")
    assert client.chat(tools=[F]).json()["choices"][0]["message"]["content"] == text
    client = client_of('{"name": "f", "parameters": {}}', None, tool_call_parser="llama3_json")
    assert client.chat(tools=[F]).json()["choices"][0]["finish_reason"] == "tool_calls"
    client = client_of("a</think>b", None, reasoning_parser="deepseek_r1")
    assert client.chat().json()["choices"][0]["message"]["reasoning"] == "a"
    client.engine.tokenizer.opening = "assistant:<think></think>"
    assert client.chat().json()["choices"][0]["message"]["content"] == "a</think>b"
    for name in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(ValueError, match=f"{name} must be one of auto, none, .*'x'"):
            ServerOptions(**{name: "x"})


class MistralTokenizer(FakeTokenizer):
    """Has a mark among its special tokens."""

    vocab_size = 259

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [258] if text == "[TOOL_CALLS]" else super().encode(text)


def test_marks_that_are_special_tokens_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SPECIAL, 258, b"[TOOL_CALLS]")
    engine = FakeEngine(Script(tokens=[*b"Hm", 258, *b'f[ARGS]{"a": 1}']))
    engine.tokenizer = MistralTokenizer()
    engine.tokenizer.chat_template = "[TOOL_CALLS]"
    client = Client(engine)
    message = client.chat(tools=[F]).json()["choices"][0]["message"]
    assert message["content"] == "Hm"
    assert without_ids(message["tool_calls"]) == [("function", "f", '{"a": 1}')]
    assert len(message["tool_calls"][0]["id"]) == 9
    client.chat()
    assert [call.params.skip_special_tokens for call in engine.calls] == [False, True]


def test_every_token_has_its_logprobs_beside_calls() -> None:
    client = client_of(f"<think>a</think>See {CALL_F}", THINKING, per_output=3)
    for stream in (False, True):
        response = client.chat(tools=[F], logprobs=True, stream=stream)
        chunks = events(response) if stream else [response.json()]
        told = [
            token
            for chunk in chunks
            for choice in chunk["choices"]
            for token in (choice["logprobs"] or {"content": []})["content"]
        ]
        assert "".join(token["token"] for token in told).startswith(
            "<think>a</think>See <tool_call>"
        )
        assert len(told) == len(client.engine.script.text.encode())


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | function}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def nested(levels: int) -> dict[str, Any]:
    return {"x": nested(levels - 1)} if levels > 1 else {}


def allowed(*names: str) -> dict[str, Any]:
    tools = {"mode": "auto", "tools": [named(name) for name in names]}
    return {"type": "allowed_tools", "allowed_tools": tools}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [tool(), tool()]}, "tools[1].function.name"),
        ({"tools": [tool(name="a b")]}, "tools[0].function.name"),
        ({"tools": [tool(name="")]}, "tools[0].function.name"),
        ({"tools": [tool(name="f\n")]}, "tools[0].function.name"),
        ({"tools": [tool(name="f" * 129)]}, "tools[0].function.name"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters={"type": "string"})]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [F], "tool_choice": named("g")}, "tool_choice"),
        ({"tools": [F], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [F], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": [F], "tool_choice": allowed("f", "g")}, "tool_choice"),
        ({"tools": [F], "tool_choice": allowed()}, "tool_choice.allowed_tools.tools"),
        ({"tools": [F], "tool_choice": {"type": "custom", "custom": {}}}, "tool_choice.type"),
        ({"tools": [F], "tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": named("f")}, "tool_choice"),
        (
            {"tools": [F], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
        ),
        (
            {"tools": [tool(parameters={"not": {}})], "tool_choice": "required"},
            "tools",
        ),
        ({"tools": [F], "tool_choice": "required", "use_beam_search": True}, "tool_choice"),
        ({"tools": [tool(parameters=nested(98))]}, "tools[0].function.parameters"),
    ],
)
def test_what_is_wrong_with_tools_is_named(fields: dict[str, Any], param: str) -> None:
    client = client_of("x")
    refused(client.chat(**fields), 400, param)
    assert client.engine.calls == []


def test_tools_that_the_model_cannot_call_are_refused() -> None:
    client = client_of("x", None)
    error = refused(client.chat(tools=[F]), 400, "tools", "--tool-call-parser")
    assert error["code"] == "unsupported_parameter"
    refused(client.chat(tools=[F], tool_choice="auto"), 400, "tool_choice")


def test_calls_and_reasoning_go_back_to_the_template() -> None:
    client = client_of("x", THINKING)
    plain = client.chat(tools=[F]).json()["choices"][0]["message"]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    client.chat(
        messages=[
            {"role": "user", "content": "x"},
            plain,
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "Hm"},
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ],
        tools=[F],
    )
    seen = client.engine.tokenizer.chats[-1]["messages"]
    assert seen[2]["reasoning"] == "Hm" and seen[2]["tool_calls"][0]["function"]["name"] == "f"


@pytest.fixture
def tool_server() -> Iterator[LiveServer]:
    engine = FakeEngine(Script(f"<think>Hm</think>See: {CALL_F}{CALL_G}", per_output=5))
    engine.tokenizer.chat_template = THINKING
    server = LiveServer(engine, ServerOptions())
    yield server
    server.close()


@pytest.mark.case("TCL-03")
def test_the_openai_client_puts_streamed_calls_together(tool_server: LiveServer) -> None:
    with openai.OpenAI(base_url=tool_server.url + "/v1", api_key="x") as client:
        with client.chat.completions.stream(
            model="fake",
            messages=[{"role": "user", "content": "x"}],
            tools=[F, G],  # type: ignore[list-item]
        ) as stream:
            names = [event.type for event in stream]
            message = stream.get_final_completion().choices[0].message
        assert names.count("tool_calls.function.arguments.done") == 2
        assert message.content == "See:"
        assert message.tool_calls is not None
        assert [call.function.name for call in message.tool_calls] == ["f", "g"]
        assert json.loads(message.tool_calls[0].function.arguments) == {"a": 1, "s": "}é"}
        plain = client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "x"}],
            tools=[F, G],  # type: ignore[list-item]
        )
        assert plain.choices[0].finish_reason == "tool_calls"
        assert plain.choices[0].message.reasoning == "Hm"  # type: ignore[attr-defined]


def test_the_other_endpoints_read_calls_and_reasoning_too() -> None:
    client = client_of(f"<think>Hm</think>{CALL_F}", THINKING)
    body = client.post(
        "/v1/responses",
        json={
            "input": "x",
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        },
    ).json()
    assert [item["type"] for item in body["output"]] == ["reasoning", "function_call"]
    assert json.loads(body["output"][1]["arguments"]) == {"a": 1, "s": "}é"}
    body = client.post(
        "/v1/messages",
        json={
            "model": "fake",
            "max_tokens": 200,
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        },
    ).json()
    assert [block["type"] for block in body["content"]] == ["thinking", "tool_use"]
    assert body["content"][1]["input"] == {"a": 1, "s": "}é"}
    assert body["stop_reason"] == "tool_use"


def test_responses_can_allow_some_tools_alone() -> None:
    client = client_of(CALL_G)
    allowed = {"type": "allowed_tools", "tools": [{"type": "function", "name": "g"}]}
    tools = [{"type": "function", **tool["function"]} for tool in (F, G)]
    for mode in ("auto", "required"):
        choice = allowed | {"mode": mode}
        body = client.respond(tools=tools, tool_choice=choice).json()
        assert body["tool_choice"] == choice
        assert client.engine.tokenizer.chats[-1]["tools"] == [G]
        structured = client.engine.calls[-1].params.structured_outputs
        assert (structured is not None) == (mode == "required")
    assert accepts(structured.compiled, '[{"name": "g", "parameters": {}}]')
    assert not accepts(structured.compiled, '[{"name": "f", "parameters": {"a": 1}}]')


def test_their_streams_tell_calls_and_reasoning_too() -> None:
    client = client_of(f"<think>Hm</think>{CALL_F}{CALL_F}", THINKING)
    tool = {"name": "f", "parameters": {"type": "object"}}
    told = named_events(client.respond(tools=[tool | {"type": "function"}], stream=True))
    kinds = [event["type"].removeprefix("response.") for event in told]
    assert kinds.count("reasoning_text.done") == 1
    assert kinds.count("function_call_arguments.done") == 2
    ended = told[-1]["response"]
    assert [item["type"] for item in ended["output"]] == ["reasoning", *["function_call"] * 2]
    assert ended["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    for index, item in enumerate(ended["output"]):
        mine = [event for event in told if event.get("output_index") == index]
        assert mine[0]["item"]["id"] == mine[-1]["item"]["id"] == item["id"]
        assert mine[-1]["item"] == item
        joined = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        assert joined == (item["content"][0]["text"] if index == 0 else item["arguments"])
    assert len({item["call_id"] for item in ended["output"][1:]}) == 2

    tool = {"name": "f", "input_schema": {"type": "object"}}
    told = named_events(client.message(tools=[tool], stream=True, max_tokens=200))
    starts = [event["content_block"] for event in told if event["type"] == "content_block_start"]
    assert [block["type"] for block in starts] == ["thinking", "tool_use", "tool_use"]
    assert starts[1]["input"] == {} and starts[1]["id"] != starts[2]["id"]
    for index in range(3):
        deltas = [
            event["delta"]
            for event in told
            if event["type"] == "content_block_delta" and event["index"] == index
        ]
        if index == 0:
            assert "".join(delta["thinking"] for delta in deltas) == "Hm"
        else:
            joined = "".join(delta["partial_json"] for delta in deltas)
            assert json.loads(joined) == {"a": 1, "s": "}é"}
    assert told[-2]["delta"]["stop_reason"] == "tool_use"
