"""What the OpenAPI document says holds for generated requests, valid and not: no 5xx, and every
answer as declared.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
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
from server.fakes import FakeEngine
from vllm_lite.server.options import ServerOptions

CHECKS = [
    not_a_server_error,
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
]
POSTS = 7  # routes that take a body


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
        response = case.call_and_validate(checks=CHECKS, **call)
        seen[operation.label, response.status_code] += 1

    one()


def test_a_hundred_requests_are_answered_as_the_document_says(client: Client) -> None:
    schema = schemathesis.openapi.from_asgi("/openapi.json", client.app)
    seen = run(schema, 100)
    assert sum(seen.values()) >= 100, seen
    assert client.engine.running == 0
