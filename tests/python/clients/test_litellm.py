"""LiteLLM as ``openai/`` and as ``hosted_vllm/``."""

import asyncio
from typing import Any

import pytest

from clients.common import KEY, MODEL, QUESTION, TOOL, WEATHER, Reading, cosine, needs
from processes.server_process import ServerProcess

pytestmark = [pytest.mark.slow, needs("litellm")]


@pytest.fixture(scope="module")
def litellm() -> Any:
    import litellm

    return litellm


@pytest.fixture(params=["openai", "hosted_vllm"])
def options(request: pytest.FixtureRequest, server: ServerProcess) -> dict[str, Any]:
    return {
        "model": f"{request.param}/{MODEL}",
        "api_base": f"{server.url}/v1",
        "api_key": KEY,
        "num_retries": 0,
    }


def test_completion(litellm: Any, options: dict[str, Any]) -> None:
    asked = options | {"messages": QUESTION, "temperature": 0, "max_tokens": 24}
    whole = litellm.completion(**asked)
    text = whole.choices[0].message.content
    assert "Paris" in text
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert litellm.stream_chunk_builder(chunks).choices[0].message.content == text

    async def run() -> str:
        return str((await litellm.acompletion(**asked)).choices[0].message.content)

    assert asyncio.run(run()) == text


def test_text_completion(litellm: Any, options: dict[str, Any]) -> None:
    whole = litellm.text_completion(
        **options, prompt="The capital of France is", temperature=0, max_tokens=6
    )
    assert "Paris" in whole.choices[0].text


def test_tools_and_schemas(litellm: Any, options: dict[str, Any]) -> None:
    asked = options | {"messages": WEATHER, "temperature": 0}
    whole = litellm.completion(**asked, tools=[TOOL], tool_choice="required")
    calls = whole.choices[0].message.tool_calls
    assert calls[0].function.name == "report"
    Reading.model_validate_json(calls[0].function.arguments)
    chunks = list(litellm.completion(**asked, tools=[TOOL], tool_choice="required", stream=True))
    rebuilt = litellm.stream_chunk_builder(chunks).choices[0]
    assert rebuilt.finish_reason == "tool_calls"
    assert [c.function for c in rebuilt.message.tool_calls] == [c.function for c in calls]
    parsed = litellm.completion(**asked, response_format=Reading)
    Reading.model_validate_json(parsed.choices[0].message.content)


def test_responses(litellm: Any, options: dict[str, Any]) -> None:
    asked = options | {
        "input": "What is the capital of France?",
        "temperature": 0,
        "max_output_tokens": 24,
    }
    whole = litellm.responses(**asked)
    assert "Paris" in whole.output[-1].content[0].text


def test_embedding(litellm: Any, options: dict[str, Any]) -> None:
    answer = litellm.embedding(**options, input=["A cat sleeps.", "A kitten naps."])
    first, second = (entry["embedding"] for entry in answer.data)
    assert abs(cosine(first, first) - 1) < 1e-4
    assert -1 < cosine(first, second) < 0.9999


def test_rerank(litellm: Any, server: ServerProcess) -> None:
    answer = litellm.rerank(
        model=f"hosted_vllm/{MODEL}",
        api_base=server.url,
        api_key=KEY,
        query="The capital of France is",
        documents=[" xylophone banana", " Paris"],
    )
    assert [result["index"] for result in answer.results] == [1, 0]


def test_errors(litellm: Any, options: dict[str, Any]) -> None:
    asked = options | {"messages": QUESTION}
    with pytest.raises(litellm.BadRequestError, match="top_p"):
        litellm.completion(**asked, top_p=7)
    provider = options["model"].partition("/")[0]
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**(asked | {"model": f"{provider}/other"}))
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**(asked | {"api_key": "wrong"}))
