"""LangChain's package for OpenAI."""

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import openai
import pytest

from clients.common import KEY, MODEL, QUESTION, TOOL, WEATHER, Reading, cosine, needs
from processes.server_process import ServerProcess

pytestmark = [pytest.mark.slow, needs("langchain_openai")]


@pytest.fixture(scope="module")
def langchain() -> Any:
    import langchain_openai

    return langchain_openai


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for all: the package keeps its connections from one model to the next."""
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def options(server: ServerProcess) -> dict[str, Any]:
    return {"model": MODEL, "base_url": f"{server.url}/v1", "api_key": KEY, "max_retries": 0}


@pytest.fixture(scope="module", params=["chat completions", "responses"])
def chat(request: pytest.FixtureRequest, langchain: Any, options: dict[str, Any]) -> Any:
    return langchain.ChatOpenAI(
        **options,
        temperature=0,
        max_tokens=24,
        stream_usage=True,
        use_responses_api=request.param == "responses",
    )


def test_chat(chat: Any, runner: asyncio.Runner) -> None:
    whole = chat.invoke(QUESTION)
    assert "Paris" in whole.text
    usage = whole.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    chunks = list(chat.stream(QUESTION))
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    assert joined.text == whole.text
    assert joined.usage_metadata["output_tokens"] == usage["output_tokens"]
    assert [answer.text for answer in chat.batch([QUESTION, QUESTION])] == [whole.text] * 2

    async def run() -> str:
        return "".join([chunk.text async for chunk in chat.astream(QUESTION)])

    assert runner.run(run()) == whole.text


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat: Any, method: str) -> None:
    model = chat.model_copy(update={"max_tokens": 200})
    answer = model.with_structured_output(Reading, method=method).invoke(WEATHER)
    assert isinstance(answer, Reading)


def test_tools(chat: Any) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    model = chat.model_copy(update={"max_tokens": 200})
    bound = model.bind_tools([TOOL], tool_choice="any", parallel_tool_calls=False)
    asked = HumanMessage(WEATHER[0]["content"])
    answer = bound.invoke([asked])
    [call] = answer.tool_calls
    assert call["name"] == "report"
    Reading.model_validate(call["args"])
    chunks = list(bound.stream([asked]))
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    assert [c["args"] for c in joined.tool_calls] == [call["args"]]
    result = ToolMessage("written down", tool_call_id=call["id"])
    again = chat.bind_tools([TOOL], tool_choice="none").invoke([asked, answer, result])
    assert again.text and not again.tool_calls


def test_logprobs(langchain: Any, options: dict[str, Any]) -> None:
    chat = langchain.ChatOpenAI(**options, temperature=0, max_tokens=4, logprobs=True)
    logprobs = chat.invoke(QUESTION).response_metadata["logprobs"]["content"]
    assert len(logprobs) == 4 and all(entry["logprob"] <= 0 for entry in logprobs)


# Their ids in OpenAI's vocabulary are in SmolLM2's, too.
TEXTS = ["The cat sat down.", "The dog sat down.", "Interest rates rose."]


def test_embeddings_of_texts(langchain: Any, options: dict[str, Any]) -> None:
    embeddings = langchain.OpenAIEmbeddings(**options, check_embedding_ctx_length=False)
    vectors = embeddings.embed_documents(TEXTS)
    assert cosine(vectors[0], vectors[1]) > cosine(vectors[0], vectors[2])
    assert embeddings.embed_query(TEXTS[0]) == pytest.approx(vectors[0], abs=1e-5)


def test_embeddings_of_token_ids(
    langchain: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless told otherwise it sends ids of OpenAI's vocabulary."""
    spec = find_spec("litellm")  # has a copy of that vocabulary, which else is fetched
    assert spec is not None and spec.origin is not None
    tokenizers = Path(spec.origin).parent / "litellm_core_utils" / "tokenizers"
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tokenizers))
    import tiktoken

    encoding = tiktoken.get_encoding("cl100k_base")
    embeddings = langchain.OpenAIEmbeddings(**options)
    vectors = embeddings.embed_documents(TEXTS)
    ids = [encoding.encode(text) for text in TEXTS]
    client = openai.OpenAI(base_url=options["base_url"], api_key=KEY)
    expected = client.embeddings.create(model=MODEL, input=ids)
    assert vectors == [pytest.approx(entry.embedding, abs=1e-5) for entry in expected.data]
    far = next(id for id in range(90_000, 91_000) if encoding.decode([id]).strip())
    with pytest.raises(openai.BadRequestError, match="input: token id"):
        embeddings.embed_query(encoding.decode([far]))
