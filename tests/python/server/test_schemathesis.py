"""What the OpenAPI document says holds for generated requests, valid and not: no 5xx, and every
answer as declared.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from server.client import Client, LiveServer
from vllm_lite.server.options import ServerOptions

CHECKS = [
    not_a_server_error,
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
]
POSTS = 13  # routes that take a body


def run(schema: Any, examples: int, **call: Any) -> Counter[tuple[str, int]]:
    """Valid and invalid requests, ``examples`` in all, most for the routes that take a body."""
    seen: Counter[tuple[str, int]] = Counter()
    operations = [result.ok() for result in schema.get_all_operations()]
    for operation in operations:
        if operation.method == "post":
            each = examples // (2 * POSTS)
            check(operation, GenerationMode.POSITIVE, each, seen, call)
            check(operation, GenerationMode.NEGATIVE, each, seen, call)
        else:
            check(operation, GenerationMode.POSITIVE, 2, seen, call)
    assert sum(operation.method == "post" for operation in operations) == POSTS
    return seen


def check(
    operation: Any,
    mode: GenerationMode,
    examples: int,
    seen: Counter[tuple[str, int]],
    call: dict[str, Any],
) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def one(case: Any) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body.pop("model", None)  # whose name no document can tell
            for message in case.body.get("messages") or ():
                if message.get("content") is None:  # which only the assistant's may lack
                    message["content"] = "x"
            for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
                if (case.body.get(name) or 0) > 100:  # the context, too, is not in the document
                    case.body[name] = 8
        response = case.call_and_validate(checks=CHECKS, **call)
        seen[operation.label, response.status_code] += 1

    one()


def test_the_fake_engines_answers_are_as_the_document_says(client: Client) -> None:
    schema = schemathesis.openapi.from_asgi("/openapi.json", client.app)
    seen = run(schema, 78)
    assert sum(seen.values()) >= 70, seen
    assert {status for _, status in seen} >= {200, 400}
    assert client.engine.running == 0


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    from tiny_model import make_tiny_model
    from vllm_lite.async_engine import AsyncLLMEngine

    directory = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    engine = AsyncLLMEngine(str(directory), dtype="float32", max_model_len=256)
    server = LiveServer(engine, ServerOptions())  # type: ignore[arg-type]
    yield server
    server.close()
    engine.close()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_real_engines_answers_are_as_the_document_says(real: LiveServer) -> None:
    schema = schemathesis.openapi.from_url(f"{real.url}/openapi.json")
    seen = run(schema, 2000)
    assert sum(seen.values()) >= 1900, seen
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        assert seen[f"POST {path}", 200] >= 3, seen
