"""OpenAI's Python client, synchronous and asynchronous."""

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall

from clients.common import KEY, MODEL, QUESTION, TOOL, WEATHER, Reading, cosine
from processes.server_process import ServerProcess

pytestmark = pytest.mark.slow

GREEDY: Any = {"model": MODEL, "temperature": 0}
RESPONSES_TOOL: Any = {"type": "function", "strict": True, **TOOL["function"]}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def test_chat(client: openai.OpenAI) -> None:
    asked: Any = GREEDY | {"messages": QUESTION, "max_tokens": 24}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    choice, usage = whole.choices[0], whole.usage
    text = choice.message.content
    assert text is not None and "Paris" in text
    assert whole.model == MODEL
    assert choice.finish_reason in ("stop", "length")
    assert usage is not None and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert choice.logprobs is not None and choice.logprobs.content is not None
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob <= 0  # greedy
    said = b"".join(bytes(token.bytes or []) for token in choice.logprobs.content).decode()
    assert said.removesuffix("<|im_end|>") == text

    chunks = list(
        client.chat.completions.create(
            **asked,
            logprobs=True,
            top_logprobs=3,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert len(parts) > 5
    assert "".join(part.delta.content or "" for part in parts) == text
    assert [p.finish_reason for p in parts if p.finish_reason] == [choice.finish_reason]
    streamed = [t for p in parts if p.logprobs for t in p.logprobs.content or []]
    assert streamed == choice.logprobs.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == usage.completion_tokens

    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert final.choices[0].message.content == text
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_chat_samples_and_stops(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 12, "seed": 7}
    several = client.chat.completions.create(**asked, n=3, temperature=1.5)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in several.choices}) > 1
    first = client.chat.completions.create(**asked, temperature=1.5)
    assert first.choices[0].message == several.choices[0].message

    stopped = client.chat.completions.create(**asked, temperature=0, stop=["Paris"])
    assert stopped.choices[0].finish_reason == "stop"
    assert "France" in (stopped.choices[0].message.content or "")
    assert "Paris" not in (stopped.choices[0].message.content or "")
    short = client.chat.completions.create(model=MODEL, messages=QUESTION, max_completion_tokens=2)
    assert short.choices[0].finish_reason == "length"
    assert short.usage is not None and short.usage.completion_tokens == 2


def test_completions(client: openai.OpenAI) -> None:
    prompts = ["The capital of France is", "One, two, three,"]
    asked: Any = GREEDY | {"max_tokens": 6}
    whole = client.completions.create(**asked, prompt=prompts, logprobs=2)
    texts = [choice.text for choice in whole.choices]
    assert "Paris" in texts[0] and "four" in texts[1]
    for choice in whole.choices:
        logprobs = choice.logprobs
        assert logprobs is not None and logprobs.tokens is not None
        assert "".join(logprobs.tokens) == choice.text
        assert logprobs.top_logprobs is not None and len(logprobs.top_logprobs) == 6
    assert whole.usage is not None and whole.usage.completion_tokens == 12

    chunks = list(client.completions.create(**asked, prompt=prompts, stream=True))
    for index, text in enumerate(texts):
        parts = [c.choices[0].text for c in chunks if c.choices and c.choices[0].index == index]
        assert "".join(parts) == text

    echoed = client.completions.create(**asked, prompt=prompts[0], logprobs=1, echo=True)
    assert echoed.choices[0].text == prompts[0] + texts[0]
    logprobs = echoed.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.token_logprobs
    assert "".join(logprobs.tokens) == echoed.choices[0].text
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])


def test_parse_gives_objects(client: openai.OpenAI) -> None:
    asked: Any = GREEDY | {"messages": WEATHER, "response_format": Reading}
    parsed = client.chat.completions.parse(**asked)
    message = parsed.choices[0].message
    assert isinstance(message.parsed, Reading)
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == message.parsed
    free = client.chat.completions.create(
        **GREEDY, messages=WEATHER, response_format={"type": "json_object"}, max_tokens=200
    )
    if free.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(free.choices[0].message.content or ""), dict)
    else:
        assert (free.choices[0].message.content or "").lstrip().startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "report"}}])
def test_tools(client: openai.OpenAI, choice: Any) -> None:
    asked: Any = GREEDY | {
        "messages": WEATHER,
        "tools": [openai.pydantic_function_tool(Reading, name="report")],
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }
    parsed = client.chat.completions.parse(**asked)
    calls = parsed.choices[0].message.tool_calls
    assert calls is not None and len(calls) == 1
    assert calls[0].function.name == "report"
    assert isinstance(calls[0].function.parsed_arguments, Reading)
    assert parsed.choices[0].finish_reason == "tool_calls"

    with client.chat.completions.stream(**asked) as stream:
        deltas = [
            event.arguments_delta
            for event in stream
            if event.type == "tool_calls.function.arguments.delta"
        ]
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed is not None and streamed[0].function == calls[0].function
    assert "".join(deltas) == calls[0].function.arguments
    assert len(deltas) > 1

    answer = client.chat.completions.create(
        **GREEDY,
        messages=[
            *WEATHER,
            parsed.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": calls[0].id, "content": "written down"},
        ],
        tools=asked["tools"],
        tool_choice="none",
        max_tokens=8,
    )
    assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls


