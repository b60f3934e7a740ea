"""Instructor's modes that lean on the server's grammars."""

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest

from clients.common import KEY, MODEL, WEATHER, Reading, needs
from processes.server_process import ServerProcess

pytestmark = [pytest.mark.slow, needs("instructor")]

ASKED: Any = {
    "model": MODEL,
    "messages": WEATHER,
    "response_model": Reading,
    "temperature": 0,
    "max_retries": 0,
}


@pytest.fixture(params=["JSON_SCHEMA", "TOOLS", "TOOLS_STRICT"])
def patched(request: pytest.FixtureRequest, server: ServerProcess) -> Callable[[Any], Any]:
    """Wraps a client class of openai."""
    import instructor

    mode = instructor.Mode[request.param]

    def wrap(kind: Any) -> Any:
        client = kind(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
        return instructor.from_openai(client, mode=mode)

    return wrap


def test_instructor_gives_objects(patched: Callable[[Any], Any]) -> None:
    client = patched(openai.OpenAI)
    reading, raw = client.chat.completions.create_with_completion(**ASKED)
    assert isinstance(reading, Reading)
    assert raw.usage.completion_tokens > 5
    *partial, last = client.chat.completions.create_partial(**ASKED)
    assert partial and last.model_dump() == reading.model_dump()

    other = patched(openai.AsyncOpenAI)
    again = asyncio.run(other.chat.completions.create(**ASKED))
    assert again.model_dump() == reading.model_dump()
