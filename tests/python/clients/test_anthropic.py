"""Anthropic's Python client at ``/v1/messages``."""

from collections.abc import Iterator
from typing import Any

import pytest

from clients.common import KEY, MODEL, QUESTION, TOOL, WEATHER, Reading, needs
from processes.server_process import ServerProcess

pytestmark = [pytest.mark.slow, needs("anthropic")]

FUNCTION = TOOL["function"]
TOOLS: Any = [
    {
        "name": FUNCTION["name"],
        "description": FUNCTION["description"],
        "input_schema": FUNCTION["parameters"],
    }
]


@pytest.fixture(scope="module")
def anthropic() -> Any:
    import anthropic

    return anthropic


@pytest.fixture(scope="module")
def client(anthropic: Any, server: ServerProcess) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as made:
        yield made


# The client has no parameter for the temperature any more; the server still takes it.
GREEDY: Any = {"extra_body": {"temperature": 0}}
ASKED: Any = GREEDY | {
    "model": MODEL,
    "max_tokens": 24,
    "system": "Answer in one sentence.",
    "messages": QUESTION,
}


def test_messages(client: Any) -> None:
    whole = client.messages.create(**ASKED)
    [block] = whole.content
    assert "Paris" in block.text
    assert whole.stop_reason in ("end_turn", "max_tokens")
    assert 0 < whole.usage.output_tokens <= 24
    events = list(client.messages.create(**ASKED, stream=True))
    assert events[0].type == "message_start" and events[-1].type == "message_stop"
    with client.messages.stream(**ASKED) as stream:
        assert "".join(stream.text_stream) == block.text
        final = stream.get_final_message()
    assert final.content[0].text == block.text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    stopped = client.messages.create(**ASKED, stop_sequences=["Paris"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Paris")
    prefilled = [*QUESTION, {"role": "assistant", "content": "The capital of France is"}]
    assert "Paris" in client.messages.create(**(ASKED | {"messages": prefilled})).content[0].text


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "report"}])
def test_tools(client: Any, choice: Any) -> None:
    asked = ASKED | {
        "max_tokens": 200,
        "messages": WEATHER,
        "tools": TOOLS,
        "tool_choice": {**choice, "disable_parallel_tool_use": True},
    }
    whole = client.messages.create(**asked)
    assert whole.stop_reason == "tool_use"
    [use] = whole.content
    assert (use.type, use.name) == ("tool_use", "report")
    Reading.model_validate(use.input)
    with client.messages.stream(**asked) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        [streamed] = stream.get_final_message().content
    assert streamed.input == use.input
    assert Reading.model_validate_json("".join(pieces)) == Reading.model_validate(use.input)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "written down"}
    again = client.messages.create(
        **asked
        | {
            "messages": [
                *WEATHER,
                {"role": "assistant", "content": whole.content},
                {"role": "user", "content": [result]},
            ],
            "tool_choice": {"type": "none"},
            "max_tokens": 8,
        }
    )
    assert again.content[0].type == "text"


def test_parse_gives_objects(client: Any) -> None:
    answer = client.messages.parse(
        **GREEDY, model=MODEL, max_tokens=200, messages=WEATHER, output_format=Reading
    )
    assert isinstance(answer.parsed_output, Reading)


def test_count_tokens(client: Any) -> None:
    counted = client.messages.count_tokens(
        model=MODEL, system=ASKED["system"], messages=ASKED["messages"]
    )
    usage = client.messages.create(**ASKED).usage
    cached = usage.cache_read_input_tokens
    assert counted.input_tokens == usage.input_tokens + cached
    with_tools = client.messages.count_tokens(model=MODEL, messages=QUESTION, tools=TOOLS)
    assert with_tools.input_tokens > 0


def test_errors(anthropic: Any, client: Any) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(**ASKED | {"extra_body": {"temperature": 9}})
    with pytest.raises(anthropic.NotFoundError, match="other"):
        client.messages.create(**ASKED | {"model": "other"})
    with (
        pytest.raises(anthropic.BadRequestError, match="max_tokens"),
        client.messages.stream(**ASKED | {"max_tokens": -1}),
    ):
        pass
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(**ASKED)