def test_responses(client: openai.OpenAI) -> None:
    asked: Any = GREEDY | {
        "instructions": "Answer in one sentence.",
        "input": "What is the capital of France?",
        "max_output_tokens": 24,
        "store": False,
    }
    whole = client.responses.create(**asked)
    assert "Paris" in whole.output_text
    assert whole.status in ("completed", "incomplete")
    assert whole.usage is not None and 0 < whole.usage.output_tokens <= 24
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == f"response.{whole.status}"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    with client.responses.stream(**asked) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == whole.output_text

    again = client.responses.create(
        **GREEDY,
        input=[
            {"role": "user", "content": asked["input"]},
            *[item.model_dump() for item in whole.output],
            {"role": "user", "content": [{"type": "input_text", "text": "And of Germany?"}]},
        ],
        max_output_tokens=24,
    )
    assert "Berlin" in again.output_text


def test_responses_structured(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(
        **GREEDY, input=WEATHER[0]["content"], text_format=Reading, max_output_tokens=100
    )
    assert isinstance(parsed.output_parsed, Reading)

    asked: Any = GREEDY | {
        "input": WEATHER[0]["content"],
        "tools": [RESPONSES_TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    whole = client.responses.create(**asked)
    call = whole.output[-1]
    assert isinstance(call, ResponseFunctionToolCall) and call.name == "report"
    Reading.model_validate_json(call.arguments)
    with client.responses.stream(**asked) as stream:
        deltas = [
            event.delta
            for event in stream
            if event.type == "response.function_call_arguments.delta"
        ]
        final = stream.get_final_response().output[-1]
    assert isinstance(final, ResponseFunctionToolCall)
    assert "".join(deltas) == final.arguments == call.arguments

    answer = client.responses.create(
        **GREEDY,
        input=[
            *WEATHER,
            call.model_dump(),
            {"type": "function_call_output", "call_id": call.call_id, "output": "written down"},
        ],
        tools=[RESPONSES_TOOL],
        tool_choice="none",
        max_output_tokens=16,
    )
    assert answer.output_text


def test_embeddings(client: openai.OpenAI) -> None:
    texts = ["A cat sleeps.", "A kitten naps.", "Interest rates rose by two per cent."]
    answer = client.embeddings.create(model=MODEL, input=texts)  # in base64
    vectors = [entry.embedding for entry in answer.data]
    assert [entry.index for entry in answer.data] == [0, 1, 2]
    assert all(abs(cosine(vector, vector) - 1) < 1e-4 for vector in vectors)
    assert cosine(vectors[0], vectors[1]) > cosine(vectors[0], vectors[2])
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    plain = client.embeddings.create(model=MODEL, input=texts[0], encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(vectors[0], abs=1e-6)
    short = client.embeddings.create(model=MODEL, input=texts[0], dimensions=64)
    assert len(short.data[0].embedding) == 64


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_errors(client: openai.OpenAI, server: ServerProcess) -> None:
    chat = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as caught:
        chat(model=MODEL, messages=QUESTION, temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="Hi", max_output_tokens=0)
    assert caught.value.param == "max_output_tokens"
    with pytest.raises(openai.BadRequestError, match="context") as caught:
        client.embeddings.create(model=MODEL, input="word " * 3000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        chat(model="gpt-9", messages=QUESTION)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")
    stranger = client.with_options(api_key="wrong")
    for ask in (
        lambda: stranger.models.list(),
        lambda: stranger.chat.completions.create(model=MODEL, messages=QUESTION, stream=True),
        lambda: stranger.embeddings.create(model=MODEL, input="Hi"),
    ):
        with pytest.raises(openai.AuthenticationError):
            ask()


def test_a_full_queue_is_a_rate_limit_and_retried(tiny_server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key="unused", max_retries=0)
    asked: Any = {"model": "tiny", "prompt": "a"}
    endless = {"ignore_eos": True}
    with client.completions.create(
        **asked, max_tokens=20_000, n=8, stream=True, extra_body=endless
    ) as stream:
        next(stream)
        with pytest.raises(openai.RateLimitError) as caught:  # 6 of 8 wait; 3 more are too many
            client.completions.create(**asked, max_tokens=1, n=3)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        leave = threading.Timer(0.2, stream.close)
        leave.start()
        patient = client.with_options(max_retries=8)
        assert len(patient.completions.create(**asked, max_tokens=1, n=3).choices) == 3
        leave.join()


def test_async(client: openai.OpenAI, server: ServerProcess) -> None:
    asked: Any = GREEDY | {"messages": QUESTION, "max_tokens": 12}
    expected = client.chat.completions.create(**asked).choices[0].message.content

    async def chat(other: openai.AsyncOpenAI) -> str | None:
        return (await other.chat.completions.create(**asked)).choices[0].message.content

    async def streamed(other: openai.AsyncOpenAI) -> str:
        stream = await other.chat.completions.create(**asked, stream=True)
        return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

    async def response(other: openai.AsyncOpenAI) -> str:
        async with other.responses.stream(**GREEDY, input=QUESTION, max_output_tokens=12) as stream:
            async for _ in stream:
                pass
            return (await stream.get_final_response()).output_text

    async def run() -> list[Any]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as other:
            texts = await asyncio.gather(chat(other), streamed(other), response(other))
            vectors = await other.embeddings.create(model=MODEL, input=["a", "b"])
            parsed = await other.chat.completions.parse(
                **GREEDY, messages=WEATHER, response_format=Reading
            )
            with pytest.raises(openai.BadRequestError):
                await other.completions.create(model=MODEL, prompt="a", max_tokens=-1)
            models = [model.id async for model in other.models.list()]
            return [texts, len(vectors.data), parsed.choices[0].message.parsed, models]

    texts, count, parsed, models = asyncio.run(run())
    assert texts == [expected] * 3
    assert count == 2 and isinstance(parsed, Reading) and models == [MODEL]
